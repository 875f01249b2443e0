"""A worker process seen from the server: started, heard, spoken to, and replaced when it fails.

All on the event loop, but for two threads: one reads the pipe, one writes it, so that a worker that
hangs with its pipe full stops nobody else.
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

from . import worker
from .limits import Limits
from .log import LOG

PROBE = 2.0  # seconds between forward passes when nothing else is to do
LATELY = 5.0  # seconds within which an answer is expected
START = 120.0  # seconds after which a worker that has not begun is given up
RESTART = 0.2  # seconds before a worker is started again; twice as long each time it fails at once
LONGEST = 5.0


class Died(Exception):
    """The worker ended, or was ended, with something under way."""


class Process:
    """One worker process after the other.

    heard: called with every message that is no answer. ended: when a process is gone.
    answered: time of the last answer; None: the process that there is now has given none yet.
    """

    def __init__(
        self,
        folder: str,
        limits: Limits,
        heard: Callable[..., None],
        ended: Callable[[], None],
    ) -> None:
        self.folder, self.limits, self._told, self._told_end = folder, limits, heard, ended
        self.loop = asyncio.get_running_loop()
        self.pid: int | None = None
        self.restarts = 0
        self.answered: float | None = None
        self._busy_since: float | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._slow: set[int] = set()
        self._up = asyncio.Event()
        self._failures = 0
        self._stopping = False
        self._tasks = {self.loop.create_task(self._look())}
        self._start()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        arguments = (theirs, self.folder, self.limits.threads)
        self._process = spawn.Process(target=worker.main, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._busy_since = self.loop.time()
        writer = threading.Thread(target=_write, args=(self._pipe, self._out), daemon=True)
        given = (self._pipe, self._process, self._out, writer)
        writer.start()
        threading.Thread(target=self._read, args=given, daemon=True).start()

    def _read(self, pipe: Any, process: Any, out: Any, writer: threading.Thread) -> None:
        """The thread that hears the worker; its silence is its death."""
        with contextlib.suppress(EOFError, OSError, RuntimeError):
            while True:
                message = pipe.recv()
                self.loop.call_soon_threadsafe(self._heard, process, message)
        process.join()
        out.put(None)
        writer.join()
        pipe.close()  # behind both of its users
        with contextlib.suppress(RuntimeError):  # the loop may be gone too
            self.loop.call_soon_threadsafe(self._ended, process)

    def _heard(self, process: Any, message: tuple[Any, ...]) -> None:
        if process is not self._process:
            return
        word, *rest = message
        if word == "started":
            self.pid, self._busy_since = rest[0], None
            self._task(self._probe())
        elif word == "unfit":
            LOG.error("worker", extra={"said": {"unfit": rest[0]}})
        elif word == "did":
            number, answer, seconds = rest
            if (call := self._calls.pop(number, None)) and not call.done():
                call.set_result((answer, seconds))
        else:
            self._told(word, *rest)

    def _ended(self, process: Any) -> None:
        if process is not self._process or self._stopping:
            return
        self._failures = 0 if self._up.is_set() else self._failures + 1
        self._up.clear()
        self.restarts += 1
        self.answered = self.pid = self._busy_since = None
        code = process.exitcode
        LOG.warning("worker", extra={"said": {"ended": code, "restarts": self.restarts}})
        for call in self._calls.values():
            if not call.done():
                call.set_exception(Died())
        self._calls.clear()
        self._told_end()
        self.loop.call_later(pause(self._failures), self._start_again)

    def _start_again(self) -> None:
        if self._stopping:
            return
        try:
            self._start()
        except OSError as error:  # no memory, no processes: it may pass
            LOG.error("worker", extra={"said": {"cannot start": str(error)}})
            self.loop.call_later(LONGEST, self._start_again)

    # ── speaking ─────────────────────────────────────────────────────────────────────────────

    @property
    def is_up(self) -> bool:
        """Whether it has computed something."""
        return self._up.is_set()

    async def up(self) -> None:
        """Wait until it has."""
        await self._up.wait()

    def send(self, *message: Any) -> None:
        """Say something to which there is no answer."""
        self._out.put(message)

    async def call(self, word: str, *rest: Any) -> tuple[Any, float]:
        """Its answer, and the seconds that it took there; `Died` if it does not live to tell.

        For what its network computes: no answer for long means that it hangs, and ends it.
        """
        number, future = self._ask(word, *rest)
        process = self._process
        if self._busy_since is None:
            self._busy_since = self.loop.time()
        try:
            done, _ = await asyncio.wait([future], timeout=self.limits.hang)
            if not done:
                self.answered = None  # not ready from now on
                process.kill()
            # Its end is heard by the reader, and ends this call as any other: whoever was told
            # sooner would ask the same process again, and lose the second time too.
            answer: tuple[Any, float] = await future
        finally:
            self._calls.pop(number, None)
            if process is self._process:
                self._busy_since = self.loop.time() if self._waited_for() else None
        alive = process is self._process and self.pid is not None  # it may have ended since
        if alive and (word != "probe" or answer[0] is True):
            self.answered = self.loop.time()
            self._up.set()
        return answer

    async def work(self, word: str, *rest: Any) -> Any:
        """The answer to what may take its time, in a thread beside the network's."""
        number, future = self._ask(word, *rest)
        self._slow.add(number)
        try:
            return (await future)[0]
        finally:
            self._slow.discard(number)
            self._calls.pop(number, None)

    def _ask(self, word: str, *rest: Any) -> tuple[int, asyncio.Future[Any]]:
        if self.pid is None:
            raise Died
        number, future = next(self._numbers), self.loop.create_future()
        self._calls[number] = future
        self.send(word, number, *rest)
        return number, future

    def _waited_for(self) -> bool:
        return bool(self._calls.keys() - self._slow)

    # ── looking after it ─────────────────────────────────────────────────────────────────────

    def is_ready(self) -> bool:
        """Whether a real forward pass was answered lately, and none is overdue."""
        now = self.loop.time()
        overdue = self._busy_since is not None and now - self._busy_since > LATELY
        return self.answered is not None and not overdue and now - self.answered < LATELY + PROBE

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(PROBE)
            began = self._busy_since
            if self.pid is not None and not self._waited_for():
                await self._probe()
            elif self.pid is None and began and self.loop.time() - began > START:
                self._process.kill()

    async def _probe(self) -> None:
        with contextlib.suppress(Died):
            answer, _ = await self.call("probe")
            if answer is not True:
                why = answer[1] if answer else "its answers are no numbers"
                LOG.error("probe", extra={"said": {"why": why}})

    def _task(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """End it, with everything that it has."""
        self._stopping = True
        for task in list(self._tasks):
            task.cancel()
        self.send("stop")
        await asyncio.to_thread(self._process.join, 5.0)
        if self._process.is_alive():
            self._process.kill()


def pause(failures: int) -> float:
    """Seconds before a worker is started again, so many having failed at once."""
    return float(min(LONGEST, RESTART * 2 ** min(failures, 10)))


def _write(pipe: Any, out: queue.SimpleQueue[Any]) -> None:
    """The thread that speaks to the worker, until there is nothing more to say."""
    with contextlib.suppress(OSError):  # broken: the reader hears of it too
        while (message := out.get()) is not None:
            pipe.send(message)
