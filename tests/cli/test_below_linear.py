"""A domain that ends below its linear head says so."""

from __future__ import annotations

import pytest

from torch_covnorm.cli.inspect import below_linear


def results(before, final, on="test"):
    return {"accuracy": {"before": before, "final": final}, "on": on}


@pytest.mark.parametrize(
    ("before", "final", "images", "noted"),
    [
        (73.3, 57.0, 300, True),
        (73.3, 70.5, 300, True),  # the standard error is 2.55
        (73.3, 71.0, 300, False),
        (73.3, 71.0, 3000, True),
        (73.3, 80.0, 300, False),
        (None, 57.0, 300, False),
        (73.3, None, 300, False),
        (73.3, 57.0, 0, False),
    ],
)
def test_a_domain_clearly_below_its_linear_head_says_so(before, final, images, noted):
    note = below_linear(results(before, final), images)
    assert (note is not None) == noted
    if note:
        assert f"{images:,} test images" in note
        assert "73.3 %" in note
        assert "--lr" in note
