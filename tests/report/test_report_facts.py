"""The report of a stored ecology, including domains that Python code stored."""

from __future__ import annotations

import pytest
import small_ecology as small

from torch_covnorm.ecology import Details
from torch_covnorm.report import facts_of
from torch_covnorm.report.page import render

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_a_domain_without_results_is_named_and_costs_no_report(tmp_path):
    house = small.everything(tmp_path / "house")
    net = house.network(small.backbone())
    for name in ("digits", "alone"):
        house.load(net, name)
        bare = Details({"method": "ra", "results": {"accuracy": {"final": None}}})
        house.put(net, {name: bare}, replace=True)
    facts = facts_of(house)
    assert sorted(facts["left_out"]) == ["alone", "digits"]
    assert sorted(d["name"] for d in facts["domains"]) == ["norms", "parity"]
    assert [b["domains"] for b in facts["bases"]] == [["digits", "parity"]]
    page = render(facts)
    assert all(f"<bdi>{name}</bdi>" in page for name in facts["left_out"])
    house.remove(["norms", "parity"])
    page = render(facts_of(house))
    assert "<bdi>digits</bdi>" in page
    assert "There are no domains yet" not in page
