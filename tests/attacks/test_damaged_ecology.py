"""Guarantees 12, 13 and 15 for the store: damage is found by name, forgeries are refused."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
from pathlib import Path

import pytest
import small_ecology as small
import torch

import torch_covnorm as cn
from torch_covnorm.ecology import Ecology, blobs, verify
from torch_covnorm.ecology.store import MANIFEST, references

# ── damage ────────────────────────────────────────────────────────────────────────────────────


def flipped(data):
    """One bit, anywhere."""
    bit = random.Random(len(data)).randrange(8 * len(data))
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


DAMAGE = {
    "flipped": lambda file: file.write_bytes(flipped(file.read_bytes())),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "one byte short": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "empty": lambda file: file.write_bytes(b""),
    "gone": Path.unlink,
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "another's": lambda file: shutil.copy(
        next(f for f in sorted(file.parent.iterdir()) if f != file and f.suffix == file.suffix),
        file,
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A joint basis, trained parts, moments, examples, and domains without them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ecology = small.everything(tmp_path_factory.mktemp("made") / "house")
    torch.set_num_threads(threads)
    return ecology


@pytest.fixture(scope="module")
def whole(made):
    """Every part of every domain, as it must stay."""
    return {name: small.read(made, name) for name in made.domains}


@pytest.fixture
def house(made, tmp_path):
    return Ecology(shutil.copytree(made.folder, tmp_path / "house"))


def restore(file, data):
    if file.is_dir():
        file.rmdir()
    file.write_bytes(data)


def test_the_store_that_is_damaged_below_has_blobs_of_every_kind(made):
    parts = {part for entry in made.domains.values() for part in entry.blobs}
    assert parts == {
        "record",
        "tensors",
        "details",
        "trained.record",
        "trained.tensors",
        "moments",
        "examples",
    }
    assert set(made.bases["joint"]) == {"record", "tensors", "moments"}
    assert verify(made.folder) == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_damaged_blob_is_found_and_named_and_costs_no_other_domain(house, whole, damage):
    named = sorted(set(references(house._manifest())))
    assert len(named) > 20
    for blob in named:
        file = house.blobs.path(blob)
        data = file.read_bytes()
        DAMAGE[damage](file)
        problems = verify(house.folder)
        assert any(str(file) in problem for problem in problems), (blob, problems)
        for name in house.domains:
            if blob in small.blobs_of(house, name):
                with pytest.raises(cn.CovNormError, match=blob):
                    small.read(house, name)
            elif damage in ("flipped", "gone"):
                assert small.answers(house, name) == whole[name][4]
        restore(file, data)
    assert verify(house.folder) == []
    assert {name: small.read(house, name) for name in house.domains} == whole


def test_all_damaged_blobs_at_once_are_all_found(house):
    named = sorted(set(references(house._manifest())))
    for blob in named:
        DAMAGE["flipped"](house.blobs.path(blob))
    problems = "\n".join(verify(house.folder))
    assert [blob for blob in named if blob not in problems] == []


def test_a_damaged_domain_can_be_removed_and_others_added_beside_it(house, whole):
    own = small.blobs_of(house, "alone") - small.blobs_of(house, "digits")
    assert len(own) > 4
    for blob in own:
        DAMAGE["cut"](house.blobs.path(blob))
    small.put(house, "new")
    assert small.read(house, "digits") == whole["digits"]
    house.remove(["alone"])
    assert verify(house.folder) == []


def test_without_comparing_the_checksum_a_flipped_number_would_load(house, whole, monkeypatch):
    """Control: it is the checksum that finds a flipped bit of a tensor."""
    file = house.blobs.path(house.entry("alone").blobs["tensors"])
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    assert len(verify(house.folder)) == 1
    monkeypatch.setattr(blobs, "read_whole", lambda file, _: file.read_bytes())
    assert verify(house.folder) == []
    small.answers(house, "alone")


def test_a_failed_load_leaves_the_network_as_it_was(house):
    net = house.network(small.backbone())
    DAMAGE["cut"](house.blobs.path(house.entry("digits").blobs["tensors"]))
    with pytest.raises(cn.CovNormError):
        house.load(net, "digits")
    assert not list(net.domains)
    assert not list(net.bases), "a basis without a domain"
    house.load(net, "parity")
    assert list(net.bases) == ["joint"]


# ── the manifest ──────────────────────────────────────────────────────────────────────────────


def assert_manifest_refused(folder, opened=None):
    """By all who open it, by one who has it open, and by `verify`, with the file's name."""
    with pytest.raises(cn.CovNormError, match=MANIFEST):
        Ecology(folder)
    (problem,) = verify(folder)
    assert MANIFEST in problem
    if opened is not None:
        with pytest.raises(cn.CovNormError, match=MANIFEST):
            opened.domains  # noqa: B018
        with pytest.raises(cn.CovNormError, match=MANIFEST):
            small.put(opened, "new")


