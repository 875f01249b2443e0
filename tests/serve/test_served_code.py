"""A backbone that is code is served by its user, and by others only with --trust-code."""

from __future__ import annotations

import io

import pytest
from PIL import Image
from server import Server, running
from small_ecology import facts

import torch_covnorm as cn
from torch_covnorm.ecology import Details, Ecology

SOURCE = """
from torch import nn

def net():
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    )
    net.preprocessing = {"size": 32, "mean": [0.5] * 3, "std": [0.2] * 3}
    return net
"""


@pytest.fixture
def house(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "nets.py").write_text(SOURCE)
    house = Ecology.create(tmp_path / "house", f"{tmp_path / 'nets.py'}:net")
    net: cn.MultiDomainNetwork = house.network()
    net.add_domain("a", classes=["x", "y"])
    house.put(net, {"a": Details(facts())})
    (tmp_path / "nets.py").unlink()
    return house


@pytest.mark.parametrize("who", ["the user who made it", "another, who trusts it"])
def test_workers_run_the_code(house, who, tmp_path, monkeypatch):
    trust = []
    if who != "the user who made it":
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
        with pytest.raises(AssertionError, match=r"did not start.*not approved"):
            Server(house.folder)
        trust = ["--trust-code"]
    png = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 10, 10)).save(png, "PNG")
    with running(house.folder, "--deadline", 30, *trust) as server:
        assert server.predict("a", png.getvalue()).best[0] in ("x", "y")
