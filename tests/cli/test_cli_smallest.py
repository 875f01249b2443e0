"""The default of `covnorm add`: the smallest file within half a point of validation accuracy."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command import QUICK, covnorm, npz

import torch_covnorm as cn
from torch_covnorm.cli import add as command
from torch_covnorm.compress.precision import PRECISIONS
from torch_covnorm.data.loader import Batches
from torch_covnorm.ecology.images import images_of
from torch_covnorm.methods import smallest

FEW = ("--epochs", 0, *QUICK[2:], "--replace", "--fresh")


HELD_OUT = ("--set", "keep=best")


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """An ecology with a domain whose few validation images stay held out."""
    place = tmp_path_factory.mktemp("smallest")
    npz(place / "digits.npz", 60, 10)
    assert covnorm("init", place / "house").code == 0
    ran = covnorm("add", "digits", place / "digits.npz", *QUICK, *at(place), *HELD_OUT, "--json")
    assert ran.code == 0, ran.err
    return place, ran.json


def at(place):
    return ("--ecology", place / "house")


def settings_of(place, name="digits"):
    return covnorm("show", name, *at(place), "--json").json["settings"]


def settings_given_to_add(monkeypatch, place, *words):
    """Return the settings that the command would store, without training anything."""
    given = []

    def stop(ecology, name, data, config, **_):
        given.append(config.record())
        raise cn.CovNormError("stopped before the training")

    with monkeypatch.context() as patch:
        patch.setattr(command, "add_domain", stop)
        ran = covnorm("add", "other", place / "digits.npz", *FEW, *at(place), *words)
    assert ran.err == "covnorm: stopped before the training\n", ran.err
    return json.loads(json.dumps(given[0]))


@pytest.mark.slow
def test_the_default_is_the_smallest_file_within_half_a_point(house):
    place, result = house
    assert result["dtype"] in PRECISIONS
    assert result["declined"] in (True, False)
    settings = settings_of(place)
    assert (settings["max_drop"], settings["dtype"]) == (0.5, "smallest")
    assert settings["metric"] == "loss"


def test_the_stored_domain_validates_within_half_a_point_of_its_trained_a(house):
    place, result = house
    ecology = cn.Ecology(place / "house")
    part = images_of(ecology, "digits").splits["val"]
    accuracy = {}
    for trained in (False, True):
        net = ecology.network()
        domain = ecology.load(net, "digits", trained=trained)
        val = Batches(part.x, part.y, domain.preprocessing, 64)
        found = cn.evaluate(net, "digits", val)
        accuracy[trained] = found.accuracy
    # Tuning may cost one standard error of the accuracy; below that it is declined.
    assert accuracy[False] >= accuracy[True] - 0.5 - found.standard_error
    results = ecology.details("digits")["results"]
    assert results["storage"][result["dtype"]] == {
        "bytes": result["bytes"],
        "accuracy": pytest.approx(accuracy[False]),
    }


def test_show_prints_what_each_precision_costs(house):
    place, result = house
    shown = covnorm("show", "digits", *at(place)).out
    assert f"{result['dtype']}, as stored" in shown
    assert all(precision in shown for precision in PRECISIONS)
    assert f"({result['dtype']}; with norms, head" in shown


def test_the_report_shows_the_command_with_its_defaults(house, tmp_path):
    place, _ = house
    covnorm("report", "--out", tmp_path / "r.html", *at(place))
    page = (tmp_path / "r.html").read_text()
    assert "--max-drop 0.5" in page
    assert "--dtype smallest" in page


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (("--variance", 0.9), "float16"),
        (("--method", "bn"), "float16"),
        (("--set", "M=identity"), "float16"),
        (("--set", "max_drop=40"), "smallest"),
        (("--max-drop", 40, "--dtype", "float32"), "float32"),
        (("--budget", 0.01), "float16"),
    ],
)
def test_only_max_drop_changes_the_default_from_float16(house, words, dtype, monkeypatch):
    settings = settings_given_to_add(monkeypatch, house[0], *words)
    assert settings["dtype"] == dtype
    assert settings.get("metric") == ("loss" if "max_drop" in settings else None)


def test_a_given_metric_replaces_the_default(house, monkeypatch):
    settings = settings_given_to_add(monkeypatch, house[0], "--metric", "variance")
    assert settings["metric"] == "variance"


@pytest.mark.slow
def test_the_stored_settings_are_those_given_to_add(house, monkeypatch):
    place, _ = house
    words = ("--set", "max_drop=40", "--metric", "variance", "--dtype", "float32")
    given = settings_given_to_add(monkeypatch, place, *words)
    assert (given["max_drop"], given["metric"], given["dtype"]) == (40, "variance", "float32")
    monkeypatch.setattr(smallest, "BUDGETS", 4)
    assert covnorm("add", "other", place / "digits.npz", *FEW, *at(place), *words).code == 0
    assert settings_of(place, "other") == given


def test_without_validation_images_it_is_the_papers_rule_in_float16(house, tmp_path):
    place, _ = house
    x = np.random.default_rng(0).integers(0, 255, (8, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "few.npz", x_train=x, y_train=np.arange(8), x_test=x, y_test=np.arange(8))
    few = ("--epochs", 1, "--batch", 8, *QUICK[2:], *at(place))
    ran = covnorm("add", "few", tmp_path / "few.npz", *few, "--json")
    assert ran.code == 0, ran.err
    settings = settings_of(place, "few")
    assert (settings["variance"], settings["dtype"]) == (0.99, "float16")
    assert not {"max_drop", "metric"} & settings.keys()
    wrong = covnorm("add", "x", tmp_path / "few.npz", *few, "--dtype", "smallest")
    assert (wrong.code, wrong.out) == (2, "")
    assert "needs max_drop=" in wrong.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("add", "x", "--dtype", "smallest", "--variance", 0.9), "needs max_drop="),
        (("add", "x", "--dtype", "smallest", "--method", "bn"), "for method 'covnorm'"),
        (("add", "x", "--dtype", "tiny"), "choose float32, float16, int8 or smallest"),
        (("add", "x", "--set", "dtype=int8"), "give it with --dtype"),
        (("join", "--dtype", "smallest"), "for method 'covnorm'"),
    ],
)
def test_what_cannot_be_smallest_is_refused_in_one_line(house, words, says):
    place, _ = house
    images = [place / "digits.npz"] if words[0] == "add" else []
    ran = covnorm(*words[:2], *images, *words[2:], *at(place))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert says in ran.err
