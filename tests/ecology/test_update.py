"""`add --update`: more images and classes for a stored domain; few validation images train too."""

from __future__ import annotations

import numpy as np
import pytest
import small_ecology as small
import torch
from command import npz

import torch_covnorm as cn
from torch_covnorm.data.decode import merged, relabelled
from torch_covnorm.data.source import read_source
from torch_covnorm.ecology.add import add, more_images
from torch_covnorm.ecology.config import add_config
from torch_covnorm.ecology.images import decode_for, images_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def ecology(tmp_path):
    """An ecology with a domain of the digits 0 to 4, from a file."""
    npz(tmp_path / "all.npz", 120, 60)
    with np.load(tmp_path / "all.npz") as file:
        parts = dict(file)
    for name, low, high in (("low", 0, 5), ("high", 5, 10)):
        some = {"classes": parts["classes"][low:high]}
        for split in ("train", "test"):
            y = parts[f"y_{split}"]
            chosen = (y >= low) & (y < high)
            some[f"x_{split}"], some[f"y_{split}"] = parts[f"x_{split}"][chosen], y[chosen] - low
        np.savez(tmp_path / f"{name}.npz", **some)
    made = cn.Ecology.create(tmp_path / "house", small.backbone())
    data = decode_for(made, read_source(tmp_path / "low.npz"), size=8)
    where = {"path": str(tmp_path / "low.npz"), "seed": 0}
    add(made, "digits", data, small.config("ra"), source=where, backbone=small.backbone())
    return made


def update(ecology, path):
    data, source = more_images(ecology, "digits", path)
    config = small.config("ra")
    return add(
        ecology, "digits", data, config, source=source, update=True, backbone=small.backbone()
    )


def test_new_classes_come_after_the_old_ones_and_old_images_are_used_again(ecology, tmp_path):
    before = ecology.record("digits")["classes"]
    facts = update(ecology, tmp_path / "high.npz")
    classes = ecology.record("digits")["classes"]
    assert classes[: len(before)] == before
    assert sorted(classes) == list("0123456789")
    assert [event["what"] for event in facts["history"]] == ["add", "update"]
    both = images_of(ecology, "digits")  # what eval reads later: both files, same digest
    assert set(both.splits["train"].y.tolist()) == set(range(10))
    assert facts["source"]["images"]["train"] == len(both.splits["train"].y)
    net = ecology.network(small.backbone())
    assert ecology.load(net, "digits").width == 10


def test_the_update_starts_from_the_stored_a(ecology, tmp_path):
    net = ecology.network(small.backbone())
    old = ecology.load(net, "digits")
    data, source = more_images(ecology, "digits", tmp_path / "high.npz")
    config = add_config("ra", {"epochs": 0, **small.FIXED}, batch=20, dtype="float32")
    given = {"source": source, "update": True, "backbone": small.backbone()}
    add(ecology, "digits", data, config, **given)
    new = ecology.load(ecology.network(small.backbone()), "digits")
    for site, A in old.maps.items():
        assert torch.equal(new.maps[site].matrix(), A.matrix())
    rows = len(old.head.weight)
    assert torch.equal(new.head.weight[:rows], old.head.weight)
    assert not new.head.weight[rows:].any(), "nothing has trained the new rows"
    fresh = small.added(cn.Ecology.create(tmp_path / "other", small.backbone()), "digits", "ra")
    assert fresh["history"][0]["what"] == "add"  # a control: without update it is another event


def test_without_the_old_images_the_new_ones_train_alone(ecology, tmp_path):
    (tmp_path / "low.npz").unlink()
    data, source = more_images(ecology, "digits", tmp_path / "high.npz")
    assert any("new images only" in note for note in data.notes)
    assert set(data.splits["train"].y.tolist()) == set(range(5, 10))
    assert source["path"] == str(tmp_path / "high.npz")


def test_what_cannot_be_updated_says_why(ecology, tmp_path):
    small.added(ecology, "norms", "bn")
    data = small.decoded()
    with pytest.raises(cn.CovNormError, match=r"no stored A to continue from.*--replace"):
        add(ecology, "norms", data, small.config("bn"), update=True, backbone=small.backbone())
    with pytest.raises(cn.CovNormError, match="unknown domain"):
        more_images(ecology, "nothing", tmp_path / "high.npz")


def test_merged_images_keep_their_labels():
    one, two = small.decoded(), small.decoded(parity=True)
    both = merged(one, two)
    assert both.classes == (*one.classes, "even", "odd")
    n = len(one.splits["train"].y)
    assert torch.equal(both.splits["train"].y[:n], one.splits["train"].y)
    assert torch.equal(both.splits["train"].y[n:], two.splits["train"].y + 10)
    assert torch.equal(both.splits["train"].x[n:], two.splits["train"].x)
    assert relabelled(two, ("odd", "even")).splits["val"].y.tolist() == [
        1 - y for y in two.splits["val"].y.tolist()
    ]


@pytest.mark.parametrize("given", [False, True])
def test_few_validation_images_train_unless_max_drop_is_given(tmp_path, given):
    ecology = cn.Ecology.create(tmp_path / "house", small.backbone())
    options = {"epochs": 1, **({"max_drop": 5.0} if given else {})}
    config = add_config("covnorm", options, batch=20)
    facts = add(ecology, "digits", small.decoded(), config, backbone=small.backbone())
    results = facts["results"]
    assert ("validation images" in results["choices"]) != given
    assert (results["validation"] is None) != given