@pytest.mark.parametrize("damage", ["flipped", "cut", "one byte short", "longer", "empty", "gone"])
def test_a_damaged_manifest_is_refused_by_name_and_no_blob_is_lost(house, whole, damage):
    file = house.folder / MANIFEST
    data, before = file.read_bytes(), small.files(house.folder)
    DAMAGE[damage](file)
    assert_manifest_refused(house.folder, house)
    file.write_bytes(data)
    assert small.files(house.folder) == before
    assert verify(house.folder) == []


def test_one_flipped_bit_anywhere_in_the_manifest_is_refused(house):
    file = house.folder / MANIFEST
    data = file.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(data)), 150):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(cn.CovNormError, match=MANIFEST):
            Ecology(house.folder)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "null", "3", '{"format": "torch-covnorm ecology"}', "\xff", "[" * 100_000, "NaN"],
    ids=lambda t: repr(t[:12]),
)
def test_other_json_in_the_manifests_place_is_refused_by_name(house, text):
    (house.folder / MANIFEST).write_bytes(text.encode("latin-1"))
    assert_manifest_refused(house.folder, house)


def test_a_record_of_another_kind_in_the_manifests_place_is_refused(house):
    blob = house.blobs.path(house.entry("alone").blobs["record"])
    shutil.copy(blob, house.folder / MANIFEST)
    assert_manifest_refused(house.folder)


def test_a_new_ecology_is_not_begun_over_the_blobs_of_one_that_lost_its_manifest(house):
    """Its next change would sweep every domain away."""
    (house.folder / MANIFEST).unlink()
    blobs = {f.name for f in (house.folder / "blobs").iterdir()}
    with pytest.raises(cn.CovNormError, match="blobs"):
        Ecology.create(house.folder, small.backbone())
    assert {f.name for f in (house.folder / "blobs").iterdir()} == blobs


# ── forgeries: every checksum fits ────────────────────────────────────────────────────────────


def of(name, **changes):
    return lambda manifest: manifest["domains"][name].update(changes)


def blob_of(name, part, value):
    return lambda manifest: manifest["domains"][name]["blobs"].update({part: value})


def without(*path):
    def change(manifest):
        *way, last = path
        place = manifest
        for key in way:
            place = place[key]
        del place[last]

    return change


def renamed(name):
    return lambda m: m["domains"].update({name: m["domains"].pop("alone")})


PATHS = {
    "up": "../../../etc/passwd",
    "absolute": "/etc/passwd",
    "up with an ending": f"../{'a' * 64}.json",
    "absolute with an ending": f"/tmp/{'a' * 64}.safetensors",
    "a newline": f"{'a' * 64}.json\n",
    "capital letters": f"{'A' * 64}.json",
    "a manifest": "../ecology.json",
    "a number": 7,
    "nothing": None,
    "a list": ["a"],
}
FORGED = {
    **{f"record is a path: {k}": blob_of("alone", "record", v) for k, v in PATHS.items()},
    **{f"tensors are a path: {k}": blob_of("alone", "tensors", v) for k, v in PATHS.items()},
    "details are a path": blob_of("alone", "details", PATHS["up"]),
    "moments are a path": blob_of("alone", "moments", PATHS["up"]),
    "examples are a path": blob_of("alone", "examples", PATHS["absolute"]),
    "trained part is a path": blob_of("alone", "trained.tensors", PATHS["absolute"]),
    "no blobs": without("domains", "alone", "blobs"),
    "blobs are a list": of("alone", blobs=[]),
    "no record": without("domains", "alone", "blobs", "record"),
    "no tensors": without("domains", "alone", "blobs", "tensors"),
    "no details": without("domains", "alone", "blobs", "details"),
    "trained record alone": without("domains", "alone", "blobs", "trained.tensors"),
    "no method": without("domains", "alone", "method"),
    "no accuracy": without("domains", "alone", "accuracy"),
    "an unknown key": of("alone", password="x"),
    "an entry that is none": lambda m: m["domains"].update(alone=7),
    "tensors and record exchanged": lambda m: m["domains"]["alone"]["blobs"].update(
        record=m["domains"]["alone"]["blobs"]["tensors"],
        tensors=m["domains"]["alone"]["blobs"]["record"],
    ),
    "details in the record's place": lambda m: m["domains"]["alone"]["blobs"].update(
        record=m["domains"]["alone"]["blobs"]["details"]
    ),
    "the tensors of another": lambda m: m["domains"]["alone"]["blobs"].update(
        tensors=m["domains"]["norms"]["blobs"]["tensors"]
    ),
    "other tensors in the moments' place": lambda m: m["domains"]["alone"]["blobs"].update(
        moments=m["domains"]["alone"]["blobs"]["tensors"]
    ),
}
OF_ANOTHER = ("the tensors of another", "other tensors in the moments' place")  # whole in itself
NO_NAMES = ("../../x", "/etc/passwd", "", "UPPER", ".hidden", "a" * 65, "a b", "a\n")
WHOLE_MANIFEST = {
    "no domains": without("domains"),
    "domains are a list": lambda m: m.update(domains=[]),
    "no bases": without("bases"),
    "bases are a list": lambda m: m.update(bases=["joint"]),
    "a basis that is none": lambda m: m["bases"].update(joint=7),
    "a basis without a record": without("bases", "joint", "record"),
    "a basis without tensors": without("bases", "joint", "tensors"),
    "a basis whose record is a path": lambda m: m["bases"]["joint"].update(record=PATHS["up"]),
    "a basis whose tensors are a path": lambda m: m["bases"]["joint"].update(
        tensors=PATHS["absolute"]
    ),
    "a basis that no one has": without("bases", "joint"),
    "no backbone": without("backbone"),
    "a backbone that is none": lambda m: m.update(backbone="vgg16"),
    "no fingerprint": without("backbone", "fingerprint"),
    "no weights": without("backbone", "weights"),
    "no name": without("backbone", "name"),
    "no class": without("backbone", "class"),
}


