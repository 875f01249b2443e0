"""A worker process as the server sees it: start it, call it, probe it, replace it when it fails.

Everything runs on the event loop, except two threads per process: one reads the pipe and one writes
to it. So a worker that hangs with a full pipe does not block the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import queue
import threading
from collections.abc import Callable
from typing import Any

from ..ecology import Ecology
from ..threads import default_threads
from . import worker
from .errors import RequestError, WorkerDied
from .limits import Limits
from .log import LOG

PROBE = 2.0  # seconds between forward passes when the worker has nothing else to do
RECENT = 5.0  # seconds within which a reply is expected
START = 120.0  # seconds after which a worker that has not started is killed
RESTART = 0.2  # seconds before a restart; doubled after every failed start
LONGEST = 5.0  # seconds before a restart at most


def threads_of(limits: Limits) -> int:
    """Return the torch threads of a worker; 0 leaves it to torch, which reads the environment."""
    return limits.threads or default_threads(limits.workers) or 0


class WorkerProcess:
    """A worker process that is replaced whenever it ends.

    on_exit: called when a process has ended, before the next one starts. pid: of the current
    process; None until it has started. up: set once it has computed something. replied: time of its
    last computed reply, if there is one.
    """

    def __init__(self, ecology: Ecology, limits: Limits, on_exit: Callable[[], None]) -> None:
        self.ecology, self.limits, self._on_exit = ecology, limits, on_exit
        self.loop = asyncio.get_running_loop()
        self.pid: int | None = None
        self.restarts = 0
        self.replied: float | None = None
        self._busy_since: float | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._in_background: set[int] = set()
        self.up = asyncio.Event()
        self._failures = 0
        self._stopping = False
        self._watching = self.loop.create_task(self._watch())
        self._start()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        pipe, theirs = spawn.Pipe()
        opening = (str(self.ecology.folder), self.ecology.trust_code)
        arguments = (theirs, *opening, threads_of(self.limits))
        self._process = process = spawn.Process(target=worker.main, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._busy_since = self.loop.time()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        writer = threading.Thread(target=_write, args=(pipe, self._outbox), daemon=True)
        writer.start()
        given = (pipe, process, self._outbox, writer)
        threading.Thread(target=self._read, args=given, daemon=True).start()

    def _read(self, pipe: Any, process: Any, outbox: Any, writer: threading.Thread) -> None:
        """Read the worker's messages in a thread, until the pipe closes because it has ended."""
        with contextlib.suppress(EOFError, OSError, RuntimeError):
            while True:
                self.loop.call_soon_threadsafe(self._receive, process, pipe.recv())
        process.join()
        outbox.put(None)
        writer.join()
        pipe.close()  # only now, as both threads use it
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self.loop.call_soon_threadsafe(self._exited, process)

    def _receive(self, process: Any, message: tuple[Any, ...]) -> None:
        if process is not self._process:
            return
        word, *rest = message
        if word == "started":
            self.pid, self._busy_since = rest[0], None
            self._watching.cancel()
            self._watching = self.loop.create_task(self._watch())  # probes it immediately
        elif word == "unfit":
            LOG.error("worker", extra={"fields": {"unfit": rest[0]}})
        else:
            number, value, seconds = rest
            if (call := self._calls.pop(number, None)) and not call.done():
                call.set_result((value, seconds))

    def _exited(self, process: Any) -> None:
        if process is not self._process or self._stopping:
            return
        self._failures = 0 if self.up.is_set() else self._failures + 1
        self.up.clear()
        self.restarts += 1
        self.replied = self.pid = self._busy_since = None
        fields = {"ended": process.exitcode, "restarts": self.restarts}
        LOG.warning("worker", extra={"fields": fields})
        for call in self._calls.values():
            if not call.done():
                call.set_exception(WorkerDied())
        self._calls.clear()
        self._on_exit()
        self.loop.call_later(restart_delay(self._failures), self._restart)

    def _restart(self) -> None:
        if self._stopping:
            return
        try:
            self._start()
        except OSError as error:  # out of memory or processes: this may pass
            LOG.error("worker", extra={"fields": {"cannot start": str(error)}})
            self.loop.call_later(LONGEST, self._restart)

    # ── calls ────────────────────────────────────────────────────────────────────────────────

    def send(self, *message: Any) -> None:
        """Send a message that has no reply."""
        self._outbox.put(message)

    async def compute(self, word: str, *args: Any) -> tuple[Any, float]:
        """Run something on the worker's network; return its value and the seconds it took there.

        A worker that does not reply within `limits.hang` seconds is killed. Raises `WorkerDied`, or
        the error that the worker replied with.
        """
        number, future = self._call(word, *args)
        process = self._process
        if self._busy_since is None:
            self._busy_since = self.loop.time()
        try:
            done, _ = await asyncio.wait([future], timeout=self.limits.hang)
            if not done:
                self.replied = None  # not ready from now on
                process.kill()
            # The reader sees its end and fails this call like any other. Failing it here would be
            # too early: the caller would repeat it on the same process and lose it again.
            reply = await future
        finally:
            self._calls.pop(number, None)
            if process is self._process:
                self._busy_since = self.loop.time() if self._is_computing() else None
        alive = process is self._process and self.pid is not None  # it may have ended since
        if alive and (word != "probe" or reply[0] is True):
            self.replied = self.loop.time()
            self.up.set()
        return _value(reply)

    async def background(self, word: str, *args: Any) -> tuple[Any, float]:
        """Run something as `compute` does, for any duration, in a thread beside the network's."""
        number, future = self._call(word, *args)
        self._in_background.add(number)
        try:
            return _value(await future)
        finally:
            self._in_background.discard(number)
            self._calls.pop(number, None)

    def _call(self, word: str, *args: Any) -> tuple[int, asyncio.Future[Any]]:
        if self.pid is None:
            raise WorkerDied
        number, future = next(self._numbers), self.loop.create_future()
        self._calls[number] = future
        self.send(word, number, *args)
        return number, future

    def _is_computing(self) -> bool:
        return bool(self._calls.keys() - self._in_background)

    # ── health ───────────────────────────────────────────────────────────────────────────────

    def is_ready(self) -> bool:
        """Return whether a forward pass succeeded recently and none is overdue."""
        now = self.loop.time()
        overdue = self._busy_since is not None and now - self._busy_since > RECENT
        return self.replied is not None and not overdue and now - self.replied < RECENT + PROBE

    async def _watch(self) -> None:
        while True:
            began = self._busy_since
            if self.pid is not None and not self._is_computing():
                await self._probe()
            elif self.pid is None and began and self.loop.time() - began > START:
                self._process.kill()
            await asyncio.sleep(PROBE)

    async def _probe(self) -> None:
        why = "the output is not finite"
        try:
            if (await self.compute("probe"))[0]:
                return
        except WorkerDied:
            return
        except RequestError as error:
            why = error.message
        LOG.error("probe", extra={"fields": {"why": why}})

    async def stop(self) -> None:
        """End the process, and start no other."""
        self._stopping = True
        self._watching.cancel()
        self.send("stop")
        await asyncio.to_thread(self._process.join, 5.0)
        if self._process.is_alive():
            self._process.kill()


def restart_delay(failures: int) -> float:
    """Return the seconds before a restart, after so many failed starts in a row."""
    return float(min(LONGEST, RESTART * 2 ** min(failures, 10)))


def _value(reply: tuple[Any, float]) -> tuple[Any, float]:
    if isinstance(reply[0], Exception):
        raise reply[0]
    return reply


def _write(pipe: Any, outbox: queue.SimpleQueue[Any]) -> None:
    """Write the outbox to the pipe in a thread, until it holds None."""
    with contextlib.suppress(OSError):  # the pipe is broken: the reader notices it too
        while (message := outbox.get()) is not None:
            pipe.send(message)
