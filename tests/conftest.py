"""Shared set-up: repeatable seeds, and timm on machines whose torch is a CPU build."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def _declare_torchvision_operators() -> object | None:
    """torchvision's wheel is a CUDA build: beside a CPU torch it fails to import because two
    operators are missing. Declaring their schemas is enough; nothing here calls them."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    except ImportError:
        pass
    return None


# What the tests of a folder need; `make test-fast` leaves them out, with those marked `slow`.
NEEDS = {"serve": "server", "browser": "browser", "faults": "kill"}
NEED_NOTHING = {"test_queue.py", "test_residents.py"}  # unit tests in those folders


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they need, from the folder they are in."""
    for item in items:
        need = NEEDS.get(item.path.parent.name)
        if need is not None and item.path.name not in NEED_NOTHING:
            item.add_marker(need)


_LIBRARY = _declare_torchvision_operators()  # must outlive the tests


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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
