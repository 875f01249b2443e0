"""The server that the second processes of these tests are forked from."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """Start a fork server with torch. One thread in both: more threads round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
        patch.setenv("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest", "worker", "adder"])
        yield
    torch.set_num_threads(threads)
