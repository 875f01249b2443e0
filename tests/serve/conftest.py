"""One ecology and one server for all tests that change neither."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import houses
import pytest
import torch
from server import Server, running, wait_for

from torch_covnorm.ecology import Ecology


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Leave the other core to the servers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Ecology:
    """An ecology with every kind of domain. Tests do not change it."""
    return houses.house(tmp_path_factory.mktemp("house") / "house")


@pytest.fixture(scope="session")
def server(house: Ecology) -> Iterator[Server]:
    """The server that `covnorm serve` starts, with a deadline for busy machines."""
    with running(house.folder, "--deadline", 30) as server:
        yield server


@pytest.fixture
def writable(_writable: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """An ecology that tests may change, and its server; the domain "stays" always exists."""
    yield _writable
    ecology, server = _writable.ecology, _writable.server
    if left := [name for name in ecology.domains if name != "stays"]:
        ecology.remove(left, purge=True)
    if "stays" not in ecology.domains:  # the OpenAPI tests delete every domain
        houses.put(ecology, "stays", adapter="residual")
        wait_for(
            lambda: server.get("/v1/domains/stays").status == 200, "the domain is served again"
        )


@pytest.fixture(scope="session")
def _writable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("writable") / "house"
    ecology = houses.create(folder)
    houses.put(ecology, "stays", adapter="residual")
    with running(folder, "--deadline", 30, "--allow-writes") as server:
        yield SimpleNamespace(ecology=ecology, server=server)


@pytest.fixture(scope="session")
def photo() -> bytes:
    return houses.picture()
