"""What a domain costs in each precision, and what of it is measured."""

from __future__ import annotations

import pytest
import small_digits
import small_ecology as small
import torch
import wide_digits
from command import covnorm
from torch import nn

import torch_covnorm as cn
from torch_covnorm.adapters import CovNormMap, LowRankMap
from torch_covnorm.compress.precision import PRECISIONS, as_stored, round_, storage_of, stored_bytes
from torch_covnorm.data.loader import Batches
from torch_covnorm.ecology import Ecology
from torch_covnorm.network.files import SCALE, from_int8, rows_as_int8

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_was_rounded_to_int8_once_is_rounded_to_the_same_bits_again():
    """For every mantissa: so a domain that is rounded, measured and then stored is what it was."""
    bits = torch.arange(2**23, dtype=torch.int32) + (127 << 23)
    largest = bits.view(torch.float32)[:, None]
    matrix = torch.cat([largest, -0.737 * largest, 0.004 * largest], 1)
    whole, scale = rows_as_int8(matrix)
    again, same = rows_as_int8(from_int8({"w": whole, "w" + SCALE: scale})["w"])
    assert torch.equal(whole, again)
    assert torch.equal(scale, same)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_rounded_domain_is_its_file_to_the_bit(precision, tmp_path):
    net, dtype = wide_digits.network("d"), PRECISIONS[precision]
    net.load_domain(net.save_domain("d", tmp_path / "d", dtype), "file")
    before = small_digits.state(net, "d")
    round_(net, "d", dtype)
    assert small_digits.same(small_digits.state(net, "d"), small_digits.state(net, "file"))
    assert small_digits.same(small_digits.state(net, "d"), before) == (precision == "float32")


def test_a_module_of_the_domains_own_is_rounded_with_it():
    net = cn.MultiDomainNetwork(small_digits.backbone())
    net.add_domain("d", classes=4, own=nn.Linear(4, 4))
    own = net.domain("d").own.weight.detach().clone()
    round_(net, "d", torch.float16)
    assert torch.equal(net.domain("d").own.weight, own.half().float())


def test_inside_the_domain_is_what_its_file_will_hold_and_behind_it_is_as_it_was():
    net, (train, _) = wide_digits.network("d"), wide_digits.data()
    cn.normalize_(net, "d", cn.collect(net, "d", train), variance=0.9)
    kept, before = net.domain("d"), small_digits.state(net, "d")
    for precision in (None, "int8"):
        with as_stored(net, "d", precision):
            assert all(isinstance(A, LowRankMap) for A in net.domain("d").maps.values())
        assert net.domain("d") is kept
    with pytest.raises(KeyError), as_stored(net, "d", "int8"):
        raise KeyError
    assert net.domain("d") is kept
    assert all(isinstance(A, CovNormMap) for A in kept.maps.values())
    assert small_digits.same(small_digits.state(net, "d"), before)


def test_each_precision_costs_the_bytes_and_the_accuracy_of_its_file(tmp_path):
    net, (_, val) = wide_digits.network("d"), wide_digits.data()
    wide_digits.widen_(net.domain("d"))
    found = storage_of(net, "d", val)
    sizes, accuracies = {}, {}
    for precision, dtype in PRECISIONS.items():
        folder = net.save_domain("d", tmp_path / precision, dtype)
        sizes[precision] = sum(f.stat().st_size for f in folder.iterdir())
        net.load_domain(folder, precision)
        accuracies[precision] = cn.evaluate(net, precision, val).accuracy
    assert {p: cost["accuracy"] for p, cost in found.items()} == accuracies
    # A folder's record names its tensors' file, the store's does not: the same bytes more for all.
    assert len({sizes[p] - cost["bytes"] for p, cost in found.items()}) == 1
    assert sizes["float32"] > sizes["float16"] > sizes["int8"]
    assert accuracies["int8"] < accuracies["float16"], "or the table says little"
    assert all(cost["accuracy"] is None for cost in storage_of(net, "d", None).values())


# ── in an ecology ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("drop", [0.0, 5.0])
def test_the_stored_domain_keeps_the_promise_on_the_validation_images(drop, tmp_path):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    settings = {"variance": None, "max_drop": drop, "epochs": 10, "lr": 0.02}
    facts = small.added(ecology, "digits", dtype="smallest", **settings)
    results, entry = facts["results"], ecology.entry("digits")
    net = ecology.network(small.backbone())
    domain, part = ecology.load(net, "digits"), small.decoded().splits["val"]
    val = Batches(part.x, part.y, domain.preprocessing, 64)
    ecology.load(small_net := ecology.network(small.backbone()), "digits", trained=True)
    goal = cn.evaluate(small_net, "digits", val).accuracy - drop
    stored = cn.evaluate(net, "digits", val).accuracy
    assert goal > 15, "better than chance, or there is little to lose"
    assert stored >= goal
    assert stored == results["validation"] == results["storage"][results["dtype"]]["accuracy"]
    assert results["storage"][results["dtype"]]["bytes"] == results["bytes"] == entry.bytes
    assert results["dtype"] in PRECISIONS
    assert facts["settings"]["dtype"] == "smallest"


@pytest.mark.parametrize("method", ["ra", "bn", "piggyback", "covnorm"])
def test_every_method_says_what_each_precision_would_cost(method, tmp_path):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    results = small.added(ecology, "digits", method, dtype="float16")["results"]
    assert list(results["storage"]) == list(PRECISIONS)
    assert results["storage"]["float16"]["bytes"] == ecology.entry("digits").bytes
    assert results["storage"]["float32"]["bytes"] > ecology.entry("digits").bytes
    shown = covnorm("show", "digits", "--ecology", ecology.folder)
    assert shown.code == 0, shown.err
    for words in ("float32 ", "float16, as stored", "int8 ", "validation accuracy %"):
        assert words in shown.out


def test_joined_domains_say_it_anew(tmp_path):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    for name in ("digits", "parity"):
        small.added(ecology, name, dtype="int8")
    before = ecology.details("digits")["results"]["storage"]
    small.joined(ecology, "digits", "parity")
    results = ecology.details("digits")["results"]
    assert results["storage"] != before
    assert results["storage"]["float16"]["bytes"] == ecology.entry("digits").bytes
    assert results["dtype"] == "float16"


def test_a_site_that_is_left_with_nothing_is_shown(tmp_path):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    facts = small.added(ecology, "digits", variance=None, metric="loss", budget=12)
    assert 0 in {min(pair) for pair in facts["results"]["ranks"].values()}
    shown = covnorm("show", "digits", "--ecology", ecology.folder)
    assert shown.code == 0, shown.err


def test_bytes_follow_the_precision_that_was_chosen_for_the_trained_a_too(tmp_path):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    facts = small.added(ecology, "digits", variance=None, max_drop=30.0, dtype="smallest")
    net = ecology.network(small.backbone())
    ecology.load(net, "digits", trained=True)
    dtype = PRECISIONS[facts["results"]["dtype"]]
    assert facts["results"]["trained_bytes"] == stored_bytes(net, "digits", dtype)
