"""``python -m torch_covnorm`` is the command `covnorm`."""

from .cli import main

if __name__ == "__main__":
    main()
