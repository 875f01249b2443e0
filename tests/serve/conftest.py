"""One house and one server for all tests that leave both as they are."""

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
    """The servers have the other core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Ecology:
    """Every kind of domain; nobody changes it."""
    return houses.house(tmp_path_factory.mktemp("house") / "house")


@pytest.fixture(scope="session")
def server(house: Ecology) -> Iterator[Server]:
    """As `covnorm serve` starts it, with a deadline for busy machines."""
    with running(house.folder, "--deadline", 30) as server:
        yield server


@pytest.fixture
def writable(_writable: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """An ecology that changes, and its server, which lets clients write; "stays" always stays."""
    yield _writable
    ecology, server = _writable.ecology, _writable.server
    if left := [name for name in ecology.domains if name != "stays"]:
        ecology.remove(left)
    if "stays" not in ecology.domains:  # the OpenAPI tests delete what they find
        houses.put(ecology, "stays", adapter="residual")
        wait_for(lambda: server.get("/v1/domains/stays").status == 200, "it is there again")


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
