"""Admission by the measured pace: what updates the pace, and what is rejected."""

from __future__ import annotations

import asyncio

import pytest

from torch_covnorm.ecology import Ecology
from torch_covnorm.serve import Limits
from torch_covnorm.serve.engine import Engine
from torch_covnorm.serve.errors import RequestError


def test_the_pace_is_learned_from_results_only_and_limits_the_queue(house: Ecology, photo: bytes):
    async def run() -> None:
        engine = Engine(house, Limits(threads=1, batch=4, deadline=60.0))
        try:
            await engine.predict("roses", photo, 1)
            assert engine.pace == 0.0  # there was no queue
            bad = [engine.predict("roses", b"no image", 1) for _ in range(12)]
            errors = await asyncio.gather(*bad, return_exceptions=True)
            assert {getattr(r, "reason", r) for r in errors} == {"bad_image"}
            assert engine.pace == 0.0
            await asyncio.gather(*(engine.predict("roses", photo, 1) for _ in range(12)))
            assert 0.0 < engine.pace < 60.0
            engine.pace = (
                20.0  # one waiting image means 20 s of work, two mean 40 s; 30 s are allowed
            )
            first, second = (asyncio.ensure_future(engine.predict("roses", photo, 1)) for _ in "ab")
            await asyncio.sleep(0)
            with pytest.raises(RequestError) as error:
                await engine.predict("roses", photo, 1)
            assert error.value.status == 429
            await asyncio.gather(first, second)
        finally:
            await engine.stop()

    asyncio.run(run())
