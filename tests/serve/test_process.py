"""A worker process seen from the server: when it counts as up, and when it is started again."""

from __future__ import annotations

import asyncio
import os
import queue
import signal

import pytest
import torch

from torch_covnorm.ecology import Ecology
from torch_covnorm.serve import Limits
from torch_covnorm.serve.log import LOG
from torch_covnorm.serve.process import LONGEST, RESTART, Process, pause
from torch_covnorm.serve.worker import Worker


def test_the_pause_before_a_restart_grows_to_its_limit_and_stays():
    assert pause(0) == RESTART
    assert pause(1) == 2 * RESTART
    assert pause(20) == pause(5000) == LONGEST


@pytest.mark.parametrize("ends", [False, True])
def test_a_probe_that_fails_or_a_worker_that_ended_is_not_up(house: Ecology, ends: bool):
    """The worker is real; what it answers to the second probe is said in its place."""

    async def run() -> None:
        process = Process(str(house.folder), Limits(threads=1), lambda *_: None, lambda: None)
        await asyncio.wait_for(process.up(), 60)
        assert process.is_ready()
        process.answered, own = None, process._out
        process._up.clear()
        process._out = queue.SimpleQueue()
        call = asyncio.create_task(process.call("probe"))
        await asyncio.sleep(0)
        word, number = process._out.get_nowait()
        assert word == "probe"
        process._heard(process._process, ("did", number, ends, 0.0))
        if ends:  # it answers well, but is gone before the answer is taken up
            process._stopping, process.pid = True, None
        await call
        assert not process.is_up
        assert not process.is_ready()
        process._out = own
        await process.stop()

    asyncio.run(run())


def test_a_network_whose_answers_are_no_numbers_fails_the_probe(house: Ecology):
    worker = Worker(None, house)  # type: ignore[arg-type]
    assert worker._probe() is True
    with torch.no_grad():
        next(worker.net.backbone.parameters()).fill_(float("nan"))
    assert worker._probe() is False


def test_a_network_of_one_size_alone_is_probed_at_it(house: Ecology):
    worker = Worker(None, house)  # type: ignore[arg-type]
    sides, own = [], worker.how["size"]

    def picky(_: object, inputs: tuple[torch.Tensor]) -> None:
        sides.append(inputs[0].shape[-1])
        if sides[-1] != own:
            raise ValueError(f"{sides[-1]} pixels")

    hook = worker.net.backbone.register_forward_pre_hook(picky)
    assert worker._probe() is True
    assert worker._probe() is True
    assert sides == [64, own, own]
    hook.remove()
    worker.net.backbone.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker._probe()


def test_why_a_probe_fails_is_logged(house: Ecology, caplog):
    async def run() -> None:
        process = Process(str(house.folder), Limits(threads=1), lambda *_: None, lambda: None)
        await asyncio.wait_for(process.up(), 60)
        for answer in (("failed", "ValueError: 64 pixels"), False):

            async def call(_: str, said: object = answer) -> tuple[object, float]:
                return said, 0.0

            process.call = call  # type: ignore[assignment, method-assign]
            await process._probe()
        await process.stop()

    with caplog.at_level("ERROR", logger=LOG.name):
        LOG.propagate, was = True, LOG.propagate
        asyncio.run(run())
        LOG.propagate = was
    why = [record.said["why"] for record in caplog.records if record.message == "probe"]
    assert why == ["ValueError: 64 pixels", "its answers are no numbers"]


def test_a_worker_that_cannot_be_started_is_tried_again(house: Ecology, monkeypatch, caplog):
    """No memory for a process once: said, and mended by itself when there is some."""
    monkeypatch.setattr("torch_covnorm.serve.process.LONGEST", 0.05)

    async def run() -> None:
        process = Process(str(house.folder), Limits(threads=1), lambda *_: None, lambda: None)
        await asyncio.wait_for(process.up(), 60)
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
        await asyncio.wait_for(process.up(), 60)
        assert len(tries) == 3
        assert process.is_ready()
        await process.stop()

    asyncio.run(run())
    said = [r.said for r in caplog.records if "cannot start" in getattr(r, "said", {})]
    assert said == [{"cannot start": "no memory"}] * 2
