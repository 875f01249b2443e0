"""Stores and domain files of version 0.1, written before the package was reorganised, still open.

``tests/fixtures/first-format`` was made by that version and is never rewritten: an ecology with
joint, compressed, int8, norms-only and masked domains, one domain folder per adapter kind, a basis
with two domains, and the answers that 0.1 gave.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import domain_files
import numpy as np
import pytest
import safetensors.torch
import small_ecology
import torch
from PIL import Image

import torch_covnorm as cn
from torch_covnorm import CovNormError
from torch_covnorm.ecology import Ecology, verify

FOLDER = Path(__file__).parents[1] / "fixtures" / "first-format"
ANSWERS = safetensors.torch.load_file(FOLDER / "answers.safetensors")
HOUSE = [key.removeprefix("house/") for key in ANSWERS if key.startswith("house/")]
DOMAINS = [key.removeprefix("domains/") for key in ANSWERS if key.startswith("domains/")]


def weighted(backbone: torch.nn.Module, file: str) -> torch.nn.Module:
    """The backbone with the weights of the fixture, whatever torch's random numbers are."""
    backbone.load_state_dict(safetensors.torch.load_file(FOLDER / file))
    return backbone.eval()


@pytest.fixture
def house(tmp_path: Path) -> Ecology:
    return Ecology(shutil.copytree(FOLDER / "house", tmp_path / "house"))


@torch.inference_mode()
def assert_answers(net: cn.MultiDomainNetwork, name: str, images: str, expected: str) -> None:
    found = net.eval()(ANSWERS[images], domain=name)
    torch.testing.assert_close(found, ANSWERS[expected], rtol=1e-4, atol=1e-4)


def test_every_domain_of_the_old_store_gives_its_old_answers(house):
    assert len(HOUSE) >= 6
    assert sorted(house.domains) == sorted(HOUSE)
    net = house.network(weighted(small_ecology.backbone(), "house-backbone.safetensors"))
    for name in HOUSE:
        house.load(net, name)
        assert_answers(net, name, "house-images", f"house/{name}")
        details = house.details(name)
        assert {"method", "settings", "source", "results", "history"} <= set(details)
    assert house.moments("digits")
    assert house.examples("digits")


def test_an_old_domain_still_drops_alpha_and_a_new_one_does_not(house, tmp_path):
    """Its record has no background, because 0.1 did not composite: pixels must not change."""
    from torch_covnorm.data import load_image
    from torch_covnorm.ecology.prediction import preprocessing, read_inputs

    net = house.network(weighted(small_ecology.backbone(), "house-backbone.safetensors"))
    stored = house.load(net, "digits").preprocessing
    assert "background" not in stored
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "alpha.png")
    Image.fromarray(pixels[..., :3].copy()).save(tmp_path / "plain.png")
    alpha, plain = read_inputs(net, "digits", [tmp_path / "alpha.png", tmp_path / "plain.png"])
    assert torch.equal(alpha, plain)
    assert preprocessing(net, "digits")["background"] is None
    net.domain("digits").preprocessing = {**stored, "background": "#000000"}  # a control
    black = read_inputs(net, "digits", [tmp_path / "alpha.png"])[0]
    assert not torch.equal(black, plain)
    assert torch.equal(black, load_image(tmp_path / "alpha.png", stored["size"], "squash", "black"))
    small_ecology.added(house, "newcomer")
    assert house.record("newcomer")["preprocessing"]["background"] == "#ffffff"
    assert house.record("newcomer")["preprocessing"]["resize"] == "bilinear, antialias"


def test_the_old_store_verifies_and_takes_new_domains(house):
    assert verify(house.folder) == []
    small_ecology.put(house, "newcomer")
    assert "newcomer" in house.domains
    assert verify(house.folder) == []


@pytest.mark.parametrize("folder", DOMAINS)
def test_an_old_domain_folder_gives_its_old_answers(folder):
    net = cn.MultiDomainNetwork(weighted(domain_files.backbone(), "domain-backbone.safetensors"))
    net.load_domain(FOLDER / "domains" / folder)
    assert_answers(net, "flowers", "domain-images", f"domains/{folder}")


def test_an_old_basis_and_its_domains_give_their_old_answers():
    net = cn.MultiDomainNetwork(weighted(domain_files.backbone(), "domain-backbone.safetensors"))
    net.load_basis(FOLDER / "basis")
    for name in ("a", "b"):
        net.load_domain(FOLDER / "joined" / name)
        assert_answers(net, name, "domain-images", f"joined/{name}")


def test_control_another_domain_or_backbone_is_told_apart(house):
    net = house.network(weighted(small_ecology.backbone(), "house-backbone.safetensors"))
    house.load(net, "alone")
    with pytest.raises(AssertionError):
        assert_answers(net, "alone", "house-images", "house/digits")
    with pytest.raises(CovNormError, match="backbone"):
        house.network(small_ecology.backbone(seed=1))