def assert_clean(house, call):
    """It works or is a CovNormError; nothing outside the ecology's files is opened."""
    with small.opened() as seen:
        try:
            call()
            refused = False
        except cn.CovNormError:
            refused = True
    blob = r"[0-9a-f]{64}\.(json|safetensors)"
    new = rf"\.({blob}|ecology\.json)\.[0-9a-f]{{16}}"  # being written
    inside = re.compile(
        rf"{re.escape(str(house))}(/ecology\.json|/\.lock|(/blobs)?(/{new})?|/blobs/{blob})"
    )
    away = [f for f in seen if "house" in f or "passwd" in f or f.startswith("/tmp/aaa")]
    assert [f for f in away if not inside.fullmatch(f)] == []
    return refused


def everything_of(folder, name):
    ecology = Ecology(folder)
    ecology.domains  # noqa: B018
    small.read(ecology, name)


def test_a_manifest_that_is_sealed_again_unchanged_is_read(house, whole):
    """Control of the forgeries: what refuses them is not the checksum."""
    small.forge(house.folder, dict.copy)
    assert not assert_clean(house.folder, lambda: everything_of(house.folder, "alone"))
    assert verify(house.folder) == []


@pytest.mark.parametrize("change", FORGED)
def test_a_forged_entry_is_refused_and_found_and_its_neighbours_are_read(house, whole, change):
    small.forge(house.folder, FORGED[change])
    assert assert_clean(house.folder, lambda: everything_of(house.folder, "alone"))
    found = []
    assert_clean(house.folder, lambda: found.extend(verify(house.folder)))
    if change not in OF_ANOTHER:
        assert found, "verify must find it"


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_a_name_that_is_none_in_the_manifest_is_refused(house, name):
    net = house.network(small.backbone())
    small.forge(house.folder, renamed(name))
    assert assert_clean(house.folder, lambda: everything_of(house.folder, name))
    assert verify(house.folder) != []
    with pytest.raises(cn.CovNormError):
        house.load(net, name)
    assert not list(net.domains)


@pytest.mark.parametrize("change", WHOLE_MANIFEST)
def test_a_forged_manifest_is_refused_or_found_never_a_raw_error(house, change):
    small.forge(house.folder, WHOLE_MANIFEST[change])
    refused = []
    for name in ("digits", "alone"):
        refused.append(assert_clean(house.folder, lambda: everything_of(house.folder, name)))  # noqa: B023
    found = []
    assert_clean(house.folder, lambda: found.extend(verify(house.folder)))
    assert found
    assert any(refused)


@pytest.mark.parametrize("change", WHOLE_MANIFEST)
def test_writing_to_a_forged_manifest_loses_no_blob_of_others_and_raises_no_raw_error(
    house, change
):
    small.forge(house.folder, WHOLE_MANIFEST[change])
    assert_clean(house.folder, lambda: small.put(Ecology(house.folder), "new"))
    assert_clean(house.folder, lambda: Ecology(house.folder).remove(["norms"]))


# ── forged records inside ─────────────────────────────────────────────────────────────────────

