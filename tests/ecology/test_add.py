"""`add` and `join` as the library offers them: from images to a domain of the store."""

from __future__ import annotations

import contextlib

import pytest
import small_ecology as small
import torch
from torch import nn

import torch_covnorm as cn
from torch_covnorm.compress import covnorm
from torch_covnorm.ecology import Ecology, verify
from torch_covnorm.ecology import add as adding
from torch_covnorm.ecology.add import add
from torch_covnorm.ecology.config import add_config
from torch_covnorm.ecology.prediction import probabilities
from torch_covnorm.methods import settings
from torch_covnorm.training.progress import Reporter

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def ecology(tmp_path):
    return Ecology.create(tmp_path / "house", small.backbone())


@pytest.mark.parametrize("rule", [{"max_drop": 20.0, "metric": "loss"}, {"max_drop": 20.0}, {}])
def test_an_add_checks_its_settings_once_and_decomposes_each_site_once(ecology, rule, monkeypatch):
    calls = {"check": 0, "decompose": []}
    check, decompose = settings._check_options, covnorm.decompose

    def counted_check(given):
        calls["check"] += 1
        check(given)

    def counted_decompose(A, *args, **kwargs):
        calls["decompose"].append(tuple(A.shape))
        return decompose(A, *args, **kwargs)

    monkeypatch.setattr(settings, "_check_options", counted_check)
    monkeypatch.setattr(covnorm, "decompose", counted_decompose)
    config = add_config("covnorm", {"epochs": 1, **small.FIXED, **rule}, batch=20)
    assert config.run.options["metric"] == "loss"
    details = add(ecology, "digits", small.decoded(), config, backbone=small.backbone())
    assert calls["check"] == 1
    assert len(calls["decompose"]) == len(details["results"]["ranks"]) == 2
    small.added(ecology, "more")  # a control: another add counts again
    assert calls["check"] == 2
    assert len(calls["decompose"]) == 4


def test_the_library_does_by_default_what_the_command_does():
    options = add_config().run.options
    assert (options["max_drop"], options["metric"], options["dtype"]) == (0.5, "loss", "smallest")
    options = add_config(validation=False).run.options
    assert (options["variance"], options["max_drop"], options["dtype"]) == (0.99, None, "float16")
    assert add_config("bn").run.training.norm_statistics == "batch"
    assert add_config("ra").run.training.norm_statistics == "calibrated"
    assert [add_config(m).run.norms for m in ("covnorm", "ra", "bn")] == ["shared", "shared", "own"]
    assert add_config("covnorm", {"preset": "paper"}).run.norms == "own"
    assert add_config().run.training == cn.Training("auto")
    assert add_config("ra").dtype == "float16"


def test_by_default_a_domain_is_as_good_as_its_linear_head_and_says_what_was_chosen(ecology):
    config = add_config("ra", batch=20)
    results = add(ecology, "digits", small.decoded(), config, backbone=small.backbone())["results"]
    chosen = results["choices"]
    assert {"epochs", "class weights", "head", "augment", "lr"} <= set(chosen)
    assert (chosen["runs"], chosen["epochs"]) == (3, 15)  # half of the 30 for so few images
    assert ecology.details("digits")["results"]["choices"] == chosen
    net = ecology.network(small.backbone())
    domain = ecology.load(net, "digits")
    assert not list(domain.norms)
    assert ecology.record("digits")["norms"] == "shared"
    assert results["validation"] is None, "the few validation images are training images now"
    assert "used for training" in chosen["validation images"]
    small.added(ecology, "fixed", "ra")  # a control: with everything given, nothing is chosen
    assert ecology.details("fixed")["results"]["choices"] == {}


