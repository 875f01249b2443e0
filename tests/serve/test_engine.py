"""Admission by the pace of late: what it learns from, and what it refuses."""

from __future__ import annotations

import asyncio

import pytest

from torch_covnorm.ecology import Ecology
from torch_covnorm.serve import Limits
from torch_covnorm.serve.engine import Engine
from torch_covnorm.serve.refusals import Refused


def test_the_pace_is_learned_from_answers_alone_and_decides_who_may_wait(
    house: Ecology, photo: bytes
):
    async def run() -> None:
        engine = Engine(house, Limits(threads=1, batch=4, deadline=60.0))
        engine.run()
        try:
            await engine.ask("roses", photo, 1)
            assert engine.pace == 0.0  # there was no queue
            bad = [engine.ask("roses", b"no image", 1) for _ in range(12)]
            refused = await asyncio.gather(*bad, return_exceptions=True)
            assert {getattr(r, "reason", r) for r in refused} == {"bad_image"}
            assert engine.pace == 0.0
            await asyncio.gather(*(engine.ask("roses", photo, 1) for _ in range(12)))
            assert 0.0 < engine.pace < 60.0
            engine.pace = 20.0  # one that waits takes 20 s of the 30 that may wait, two 40
            first, second = (asyncio.ensure_future(engine.ask("roses", photo, 1)) for _ in "ab")
            await asyncio.sleep(0)
            with pytest.raises(Refused) as refusal:
                await engine.ask("roses", photo, 1)
            assert refusal.value.status == 429
            await asyncio.gather(first, second)
        finally:
            await engine.stop()

    asyncio.run(run())