RECORD = ("domains", "digits", "blobs", "record")
BASIS = ("bases", "joint", "record")
FORGED_RECORDS = {
    "of another backbone": (RECORD, lambda r: r["backbone"].update(fingerprint="0" * 64)),
    "no backbone": (RECORD, lambda r: r.pop("backbone")),
    "no fingerprint": (RECORD, lambda r: r["backbone"].pop("fingerprint")),
    "no basis": (RECORD, lambda r: r.pop("basis")),
    "basis is a word": (RECORD, lambda r: r.update(basis="joint")),
    "basis without a name": (RECORD, lambda r: r["basis"].pop("name")),
    "basis of no name": (RECORD, lambda r: r["basis"].update(name="../x")),
    "basis of another name": (RECORD, lambda r: r["basis"].update(name="nobody")),
    "basis is a list": (RECORD, lambda r: r["basis"].update(name=["joint"])),
    "basis of another fingerprint": (RECORD, lambda r: r["basis"].update(fingerprint="0" * 64)),
    "no sites": (RECORD, lambda r: r.pop("sites")),
    "no classes": (RECORD, lambda r: r.pop("classes")),
    "fewer classes": (RECORD, lambda r: r["classes"].pop()),
    "its basis is of another backbone": (
        BASIS,
        lambda r: r["backbone"].update(fingerprint="0" * 64),
    ),
    "its basis has another fingerprint": (BASIS, lambda r: r.update(fingerprint="0" * 64)),
    "its basis has no backbone": (BASIS, lambda r: r.pop("backbone")),
    "its basis has no fingerprint": (BASIS, lambda r: r.pop("fingerprint")),
    "its basis has no sites": (BASIS, lambda r: r.pop("sites")),
    "its basis has no kind": (BASIS, lambda r: r.update(kind="nothing")),
}
SEEN_BY_VERIFY = {k for k in FORGED_RECORDS if "backbone" in k or "fingerprint" in k} | {
    "no basis",
    "basis is a word",
    "basis without a name",
    "basis of another name",
}


@pytest.mark.parametrize("change", FORGED_RECORDS)
def test_a_forged_record_is_refused_and_the_network_stays(house, change):
    small.forge_blob(house.folder, *FORGED_RECORDS[change])
    ecology = Ecology(house.folder)
    net = ecology.network(small.backbone())
    assert assert_clean(house.folder, lambda: ecology.load(net, "digits"))
    assert not list(net.domains)
    found = []
    assert_clean(house.folder, lambda: found.extend(verify(house.folder)))
    if change in SEEN_BY_VERIFY:
        assert found


@pytest.mark.parametrize("part", ["tensors", "moments", "examples", "record", "details"])
def test_a_pickle_is_never_opened(house, part, tmp_path):
    """Its name is that of its content, so every checksum fits."""
    import hashlib

    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    data = pickle.dumps(Trap())
    old = house.entry("alone").blobs[part]
    blob = f"{hashlib.sha256(data).hexdigest()}{Path(old).suffix}"
    (house.folder / "blobs" / blob).write_bytes(data)
    small.forge(house.folder, blob_of("alone", part, blob))
    assert assert_clean(house.folder, lambda: everything_of(house.folder, "alone"))
    assert any(blob in problem for problem in verify(house.folder))
    assert not (tmp_path / "sprung").exists()
    pickle.loads(data)  # control: it would have sprung
    assert (tmp_path / "sprung").exists()


def test_no_code_of_the_store_unpickles():
    source = Path(cn.__file__).parent
    for file in [*(source / "ecology").glob("*.py"), source / "records.py", source / "files.py"]:
        code = file.read_text()
        assert not re.search(r"^\s*(import|from) (pickle|shelve|marshal|joblib)\b", code, re.M)
        code = re.sub(r"#.*", "", code)
        assert not re.search(r"(?<!safetensors\.)torch\.load\(", code), file


def test_the_command_tells_of_damage_in_one_line_and_with_exit_code_2(house):
    from typer.testing import CliRunner

    from torch_covnorm.cli.app import app

    def run(*args):
        return CliRunner().invoke(app, [*args, "--json", "--ecology", str(house.folder)])

    assert json.loads(run("verify").stdout) == {"ok": True, "problems": []}
    file = house.blobs.path(house.entry("alone").blobs["tensors"])
    DAMAGE["flipped"](file)
    done = run("verify")
    assert done.exit_code == 2
    (problem,) = json.loads(done.stdout)["problems"]
    assert file.name in problem
    DAMAGE["cut"](house.folder / MANIFEST)
    done = run("verify")
    assert done.exit_code == 2
    assert MANIFEST in json.loads(done.stdout)["problems"][0]