# ── add ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["covnorm", "ra", "bn", "svd", "piggyback"])
def test_an_added_domain_is_there_whole_and_its_workplace_gone(ecology, method):
    details = small.added(ecology, "digits", method)
    assert verify(ecology.folder) == []
    small.assert_tidy(ecology.folder)
    assert not ecology.workplace("digits").exists()
    entry = ecology.entry("digits")
    assert (entry.method, entry.classes) == (method, 10)
    assert entry.accuracy == details["results"]["accuracy"]["final"]
    assert small.content(ecology.details("digits")) == details
    assert ("trained.tensors" in entry.blobs) == (method in ("covnorm", "svd"))
    assert bool(ecology.moments("digits")) == (method in ("covnorm", "ra"))
    assert all(png.startswith(b"\x89PNG") for png in ecology.examples("digits").values())
    assert [e["what"] for e in details["history"]] == ["add"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_accuracy_in_the_details_is_that_of_the_loaded_domain(ecology, dtype):
    details = small.added(ecology, "digits", dtype=dtype, epochs=8, lr=0.02)
    net = ecology.network(small.backbone())
    ecology.load(net, "digits")
    held = small.decoded().splits["test"]
    found = probabilities(net, "digits", held.x).argmax(1)
    right = int((found == held.y).sum())
    assert details["results"]["accuracy"]["final"] == pytest.approx(100 * right / len(held.y))
    table = torch.tensor(details["results"]["confusion"])
    assert int(table.diag().sum()) == right
    assert int(table.sum()) == len(held.y)
    assert right > 4, "better than chance, or the numbers above say little"


def test_float16_is_measured_as_it_is_stored(ecology, tmp_path):
    """Control: what is measured is rounded; the two precisions do not give the same numbers."""
    other = Ecology.create(tmp_path / "other", small.backbone())
    whole, half = (
        small.added(e, "digits", dtype=d, epochs=8, lr=0.02, norms="own")
        for e, d in ((other, "float32"), (ecology, "float16"))
    )
    assert (whole["results"]["dtype"], half["results"]["dtype"]) == ("float32", "float16")
    net = other.network(small.backbone())
    state = other.load(net, "digits").state_dict().values()
    assert any(not torch.equal(t, t.half().float()) for t in state if t.is_floating_point())
    net = ecology.network(small.backbone())
    state = ecology.load(net, "digits").state_dict().values()
    floats = [t for t in state if t.is_floating_point()]
    assert all(torch.equal(t, t.half().float()) for t in floats)
    assert ecology.entry("digits").bytes < other.entry("digits").bytes


def test_the_same_seed_gives_the_same_tensors_and_another_gives_others(ecology, tmp_path):
    names = []
    for i, seed in enumerate((0, 0, 1)):
        other = Ecology.create(tmp_path / str(i), small.backbone())
        torch.manual_seed(i)  # what was drawn before does not count
        small.added(other, "digits", seed=seed)
        blobs = other.entry("digits").blobs
        names.append({k: blobs[k] for k in ("tensors", "trained.tensors", "record")})
    assert names[0] == names[1]
    assert names[0]["tensors"] != names[2]["tensors"]


def test_adding_one_leaves_the_others_and_the_backbone_to_the_bit(ecology):
    small.added(ecology, "parity")
    before, entry = small.read(ecology, "parity"), ecology.entry("parity")
    mine = small.backbone()
    weights = {k: v.clone() for k, v in mine.state_dict().items()}
    add(ecology, "digits", small.decoded(), small.config(), backbone=mine)
    assert small.read(ecology, "parity") == before
    assert ecology.entry("parity") == entry
    assert all(torch.equal(v, weights[k]) for k, v in mine.state_dict().items())


def test_the_callers_random_numbers_are_untouched(ecology):
    torch.manual_seed(7)
    mine, before = small.backbone(), torch.get_rng_state()
    add(ecology, "digits", small.decoded(), small.config(), backbone=mine)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("digits", {"method": "covnorm-joint"}, "covnorm join"),
        ("digits", {"method": "covnrm"}, "covnorm"),
        ("digits", {"options": {"epochz": 1}}, "epochs"),
        ("digits", {"dtype": "float8"}, "float16"),
        ("../digits", {}, "name"),
        ("taken", {}, "already exists"),
    ],
)
def test_what_cannot_be_added_is_refused_and_the_store_stays(ecology, name, settings, words):
    small.put(ecology, "taken")
    before = small.files(ecology.folder)
    with pytest.raises(cn.CovNormError, match=words):
        add(ecology, name, small.decoded(), add_config(**settings), backbone=small.backbone())
    assert small.files(ecology.folder) == before


def test_what_is_measured_is_rounded(ecology, tmp_path):
    """The probabilities of the examples have four digits, which int8 changes."""
    other, sure = Ecology.create(tmp_path / "other", small.backbone()), []
    for place, dtype in ((other, "float32"), (ecology, "int8")):
        results = small.added(place, "digits", dtype=dtype, epochs=8, lr=0.02)["results"]
        sure.append([example["probability"] for example in results["examples"]])
    assert sure[0] != sure[1]


def test_another_backbone_is_refused(ecology):
    with pytest.raises(cn.CovNormError, match="another backbone"):
        add(ecology, "digits", small.decoded(), small.config(), backbone=small.backbone(seed=1))


def test_interrupted_in_a_stage_the_next_call_does_not_run_the_stages_before_again(ecology):
    data, config = small.decoded(), small.config(epochs=2)
    whole = small.Steps()
    add(ecology, "whole", data, config, backbone=small.backbone(), reporter=whole.reporting())
    first = small.Steps(stop="tune")
    with pytest.raises(KeyboardInterrupt):
        add(ecology, "digits", data, config, backbone=small.backbone(), reporter=first.reporting())
    assert list(ecology.domains) == ["whole"]
    second = small.Steps()
    add(ecology, "digits", data, config, backbone=small.backbone(), reporter=second.reporting())
    assert whole.count("train") == first.count("train") > 0
    assert second.count("train") == 0
    assert second.count("tune") == whole.count("tune")
    names = [ecology.entry(n).blobs["tensors"] for n in ("whole", "digits")]
    assert names[0] == names[1]


