"""A second process that a test can watch and kill."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any


class Child:
    """Run ``target(pipe, *args)`` in a fork of a server that has only imported torch.

    The target sends "begun" first, and its result last.
    """

    context = multiprocessing.get_context("forkserver")

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.pipe, end = self.context.Pipe()
        self.process = self.context.Process(target=target, args=(end, *args))
        self.process.start()
        end.close()
        assert self.receive() == "begun"

    def receive(self) -> Any:
        assert self.pipe.poll(60), "the child is silent"
        return self.pipe.recv()

    def result(self) -> Any:
        """Wait until the process has ended by itself; return the last thing it sent."""
        message = self.receive()
        self.process.join(60)
        return message

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(60)

    @property
    def was_killed(self) -> bool:
        self.process.join(60)
        return self.process.exitcode == -signal.SIGKILL
