"""A worker process as the server sees it: when it counts as up, and when it is restarted."""

from __future__ import annotations

import asyncio
import os
import queue
import signal

import pytest
import torch

from torch_covnorm.ecology import Ecology
from torch_covnorm.serve import Limits
from torch_covnorm.serve.errors import RequestError
from torch_covnorm.serve.log import LOG
from torch_covnorm.serve.process import LONGEST, RESTART, WorkerProcess, restart_delay
from torch_covnorm.serve.worker import Worker


def test_the_pause_before_a_restart_grows_to_its_limit_and_stays():
    assert restart_delay(0) == RESTART
    assert restart_delay(1) == 2 * RESTART
    assert restart_delay(20) == restart_delay(5000) == LONGEST


@pytest.mark.parametrize("ends", [False, True])
def test_a_probe_that_fails_or_a_worker_that_ended_is_not_up(house: Ecology, ends: bool):
    """The worker is real; only its reply to the second probe is made up."""

    async def run() -> None:
        process = WorkerProcess(house, Limits(threads=1), lambda: None)
        await asyncio.wait_for(process.up.wait(), 60)
        assert process.is_ready()
        process.replied, outbox = None, process._outbox
        process.up.clear()
        process._outbox = queue.SimpleQueue()
        call = asyncio.create_task(process.compute("probe"))
        await asyncio.sleep(0)
        word, number = process._outbox.get_nowait()
        assert word == "probe"
        process._receive(process._process, ("result", number, ends, 0.0))
        if ends:  # its reply is good, but it has ended before the reply is handled
            process._stopping, process.pid = True, None
        await call
        assert not process.up.is_set()
        assert not process.is_ready()
        process._outbox = outbox
        await process.stop()

    asyncio.run(run())


def test_a_network_whose_output_is_not_finite_fails_the_probe(house: Ecology):
    worker = Worker(None, house)  # type: ignore[arg-type]
    assert worker._probe() is True
    with torch.no_grad():
        next(worker.net.backbone.parameters()).fill_(float("nan"))
    assert worker._probe() is False


def test_a_network_that_accepts_one_size_only_is_probed_at_that_size(house: Ecology):
    worker = Worker(None, house)  # type: ignore[arg-type]
    sides, size = [], worker.preprocessing["size"]

    def picky(_: object, inputs: tuple[torch.Tensor]) -> None:
        sides.append(inputs[0].shape[-1])
        if sides[-1] != size:
            raise ValueError(f"{sides[-1]} pixels")

    hook = worker.net.backbone.register_forward_pre_hook(picky)
    assert worker._probe() is True
    assert worker._probe() is True
    assert sides == [64, size, size]
    hook.remove()
    worker.net.backbone.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker._probe()


def test_why_a_probe_fails_is_logged(house: Ecology, caplog):
    async def run() -> None:
        process = WorkerProcess(house, Limits(threads=1), lambda: None)
        await asyncio.wait_for(process.up.wait(), 60)
        for reply in (RequestError("failed", "ValueError: 64 pixels"), False):

            async def compute(_: str, reply: object = reply) -> tuple[object, float]:
                if isinstance(reply, Exception):
                    raise reply
                return reply, 0.0

            process.compute = compute  # type: ignore[assignment, method-assign]
            await process._probe()
        await process.stop()

    with caplog.at_level("ERROR", logger=LOG.name):
        LOG.propagate, was = True, LOG.propagate
        asyncio.run(run())
        LOG.propagate = was
    why = [record.fields["why"] for record in caplog.records if record.message == "probe"]
    assert why == ["ValueError: 64 pixels", "the output is not finite"]


def test_a_worker_that_cannot_be_started_is_retried(house: Ecology, monkeypatch, caplog):
    """Without memory for a process, this is logged and retried until there is some."""
    monkeypatch.setattr("torch_covnorm.serve.process.LONGEST", 0.05)

    async def run() -> None:
        process = WorkerProcess(house, Limits(threads=1), lambda: None)
        await asyncio.wait_for(process.up.wait(), 60)
        start, tries = process._start, []

        def starved() -> None:
            tries.append(1)
            if len(tries) < 3:
                raise OSError("no memory")
            start()

        monkeypatch.setattr(process, "_start", starved)
        first = process.pid
        os.kill(first, signal.SIGKILL)
        while process.pid in (first, None):
            await asyncio.sleep(0.01)
        await asyncio.wait_for(process.up.wait(), 60)
        assert len(tries) == 3
        assert process.is_ready()
        await process.stop()

    asyncio.run(run())
    fields = [r.fields for r in caplog.records if "cannot start" in getattr(r, "fields", {})]
    assert fields == [{"cannot start": "no memory"}] * 2
