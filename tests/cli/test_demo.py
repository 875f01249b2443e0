"""The demo's steps on few and small images."""

from __future__ import annotations

import pytest
from command import covnorm, npz

from torch_covnorm.cli import demo
from torch_covnorm.data import SAMPLES
from torch_covnorm.methods import smallest


@pytest.mark.slow
def test_the_demo_builds_an_ecology_and_resumes(tmp_path, monkeypatch):
    for name in SAMPLES:
        npz(tmp_path / f"{name}.npz", 80, 40, name)
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    monkeypatch.setattr(demo, "PIXELS", 32)
    monkeypatch.setattr(demo, "TRAINING", {"epochs": 1})
    monkeypatch.setattr(smallest, "BUDGETS", 4)  # candidates of the search: 32 take much longer
    house = tmp_path / "demo"
    first = covnorm("demo", house, "--json")
    assert first.code == 0, first.err
    result = first.json
    names = ["bare", "RA", "CovNorm", "smallest", "joint"]
    assert [row["name"].split()[0].strip(",") for row in result["rows"]] == names
    by_task = [list(accuracies.values()) for accuracies in result["tasks"].values()]
    means = [sum(column) / 4 for column in zip(*by_task, strict=True)]
    assert means == pytest.approx([row["accuracy"] for row in result["rows"]])
    ra, covnorm_, small, joint = result["rows"][1:]
    assert small["bytes"] < ra["bytes"]
    assert small["adapter"] <= ra["adapter"]
    assert ra["adapter"] == 311296
    assert covnorm_["adapter"] <= 311296 / 8
    assert covnorm_["of_bytes"] < 2
    assert joint["adapter"] < ra["adapter"]
    assert [s["task"] for s in result["switching"]] == [
        name for name in ("fashion", "digits", "sketches", "clipart") for _ in range(2)
    ]
    assert (house / "report.html").stat().st_size > 10_000
    assert covnorm("verify", "--ecology", house, "--json").json["ok"]
    manifest = (house / "ecology.json").read_bytes()
    again = covnorm("demo", house)
    assert again.code == 0
    assert again.err.count("already added") == 4
    assert (house / "ecology.json").read_bytes() == manifest
    assert "next steps:" in again.out
    other = covnorm("demo", house, "--seed", 1)
    assert other.code == 2
    assert "was made with --seed 0: choose another folder" in other.err
    assert "covnorm list --ecology" in again.out
