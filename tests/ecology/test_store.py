"""The store: what is put is what is read, one change at a time."""

from __future__ import annotations

import copy

import pytest
import small_ecology as small
import torch

import torch_covnorm as cn
from torch_covnorm import MultiDomainNetwork
from torch_covnorm.ecology import Details, Ecology, verify
from torch_covnorm.ecology.blobs import Blobs
from torch_covnorm.ecology.manifest import MANIFEST

SITE = "3"


@pytest.fixture
def ecology(tmp_path):
    return Ecology.create(tmp_path / "house", small.backbone())


def moments(net, name):
    torch.manual_seed(3)
    return cn.collect(net, name, [(torch.randn(8, 3, 8, 8), torch.zeros(8))])


def with_all_parts(ecology, name="flowers", **changes):
    net = small.network(name, f"{name}-trained")
    trained = net.domain(f"{name}-trained")
    examples = {"000": b"\x89PNG and more", "001": bytes(range(256))}
    details = Details(small.facts(71.5), moments(net, name), trained, examples)
    ecology.put(net, {name: details}, **changes)
    return net, details


def state(domain):
    return {k: v.numpy().tobytes() for k, v in domain.state_dict().items()}


# ── create ────────────────────────────────────────────────────────────────────────────────────


def test_a_new_ecology_is_one_manifest_and_verifies(ecology):
    assert {f.name for f in ecology.folder.iterdir()} == {MANIFEST, ".lock"}
    assert ecology.domains == ecology.bases == {}
    assert ecology.backbone["class"] == "Sequential"
    assert ecology.backbone["parameters"] > 0
    assert verify(ecology.folder) == []


def test_a_second_ecology_in_the_same_folder_is_refused_and_the_first_stays(ecology):
    small.put(ecology, "flowers")
    before = small.files(ecology.folder)
    with pytest.raises(cn.CovNormError, match="ecology already"):
        Ecology.create(ecology.folder, small.backbone())
    assert small.files(ecology.folder) == before


def test_no_ecology_there_is_an_error_with_the_remedy(tmp_path):
    with pytest.raises(cn.CovNormError, match=r"nowhere.*covnorm init"):
        Ecology(tmp_path / "nowhere")


def test_a_module_of_the_callers_is_asked_for_and_another_one_refused(ecology):
    with pytest.raises(cn.CovNormError, match="backbone="):
        ecology.network()
    with pytest.raises(cn.CovNormError, match="another backbone"):
        ecology.network(small.backbone(seed=1))
    assert isinstance(ecology.network(small.backbone()), MultiDomainNetwork)


@pytest.fixture(scope="module")
def of_a_file(tmp_path_factory):
    """An ecology whose backbone's weights came from a file that is deleted afterwards."""
    import safetensors.torch

    folder = tmp_path_factory.mktemp("weights")
    net = cn.load_backbone("resnet26", weights="random")
    safetensors.torch.save_file(net.state_dict(), folder / "weights.safetensors")
    ecology = Ecology.create(folder / "house", "resnet26", folder / "weights.safetensors")
    (folder / "weights.safetensors").unlink()
    wrapped = MultiDomainNetwork(net.eval())
    wrapped.add_domain("flowers", classes=4)
    ecology.put(wrapped, {"flowers": Details(small.facts())})
    return ecology, wrapped


def test_weights_from_a_file_are_kept_in_the_ecology_and_verify(of_a_file):
    ecology, net = of_a_file
    assert verify(ecology.folder) == []
    assert ecology.backbone["name"] == "resnet26"
    assert (ecology.folder / "blobs" / ecology.backbone["weights"]).is_file()
    again = Ecology(ecology.folder).network()
    ecology.load(again, "flowers")
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(net.eval()(x, domain="flowers"), again.eval()(x, domain="flowers"))


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damaged_weights_of_the_backbone_are_found_and_hide_no_other_damage(of_a_file, damage):
    ecology, _ = of_a_file
    file = ecology.blobs.path(ecology.backbone["weights"])
    other = ecology.blobs.path(ecology.entry("flowers").blobs["tensors"])
    saved = file.read_bytes(), other.read_bytes()
    try:
        if damage == "gone":
            file.unlink()
        else:
            middle = len(saved[0]) // 2
            flipped = saved[0][:middle] + bytes([saved[0][middle] ^ 1]) + saved[0][middle + 1 :]
            file.write_bytes(flipped if damage == "flipped" else saved[0][:middle])
        with pytest.raises(cn.CovNormError, match=file.name):
            ecology.network()
        (problem,) = verify(ecology.folder)
        assert str(file) in problem
        other.write_bytes(saved[1][:-1])
        problems = "\n".join(verify(ecology.folder))
        assert file.name in problems
        assert other.name in problems, "both files are damaged, and both must be found"
    finally:
        file.write_bytes(saved[0])
        other.write_bytes(saved[1])


# ── put and read ──────────────────────────────────────────────────────────────────────────────


