"""Forged ecologies: every checksum fits, and still no other file is opened."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import small_ecology as small

import torch_covnorm as cn
from torch_covnorm.ecology import Ecology, verify

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
    "trained record without tensors": without("domains", "alone", "blobs", "trained.tensors"),
    "no method": without("domains", "alone", "method"),
    "no accuracy": without("domains", "alone", "accuracy"),
    "an unknown key": of("alone", password="x"),
    "an entry that is a number": lambda m: m["domains"].update(alone=7),
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
    "a basis that is a number": lambda m: m["bases"].update(joint=7),
    "a basis without a record": without("bases", "joint", "record"),
    "a basis without tensors": without("bases", "joint", "tensors"),
    "a basis whose record is a path": lambda m: m["bases"]["joint"].update(record=PATHS["up"]),
    "a basis whose tensors are a path": lambda m: m["bases"]["joint"].update(
        tensors=PATHS["absolute"]
    ),
    "a basis that no one has": without("bases", "joint"),
    "no backbone": without("backbone"),
    "a backbone that is a string": lambda m: m.update(backbone="vgg16"),
    "no fingerprint": without("backbone", "fingerprint"),
    "no weights": without("backbone", "weights"),
    "no name": without("backbone", "name"),
    "no class": without("backbone", "class"),
}


def version(**changes):
    """Forge the earlier version of a joint domain, from before it was joined."""
    return lambda m: m["earlier"]["digits"][0].update(changes)


def version_blob(part, value):
    return lambda m: m["earlier"]["digits"][0]["entry"]["blobs"].update({part: value})


def shared_version(**changes):
    """Forge a version that shares a basis."""

    def change(manifest):
        made = {"entry": dict(manifest["domains"]["digits"]), "basis": manifest["bases"]["joint"]}
        manifest["earlier"]["digits"] = [{**made, **changes}]

    return change


def shared_entry(**changes):
    def change(manifest):
        shared_version()(manifest)
        manifest["earlier"]["digits"][0]["entry"].update(changes)

    return change


WHOLE_MANIFEST |= {
    **{f"keep is {v!r}": lambda m, v=v: m.update(keep=v) for v in (-1, "3", 1.5, True, None, [])},
    "versions are a list": lambda m: m.update(earlier=[]),
    "versions are nothing": lambda m: m.update(earlier=None),
    "no version": lambda m: m["earlier"].update(digits=[]),
    "versions of a domain are no list": lambda m: m["earlier"].update(digits={"0": 1}),
    "a version that is a number": lambda m: m["earlier"].update(digits=[7]),
    "a version without an entry": without("earlier", "digits", 0, "entry"),
    "a version without a basis": without("earlier", "digits", 0, "basis"),
    "a version with an unknown key": version(password="x"),
    "a version whose entry is a list": version(entry=[]),
    "a version whose entry lacks its method": without("earlier", "digits", 0, "entry", "method"),
    "a version whose entry lacks tensors": without(
        "earlier", "digits", 0, "entry", "blobs", "tensors"
    ),
    "a version of a name that is none": lambda m: m["earlier"].update(
        {"../../x": m["earlier"].pop("digits")}
    ),
    **{f"a version's record is a path: {k}": version_blob("record", v) for k, v in PATHS.items()},
    "a version's tensors are a path": version_blob("tensors", PATHS["absolute"]),
    "a version's moments are a path": version_blob("moments", PATHS["up"]),
    "a version with a basis that it does not share": lambda m: m["earlier"]["digits"][0].update(
        basis=m["bases"]["joint"]
    ),
    "a version that shares a basis without its blobs": shared_version(basis=None),
    "a version whose basis lacks tensors": shared_version(basis={"record": f"{'a' * 64}.json"}),
    "a version whose basis is a path": shared_version(
        basis={"record": PATHS["up"], "tensors": PATHS["absolute"]}
    ),
    "a version whose basis has a name that is none": shared_entry(basis="../x"),
}


def test_control_a_version_with_its_basis_is_read(house):
    small.forge(house.folder, shared_version())
    assert len(Ecology(house.folder).versions["digits"]) == 1
    assert verify(house.folder) == []


def assert_clean(house, call):
    """Check that a call works or raises a CovNormError, and opens no file outside the ecology."""
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


@pytest.mark.slow
def test_a_manifest_that_is_sealed_again_unchanged_is_read(house, whole):
    """Control: it is not the checksum that refuses the forgeries."""
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
    """It is named by its content, so every checksum fits."""
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
    beside = [source / "records.py", source / "network" / "files.py"]
    for file in [*(source / "ecology").glob("*.py"), *beside]:
        code = file.read_text()
        assert not re.search(r"^\s*(import|from) (pickle|shelve|marshal|joblib)\b", code, re.M)
        code = re.sub(r"#.*", "", code)
        assert not re.search(r"(?<!safetensors\.)torch\.load\(", code), file