def test_work_begun_with_other_settings_or_images_is_refused_until_it_is_to_be_fresh(ecology):
    def interrupted(**settings):
        with contextlib.suppress(KeyboardInterrupt):
            reporter = small.Steps(stop="tune").reporting()
            add(ecology, "digits", **settings, backbone=small.backbone(), reporter=reporter)

    interrupted(data=small.decoded(), config=small.config())
    for data, config in (
        (small.decoded(), small.config(seed=1)),
        (small.decoded(), small.config(variance=0.8)),
        (small.decoded(start=200), small.config()),
    ):
        with pytest.raises(cn.CovNormError, match="--fresh"):
            add(ecology, "digits", data, config, backbone=small.backbone())
    assert ecology.domains == {}
    add(
        ecology,
        "digits",
        small.decoded(),
        small.config(seed=1),
        backbone=small.backbone(),
        fresh=True,
    )
    small.added(ecology, "again", seed=1)
    names = [ecology.entry(n).blobs["tensors"] for n in ("digits", "again")]
    assert names[0] == names[1]


def test_a_replaced_domain_stays_until_the_end_and_keeps_its_history(ecology):
    small.added(ecology, "digits")
    before = small.files(ecology.folder)

    def replaced(reporter):
        return add(
            ecology,
            "digits",
            small.decoded(),
            small.config(seed=1),
            backbone=small.backbone(),
            replace=True,
            reporter=reporter,
        )

    with pytest.raises(KeyboardInterrupt):
        replaced(small.Steps(stop="tune").reporting())
    assert small.files(ecology.folder) == before
    details = replaced(Reporter())
    assert [e["what"] for e in details["history"]] == ["add", "add"]
    small.assert_tidy(ecology.folder)


def test_a_domain_named_as_the_step_in_between_is_none_of_it(ecology, tmp_path):
    small.added(ecology, "trained")
    small.added(ecology, "digits")
    names = [ecology.entry(n).blobs["tensors"] for n in ("trained", "digits")]
    assert names[0] == names[1]


@pytest.mark.parametrize("splits", [("train",), ("train", "val"), ("train", "test")])
def test_fewer_splits_do_and_the_results_say_what_they_are_of(ecology, splits):
    details = add(
        ecology, "digits", small.decoded(*splits), small.config(), backbone=small.backbone()
    )
    assert details["results"]["on"] == splits[-1]
    assert verify(ecology.folder) == []


@pytest.mark.parametrize(
    ("size", "remedy"),
    [(16, r"at a size it takes \(--size\)$"), (224, r"at its native size, 224 \(--size 224\)$")],
)
def test_a_network_of_one_size_alone_is_told_before_any_training(tmp_path, size, remedy):
    def backbone():
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 4, 3, stride=8, padding=1), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(4 * (size // 8) ** 2, 5))

    ecology = Ecology.create(tmp_path / "house", backbone())  # 224 where nothing is said
    with pytest.raises(cn.CovNormError, match=rf"not take images of 8 × 8 pixels.*{remedy}"):
        add(ecology, "digits", small.decoded(), small.config(), backbone=backbone())
    assert not ecology.domains


def test_where_images_are_is_kept_from_the_root_on(ecology, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = {"path": "digits.npz", "seed": 0}
    arguments = {"backbone": small.backbone(), "source": source}
    details = add(ecology, "digits", small.decoded(), small.config("bn"), **arguments)
    assert details["source"]["path"] == str(tmp_path / "digits.npz")


def test_a_preset_decides_how_a_is_trained(tmp_path, monkeypatch):
    right, seen = adding.adapt, []

    def adapt(net, name, *args, **kwargs):
        seen.append((name, kwargs["method"].training))
        return right(net, name, *args, **kwargs)

    monkeypatch.setattr(adding, "adapt", adapt)
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    config = add_config("covnorm", {"preset": "paper", "epochs": 2}, batch=20)
    adding.add(ecology, "digits", small.decoded(), config, backbone=small.backbone())
    assert [name for name, _ in seen] == ["digits"]
    assert (seen[0][1].optimizer, seen[0][1].epochs) == ("adam", 2)


@pytest.mark.parametrize("method", ["piggyback", "lwf", "covnorm"])
def test_the_history_counts_as_the_list_does_and_forgetting_is_kept(tmp_path, method):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    facts = small.added(ecology, "digits", method)
    assert facts["history"][-1]["parameters"] == ecology.entry("digits").parameters > 0
    assert (facts["results"]["forgetting"] is not None) == (method == "lwf")


@pytest.mark.parametrize("whole", [True, False])
def test_an_uncompressed_adapter_is_reported(tmp_path, whole, monkeypatch):
    if whole:  # no smaller budget is offered, so the full A is all that holds
        monkeypatch.setattr("torch_covnorm.methods.smallest.budgets", lambda *_: [])
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    options = {**small.FIXED, "max_drop": 0.0 if whole else 100.0, "epochs": 8, "lr": 0.02}
    config = add_config("covnorm", options, batch=20, dtype="float32")
    adding.add(ecology, "digits", small.decoded(), config, backbone=small.backbone())
    details = ecology.details("digits")["results"]
    assert details["whole"] == whole
    assert details["whole"] == (ecology.entry("digits").parameters >= details["denominators"]["ra"])
