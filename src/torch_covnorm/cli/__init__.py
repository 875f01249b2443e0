"""The command `covnorm`."""

from __future__ import annotations

from ..threads import wait_passively


def main() -> None:
    """Run the command, with threads set up before anything loads torch."""
    wait_passively()
    from .app import main as run

    run()
