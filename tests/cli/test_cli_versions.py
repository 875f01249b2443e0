"""`import`, `history`, `rollback`, `remove --purge`, `gc` and the sizes of `list`."""

from __future__ import annotations

import json
import shutil

import pytest
import small_ecology as small
from command import covnorm, npz
from PIL import Image
from zoo import shake_

import torch_covnorm as cn
from torch_covnorm.cli.options import version_names
from torch_covnorm.data import read_source
from torch_covnorm.ecology import Details, Ecology
from torch_covnorm.ecology.images import decode_for

INPUTS = {"size": 32, "mean": [0.5] * 3, "std": [0.25] * 3, "fit": "squash"}


def put(ecology, name, seed=0, accuracy=50.0):
    """Store an untrained domain; another seed gives other numbers."""
    import torch

    net = ecology.network()
    torch.manual_seed(seed)
    net.add_domain(name, ["cat", "dog"], adapter="none", preprocessing=INPUTS)
    shake_(net.domain(name))
    time = f"2025-01-0{seed + 1}T00:00:00+00:00"
    facts = small.facts(accuracy, history=[{"what": "add", "time": time}])
    ecology.put(net, {name: Details(facts)}, replace=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An ecology with a domain of two versions, and another domain."""
    folder = tmp_path_factory.mktemp("made") / "house"
    assert covnorm("init", folder, "--backbone", "resnet26", "--weights", "random").code == 0
    ecology = Ecology(folder)
    put(ecology, "pets", accuracy=60.0)
    put(ecology, "pets", seed=1, accuracy=70.0)
    put(ecology, "others")
    return folder


@pytest.fixture
def house(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "house")
    monkeypatch.chdir(tmp_path / "house")
    return Ecology(tmp_path / "house")


def fails(*args, says):
    ran = covnorm(*args)
    assert (ran.code, ran.out) == (2, ""), ran
    assert ran.err.count("\n") == 1
    assert says in ran.err, ran.err


def test_history_and_rollback_print_and_do_what_they_say(house):
    first, second = covnorm("history", "pets", "--json").json
    keys = {"version", "current", "time", "what", "method", "accuracy", "bytes", "digest"}
    assert set(first) == set(second) == keys
    assert [first["accuracy"], second["accuracy"]] == [70.0, 60.0]
    assert second["time"] == "2025-01-01T00:00:00+00:00"
    shown = covnorm("history", "pets").out.splitlines()
    assert shown[1].split()[0] == "current"
    assert shown[1].split()[-1] == first["digest"][:12]
    assert shown[2].split()[0] == "1"
    (now,) = covnorm("rollback", "pets", "--to", second["digest"][:12], "--json").json
    assert (now["domain"], now["digest"], now["current"]) == ("pets", second["digest"], True)
    assert covnorm("list", "--json").json[0]["accuracy"] == 60.0
    assert "pets is now" in covnorm("rollback", "pets").out
    assert covnorm("list", "--json").json[0]["accuracy"] == 70.0
    fails("rollback", "others", says="'others' has no earlier version")
    fails("rollback", "pet", says="did you mean 'pets'?")
    fails("rollback", "pets", "--to", "2", says="covnorm history pets")
    fails("rollback", "pets", "others", "--to", "1", says="name one domain")
    fails("history", "pet", says="did you mean 'pets'?")


def test_a_removed_domain_is_listed_completed_and_restored_until_it_is_purged(house):
    ran = covnorm("remove", "pets")
    assert "covnorm rollback pets" in ran.out
    fails("show", "pets", says="unknown domain 'pets'")
    fails("remove", "pets", says="unknown domain 'pets'")
    assert "can be restored by covnorm rollback: pets" in covnorm("list").out
    assert "was removed" in covnorm("history", "pets").out
    assert version_names("p") == ["pets"]
    assert covnorm("rollback", "pets").code == 0
    assert [row["domain"] for row in covnorm("list", "--json").json] == ["others", "pets"]
    assert covnorm("remove", "pets", "--purge", "--json").json == {
        "removed": ["pets"],
        "purged": True,
    }
    fails("rollback", "pets", says="unknown domain 'pets'")
    assert version_names("p") == []
    small.assert_tidy(house.folder)


def test_list_tells_served_and_kept_bytes_and_cache_apart(house, tmp_path):
    decode_for(house, read_source(npz(tmp_path / "digits.npz", 20, 10)), size=8)
    work = house.workplace("interrupted")
    work.mkdir(parents=True)
    (work / "snapshot").write_bytes(b"x" * 5000)
    rows = {row["domain"]: row for row in covnorm("list", "--json").json}
    contract = {"domain", "method", "classes", "accuracy", "parameters", "bytes"}
    assert all(contract <= set(row) for row in rows.values())
    assert [rows[name]["versions"] for name in ("pets", "others")] == [1, 0]
    pets, other = rows["pets"], rows["others"]
    assert pets["bytes"] == house.entry("pets").bytes, "the served bytes, as before"
    assert pets["kept_bytes"] == sum(pets["kept"].values()) > other["kept_bytes"] > 0
    assert set(pets["kept"]) == {"trained", "moments", "examples", "details", "versions"}
    shown = covnorm("list").out
    assert "earlier versions" in shown
    assert "of decoded images" in shown
    assert "5.0 kB of unfinished work" in shown


def test_gc_frees_what_a_dry_run_announces(house):
    covnorm("remove", "others")
    dry = covnorm("gc", "--keep", 0, "--dry-run", "--json").json
    assert set(dry["freed"]) == {"versions", "leftovers", "work", "cache"}
    assert dry["freed"]["versions"] > 0
    assert house.versions
    assert "would be freed" in covnorm("gc", "--dry-run").out
    assert covnorm("gc", "--keep", 0, "--json").json == {**dry, "dry_run": False}
    assert house.versions == {}
    assert house.keep == 3, "the setting stays"
    assert covnorm("gc", "--keep", 1, "--always").code == 0
    assert house.keep == 1
    fails("gc", "--always", says="--keep N")


def test_init_says_how_many_versions_are_kept(tmp_path):
    words = ("init", tmp_path / "none", "--backbone", "resnet26", "--weights", "random")
    assert covnorm(*words, "--keep", 0).code == 0
    ecology = cn.Ecology(tmp_path / "none")
    put(ecology, "pets")
    put(ecology, "pets", seed=1)
    assert (ecology.keep, ecology.versions) == (0, {})
    assert covnorm("init", tmp_path / "less", "--keep", -1).code == 2


def test_what_export_wrote_is_imported_and_every_command_knows_it(house, tmp_path):
    out = tmp_path / "out"
    assert covnorm("export", "pets", "--to", "domain", "--out", out).code == 0
    fails("import", out / "pets", says="'pets' already exists")
    fails("import", out, says="has no domain.json")
    result = covnorm("import", out / "pets", "--name", "copy", "--json").json
    assert (result["domain"], result["classes"], result["basis"]) == ("copy", 2, None)
    assert result["source"] == str(out / "pets")
    picture = tmp_path / "picture.png"
    Image.new("RGB", (40, 30), (200, 30, 90)).save(picture)
    answers = [covnorm("predict", name, picture, "--json").json for name in ("pets", "copy")]
    for a, b in zip(answers[0][0]["top"], answers[1][0]["top"], strict=True):
        assert a["label"] == b["label"]
        assert a["probability"] == pytest.approx(b["probability"], abs=1e-6)
    shown = covnorm("show", "copy", "--json").json
    assert shown["source"]["imported"] == str(out / "pets")
    assert [event["what"] for event in shown["history"]] == ["import"]
    assert "import" in covnorm("show", "copy").out
    assert [row["domain"] for row in covnorm("list", "--json").json][-1] == "copy"
    assert covnorm("verify").code == 0
    fails("eval", "copy", "--quiet", says="does not know where its images are")
    assert covnorm("import", out / "pets", "--replace").code == 0
    assert [row["what"] for row in covnorm("history", "pets", "--json").json][:2] == [
        "import",
        "add",
    ]


@pytest.mark.parametrize("size", [5000, 0, "8", None])
def test_a_domain_that_could_not_be_served_is_not_imported(house, tmp_path, size):
    from torch_covnorm import records

    covnorm("export", "pets", "--to", "domain", "--out", tmp_path)
    file = tmp_path / "pets" / "domain.json"
    record = small.content(json.loads(file.read_bytes()))
    record["preprocessing"]["size"] = size
    file.write_bytes(records.sealed("torch-covnorm domain", record))
    fails("import", tmp_path / "pets", "--name", "copy", says="invalid preprocessing")
    assert "copy" not in house.domains
