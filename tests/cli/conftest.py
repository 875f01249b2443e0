"""An ecology that the command itself built, for all tests of the command."""

from __future__ import annotations

import pytest
from command import QUICK, covnorm, npz, photos


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """An ecology with two domains of real images: its parent folder, and what `add` printed."""
    place = tmp_path_factory.mktemp("built")
    photos(place / "photos")
    npz(place / "digits.npz")
    assert covnorm("init", place / "house").code == 0
    where = ("--ecology", place / "house")
    first = covnorm("add", "clipart", place / "photos", *QUICK, "--variance", 0.9, *where, "--json")
    second = covnorm("add", "digits", place / "digits.npz", *QUICK, "--budget", 0.005, *where)
    assert first.code == second.code == 0, first.err + second.err
    return place, first.json, second