def test_what_is_put_is_what_is_read_by_another_that_opens_it(ecology):
    net, details = with_all_parts(ecology)
    found = Ecology(ecology.folder)
    reader = found.network(small.backbone())
    assert state(found.load(reader, "flowers")) == state(net.domain("flowers"))
    assert list(reader.domains) == ["flowers"]
    other = found.network(small.backbone())
    assert state(found.load(other, "flowers", trained=True)) == state(details.trained)
    assert found.examples("flowers") == details.examples
    assert small.content(found.details("flowers")) == details.facts
    for site, m in found.moments("flowers").items():
        assert m.n == details.moments[site].n
        assert torch.equal(m.mean, details.moments[site].mean)
        assert torch.equal(m.covariance, details.moments[site].covariance)
    assert set(found.moments("flowers")) == set(details.moments) != set()


def test_the_entry_counts_what_the_domain_has(ecology):
    net, _ = with_all_parts(ecology)
    entry = ecology.domains["flowers"]
    count = net.num_parameters("flowers")
    assert (entry.parameters, entry.total) == (count["adapter"], count["total"])
    assert (entry.method, entry.classes, entry.accuracy, entry.basis) == ("ra", 3, 71.5, None)
    parts = [ecology.folder / "blobs" / entry.blobs[k] for k in ("record", "tensors")]
    assert entry.bytes == sum(f.stat().st_size for f in parts)


def test_a_domain_without_further_parts_has_none(ecology):
    small.put(ecology, "flowers")
    assert set(ecology.entry("flowers").blobs) == {"record", "tensors", "details"}
    assert ecology.moments("flowers") == ecology.examples("flowers") == {}
    with pytest.raises(cn.CovNormError, match=r"flowers.*no trained A"):
        small.answers(ecology, "flowers", trained=True)


def test_an_unknown_domain_is_an_error_with_the_nearest_name(ecology):
    small.put(ecology, "flowers")
    net = ecology.network(small.backbone())
    for ask in (ecology.entry, ecology.details, ecology.record, ecology.moments, ecology.examples):
        with pytest.raises(cn.CovNormError, match=r"unknown domain 'flower'.*'flowers'"):
            ask("flower")
    for name in ("flower", "../flowers", "", "/etc/passwd"):
        with pytest.raises(cn.CovNormError, match="unknown domain"):
            ecology.load(net, name)
    with pytest.raises(cn.CovNormError, match="unknown domain 'flower'"):
        ecology.remove(["flowers", "flower"])
    assert list(ecology.domains) == ["flowers"], "nothing is removed where one name is wrong"


def test_a_name_that_is_none_is_refused_before_anything_is_written(ecology):
    before = small.files(ecology.folder)
    for name in ("", "../x", "UPPER", ".hidden", "a/b", "x" * 65):
        with pytest.raises(cn.CovNormError):
            ecology.check_new(name)
        with pytest.raises(cn.CovNormError):
            ecology.workplace(name)
    assert small.files(ecology.folder) == before


def test_a_domain_that_is_there_already_is_refused_and_stays(ecology):
    small.put(ecology, "flowers")
    before = small.files(ecology.folder)
    with pytest.raises(cn.CovNormError, match=r"'flowers' already exists.*remove.*replace"):
        small.put(ecology, "flowers", seed=1)
    assert small.files(ecology.folder) == before


def test_replaced_it_is_the_new_one_and_the_old_ones_blobs_are_gone(ecology):
    small.put(ecology, "flowers", "birds")
    birds, old = small.answers(ecology, "birds"), small.answers(ecology, "flowers")
    ecology.set_keep(0)  # otherwise the old one becomes an earlier version: test_versions.py
    replaced = ecology.entry("flowers").blobs["tensors"]
    small.put(ecology, "flowers", seed=1, replace=True)
    assert replaced not in ecology.blobs.names()
    assert small.answers(ecology, "flowers") != old
    assert small.answers(ecology, "birds") == birds
    small.assert_tidy(ecology.folder)


def test_kept_parts_stay_where_a_change_does_not_give_them(ecology):
    with_all_parts(ecology)
    blobs = ecology.entry("flowers").blobs
    net = small.network("flowers")
    small.shake_(net.domain("flowers"))
    ecology.put(net, {"flowers": Details(small.facts(3.0), keep_rest=True)}, replace=True)
    now = ecology.entry("flowers").blobs
    assert {k for k in blobs if now[k] == blobs[k]} == {
        "record",  # says nothing of numbers
        "trained.record",
        "trained.tensors",
        "moments",
        "examples",
    }
    ecology.put(net, {"flowers": Details(small.facts())}, replace=True)
    assert set(ecology.entry("flowers").blobs) == {"record", "tensors", "details"}
    small.assert_tidy(ecology.folder)


