"""The queue: earliest deadline first, one image size per batch, nothing past its deadline."""

from __future__ import annotations

import asyncio
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_covnorm.serve.errors import RequestError
from torch_covnorm.serve.queue import Queue, QueuedImage


def request(queue: Queue, deadline: float, side: int = 8, domain: str = "a") -> QueuedImage:
    """Put an image into the queue."""
    return queue.put(domain, torch.zeros(3, side, side, dtype=torch.uint8), 1, deadline)


def on_a_loop(test):
    """Run an async test."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


@on_a_loop
async def test_the_earliest_deadline_goes_first():
    queue = Queue(lambda: 0.0)
    late, soon, next_ = (request(queue, at) for at in (9.0, 1.0, 5.0))
    assert queue.take(2) == [soon, next_]
    assert queue.take(2) == [late]
    assert queue.take(2) == []


@on_a_loop
async def test_past_its_deadline_it_gets_504_and_is_never_computed():
    now = 0.0
    queue = Queue(lambda: now)
    late, good = request(queue, 1.0), request(queue, 3.0)
    now = 2.0
    assert queue.take(16) == [good]
    with pytest.raises(RequestError) as error:
        late.future.result()
    assert error.value.status == 504


@on_a_loop
async def test_a_cancelled_image_is_dropped():
    queue = Queue(lambda: 0.0)
    gone, good = request(queue, 1.0), request(queue, 2.0)
    gone.future.cancel()
    assert len(queue) == 1
    assert queue.take(16) == [good]


@on_a_loop
async def test_a_batch_has_one_size_and_the_others_keep_their_order():
    queue = Queue(lambda: 0.0)
    a, b, c, d = (request(queue, float(i + 1), side) for i, side in enumerate((8, 16, 8, 16)))
    assert queue.take(16) == [a, c]
    assert queue.take(16) == [b, d]


@on_a_loop
async def test_a_batch_is_filled_across_domains():
    queue = Queue(lambda: 0.0)
    made = [request(queue, 1.0, domain=name) for name in "abcab"]
    assert queue.take(4) == made[:4]


@on_a_loop
async def test_without_mixing_each_batch_has_one_domain():
    queue = Queue(lambda: 0.0, mixed=False)
    a, b, again = (request(queue, at, domain=d) for at, d in ((1.0, "a"), (2.0, "b"), (3.0, "a")))
    assert queue.take(16) == [a, again]
    assert queue.take(16) == [b]


@on_a_loop
async def test_a_full_batch_goes_at_once_and_a_small_one_when_its_first_has_waited():
    loop = asyncio.get_running_loop()
    queue = Queue(loop.time)
    made = [request(queue, loop.time() + 60) for _ in range(4)]
    assert await asyncio.wait_for(queue.next_batch(4, wait=30.0), 10) == made
    alone = request(queue, loop.time() + 60)
    start = loop.time()
    assert await asyncio.wait_for(queue.next_batch(4, wait=0.2), 10) == [alone]
    assert loop.time() - start > 0.1  # it waited for others


@on_a_loop
async def test_an_image_that_arrives_in_time_joins_the_batch():
    loop = asyncio.get_running_loop()
    queue = Queue(loop.time)
    first = request(queue, loop.time() + 60)
    second: list[QueuedImage] = []
    loop.call_later(0.05, lambda: second.append(request(queue, loop.time() + 60)))
    assert await asyncio.wait_for(queue.next_batch(2, wait=30.0), 10) == [first, *second]


@on_a_loop
async def test_draining_returns_all_waiting_images_in_order():
    queue = Queue(lambda: 0.0)
    made = [request(queue, at) for at in (3.0, 1.0, 2.0)]
    made[2].future.cancel()
    assert queue.drain() == [made[1], made[0]]
    assert len(queue) == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from((8, 16, 24)), st.booleans())),
    st.integers(1, 5),
    st.integers(0, 9),
)
@on_a_loop
async def test_every_image_is_taken_once_or_is_late(drawn, most, clock):
    queue = Queue(lambda: float(clock))
    made = []
    for deadline, side, gone in drawn:
        made.append(request(queue, float(deadline), side))
        if gone:
            made[-1].future.cancel()
    taken: list[QueuedImage] = []
    while batch := queue.take(most):
        assert len(batch) <= most
        assert len({r.size for r in batch}) == 1
        assert [r.deadline for r in batch] == sorted(r.deadline for r in batch)
        taken += batch
    alive = [r for r, (_, _, gone) in zip(made, drawn, strict=True) if not gone]
    assert len(taken) == len(set(map(id, taken)))
    for r in alive:
        late = r.deadline <= clock
        assert late == r.future.done()
        assert late == (r not in taken)
        if late:
            assert isinstance(r.future.exception(), RequestError)
