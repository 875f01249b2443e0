"""An ecology with blobs of every kind, for those who damage or forge it."""

from __future__ import annotations

import shutil

import pytest
import small_ecology as small
import torch

from torch_covnorm.ecology import Ecology


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A joint basis, trained parts, moments, examples, and domains without them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ecology = small.everything(tmp_path_factory.mktemp("made") / "house")
    torch.set_num_threads(threads)
    return ecology


@pytest.fixture(scope="module")
def whole(made):
    """Every part of every domain, as it must stay."""
    return {name: small.read(made, name) for name in made.domains}


@pytest.fixture
def house(made, tmp_path):
    return Ecology(shutil.copytree(made.folder, tmp_path / "house"))
