"""Shared set-up: repeatable seeds, and marks by what a test needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# What the tests of a folder need; `make test-fast` leaves them out, with those marked `slow`.
NEEDS = {"serve": "server", "browser": "browser", "faults": "kill"}
NEED_NOTHING = {"test_queue.py", "test_residents.py"}  # unit tests in those folders


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they need, from the folder they are in."""
    for item in items:
        need = NEEDS.get(item.path.parent.name)
        if need is not None and item.path.name not in NEED_NOTHING:
            item.add_marker(need)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def _empty_configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


@pytest.fixture(autouse=True)
def _no_configuration_of_the_user(
    _empty_configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests neither read nor change what the user has approved."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(_empty_configuration))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums over more threads round otherwise: the same bits need the same number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a domain."""
    import domain_files

    return domain_files.network().save_domain("flowers", tmp_path / "flowers")