@pytest.mark.parametrize("fault", ["no JSON", "NaN", "no such domain", "taken"])
def test_put_is_all_or_nothing(ecology, fault):
    small.put(ecology, "taken")
    net = small.network("birds", "flowers", "taken")
    details = {"birds": Details(small.facts()), "flowers": Details(small.facts())}
    if fault == "no JSON":
        details["flowers"].facts["settings"] = {"what": object()}
    elif fault == "NaN":
        net.domain("flowers").adapters[SITE].A.A.data[0, 0] = float("nan")
    else:
        details["nobody" if fault == "no such domain" else "taken"] = Details(small.facts())
    before = small.files(ecology.folder)
    with pytest.raises(cn.CovNormError):
        ecology.put(net, details)
    assert small.files(ecology.folder) == before, "birds were fine, but all or nothing is stored"
    assert verify(ecology.folder) == []


def test_the_same_domain_gives_the_same_blobs_in_any_ecology(ecology, tmp_path):
    other = Ecology.create(tmp_path / "other", small.backbone())
    for one in (ecology, other):
        with_all_parts(one)
    assert ecology.entry("flowers").blobs == other.entry("flowers").blobs
    small.put(other, "birds")
    assert other.entry("birds").blobs["tensors"] != other.entry("flowers").blobs["tensors"]


def test_loading_a_domain_that_the_network_has_is_refused_and_it_stays(ecology):
    small.put(ecology, "flowers")
    net = small.network("flowers", seed=5)
    before = state(net.domain("flowers"))
    with pytest.raises(cn.CovNormError, match="already"):
        ecology.load(net, "flowers")
    assert state(net.domain("flowers")) == before


def test_loading_and_putting_leave_the_backbone_and_other_domains_to_the_bit(ecology):
    small.put(ecology, "flowers", "birds")
    net = ecology.network(small.backbone())
    ecology.load(net, "birds")
    before = state(net.backbone), state(net.domain("birds"))
    ecology.load(net, "flowers")
    ecology.put(net, {"flowers": Details(small.facts(1.0))}, replace=True)
    assert (state(net.backbone), state(net.domain("birds"))) == before


# ── remove ────────────────────────────────────────────────────────────────────────────────────


def test_a_removed_domain_takes_its_blobs_and_no_one_elses(ecology):
    with_all_parts(ecology, "flowers")
    with_all_parts(ecology, "birds")
    birds, before = small.read(ecology, "birds"), small.files(ecology.folder)
    ecology.remove(["flowers"], purge=True)
    after = small.files(ecology.folder)
    small.assert_tidy(ecology.folder)
    assert len(after) < len(before)
    assert all(before[name] == data for name, data in after.items() if name != MANIFEST)
    assert small.read(ecology, "birds") == birds
    with pytest.raises(cn.CovNormError, match="unknown domain 'flowers'"):
        ecology.entry("flowers")


def test_a_blob_that_two_domains_share_stays_until_the_last_is_removed(ecology):
    net = small.network("flowers")
    net.domains["birds"] = copy.deepcopy(net.domain("flowers"))
    for name in ("flowers", "birds"):
        ecology.put(net, {name: Details(small.facts())})
    shared = ecology.entry("flowers").blobs["tensors"]
    assert shared == ecology.entry("birds").blobs["tensors"]
    ecology.remove(["flowers"], purge=True)
    assert verify(ecology.folder) == []
    small.answers(ecology, "birds")
    ecology.remove(["birds"], purge=True)
    assert not list((ecology.folder / "blobs").iterdir())


def test_files_that_are_no_blobs_are_left_alone(ecology):
    small.put(ecology, "flowers")
    note = ecology.folder / "blobs" / "README"
    note.write_text("mine")
    ecology.remove(["flowers"], purge=True)
    assert [f.name for f in (ecology.folder / "blobs").iterdir()] == ["README"]


def test_what_a_killed_process_left_goes_with_the_next_change(ecology, monkeypatch):
    small.put(ecology, "flowers")
    blobs = ecology.folder / "blobs"
    left = [blobs / f"{'a' * 64}.json", blobs / f".{'b' * 64}.safetensors.{'c' * 16}"]
    for file in left:
        file.write_bytes(b"half")
    assert verify(ecology.folder) == [], "it is nobody's, and harms nobody"
    with monkeypatch.context() as patch:  # control: without the sweep it would stay
        patch.setattr(Blobs, "sweep", lambda *_: None)
        small.put(ecology, "birds")
        assert all(file.exists() for file in left)
    small.put(ecology, "cars")
    assert not any(file.exists() for file in left)
    small.assert_tidy(ecology.folder)


def test_a_name_given_twice_is_removed_once(ecology):
    small.put(ecology, "flowers", "birds")
    ecology.remove(["flowers", "flowers"])
    assert list(ecology.domains) == ["birds"]


def test_verify_ignores_what_others_remove_meanwhile(tmp_path):
    ecology = Ecology.create(tmp_path / "e", small.backbone())
    small.put(ecology, "a", "b", "c")

    def remove(done, total):
        if done == 1:
            Ecology(ecology.folder).remove(["b"])

    assert verify(ecology.folder, progress=remove) == []
    ecology.blobs.path(ecology.entry("c").blobs["tensors"]).unlink()
    assert len(verify(ecology.folder)) == 1
