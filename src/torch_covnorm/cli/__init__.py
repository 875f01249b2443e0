"""The command `covnorm`."""

from .app import main as main
