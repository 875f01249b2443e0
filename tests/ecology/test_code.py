"""A backbone that is a function in the user's file, from the shell and from Python."""

from __future__ import annotations

import stat
import subprocess
import sys

import pytest
import torch
from command import covnorm, photos
from small_ecology import facts

import torch_covnorm as cn
from torch_covnorm.ecology import Details, code, verify

SOURCE = """
import dataclasses

import torch
from torch import nn


@dataclasses.dataclass
class Widths:
    first: int = 8
    second: int = 12


class Net(nn.Module):
    preprocessing = {"size": 32, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}

    def __init__(self, w):
        super().__init__()
        self.a = nn.Conv2d(3, w.first, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(w.first)
        self.b = nn.Conv2d(w.first, w.second, 3, stride=2, padding=1)
        self.head = nn.Linear(w.second, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.a(x)))
        return self.head(torch.relu(self.b(x)).mean((2, 3)))


def tiny():
    return Net(Widths())


def number():
    return 7


def broken():
    raise KeyError("no such thing")
"""


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    """The user's configuration, empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "torch-covnorm" / code.APPROVED


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "nets.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def house(file, tmp_path):
    return cn.Ecology.create(tmp_path / "house", f"{file}:tiny")


def stranger(monkeypatch, tmp_path):
    """Become a user who has approved nothing."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "stranger"))


@pytest.mark.slow
def test_every_command_works_without_the_file(file, tmp_path):
    """init, then the file goes away; each command runs in this process, and one in a fresh one."""
    house, images = tmp_path / "house", photos(tmp_path / "photos", n=40)
    ran = covnorm("init", house, "--backbone", f"{file}:tiny", "--json")
    assert ran.code == 0, ran.err
    backbone = ran.json["backbone"]
    assert backbone["name"] == "nets.py:tiny"
    assert backbone["class"] == "Net"
    assert backbone["preprocessing"] == {
        "size": 32,
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.3, 0.4],
    }
    assert (house / "blobs" / backbone["code"]["source"]).read_text() == SOURCE
    file.unlink()
    where = ("--ecology", house)
    add = ("add", "clipart", images, "--epochs", 1, "--size", 32, "--variance", 0.9, "--quiet")
    image = next(images.rglob("*.png"))
    for words in (
        (*add, *where),
        ("predict", "clipart", image, *where),
        ("eval", "clipart", *where),
        ("export", "clipart", "--to", "domain", "--out", tmp_path / "out", *where),
        ("verify", *where),
    ):
        ran = covnorm(*words)
        assert ran.code == 0, f"{words}: {ran.err}"
    words = [sys.executable, "-m", "torch_covnorm", "predict", "clipart", image, *where, "--json"]
    fresh = subprocess.run(map(str, words), capture_output=True, text=True, check=True)
    assert '"label"' in fresh.stdout


def test_the_weights_are_stored_with_the_code(house):
    """The function draws random weights; the ecology has those of its creation."""
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        first, second = (house.network().backbone(x) for _ in range(2))
        assert torch.equal(first, second)
        made = code.run(SOURCE.encode(), "tiny", "source").eval()(x)
    assert not torch.equal(first, made)  # control
    assert verify(house.folder) == []


@pytest.mark.parametrize("how", ["its names", "other names"])
def test_weights_of_a_file_go_into_the_function_s_network(file, how, tmp_path):
    net = code.run(SOURCE.encode(), "tiny", "source").eval()
    state = {f"module.{k}": v for k, v in net.state_dict().items()}
    if how == "other names":
        words = {"a": "stem", "norm": "stem_norm", "b": "body", "head": "out"}
        state = {f"{words[k.split('.')[1]]}.{k.split('.')[2]}": v for k, v in state.items()}
    torch.save(state, tmp_path / "w.pth")
    words = ("--backbone", f"{file}:tiny", "--weights", tmp_path / "w.pth")
    ran = covnorm("init", tmp_path / "house", *words)
    assert ran.code == 0, ran.err
    found = "11 by name" if how == "its names" else "11 by order and shape"
    assert f"w.pth: 11 tensors: {found}" in ran.out
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(cn.Ecology(tmp_path / "house").network().backbone(x), net(x))


def test_tied_parameters_are_stored(tmp_path, file):
    file.write_text(SOURCE + "\ndef tied():\n    n = tiny()\n    n.again = n.a\n    return n\n")
    house = cn.Ecology.create(tmp_path / "tied", f"{file}:tied")
    net = house.network().backbone
    assert net.again.weight is net.a.weight


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nets.py:tiy", "nets.py:tiy: has no function 'tiy': did you mean 'tiny'"),
        ("nets.py:number", r"number\(\) returned a int. Return an nn.Module"),
        ("nets.py:broken", r"broken\(\) raised KeyError: 'no such thing'"),
        ("none.py:tiny", "none.py: No such file"),
        ("syntax.py:tiny", r"syntax.py:tiny: tiny\(\) raised SyntaxError"),
        ("beside.py:tiny", "cannot import nets. The ecology keeps this one file"),
    ],
)
def test_what_cannot_be_a_backbone_is_an_error_in_one_line(file, spec, message, tmp_path, config):
    (file.parent / "syntax.py").write_text("def tiny(:\n")
    (file.parent / "beside.py").write_text("from nets import tiny\n")
    with pytest.raises(cn.CovNormError, match=message):
        cn.Ecology.create(tmp_path / "house", f"{file.parent / spec}")
    assert not (tmp_path / "house").exists()
    assert not config.exists()


# ── whose code runs ───────────────────────────────────────────────────────────────────────────


def test_approval_is_kept_outside_the_store_for_this_user_only(house, config):
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert stat.S_IMODE(config.parent.stat().st_mode) & 0o077 == 0
    assert config.read_text() == f"{code.digest(SOURCE.encode())} tiny\n"
    assert not [f for f in house.folder.rglob("*") if f.name == code.APPROVED]


def test_another_user_is_refused_unless_the_code_is_trusted(house, tmp_path, monkeypatch):
    stranger(monkeypatch, tmp_path)
    with pytest.raises(cn.CovNormError, match="not approved on this machine") as caught:
        cn.Ecology(house.folder).network()
    for part in (house.backbone["code"]["source"], "'tiny'", "--trust-code", "trust_code=True"):
        assert part in str(caught.value)
    assert cn.Ecology(house.folder, trust_code=True).network().sites
    with pytest.raises(cn.CovNormError, match="not approved"):  # trusted once is not approved
        cn.Ecology(house.folder).network()


def test_every_command_that_opens_the_network_refuses_and_obeys_trust_code(
    house, tmp_path, monkeypatch
):
    images = photos(tmp_path / "photos", n=40)
    net = house.network()
    net.add_domain("a", classes=["x", "y"])
    house.put(net, {"a": Details(facts())})
    stranger(monkeypatch, tmp_path)
    image, where = next(images.rglob("*.png")), ("--ecology", house.folder)
    for words in (
        ("predict", "a", image, *where),
        ("export", "a", "--to", "domain", "--out", tmp_path / "out", *where),
        ("bench", "--rounds", 1, "--batch", 2, *where),
    ):
        ran = covnorm(*words)
        assert (ran.code, "--trust-code" in ran.err) == (2, True), words
        ran = covnorm(*words, "--trust-code")
        assert ran.code == 0, ran.err
    for words in (("add", "b", images, *where), ("serve", house.folder), ("eval", "a", *where)):
        ran = covnorm(*words)
        assert (ran.code, "--trust-code" in ran.err) == (2, True), words
    for words in (("list", *where), ("show", "a", *where)):  # these need no network
        assert "trust-code" not in covnorm(*words).err


def test_verify_checks_the_files_of_code_that_must_not_run(house, tmp_path, monkeypatch):
    stranger(monkeypatch, tmp_path)
    with pytest.warns(cn.CovNormWarning, match="did not run"):
        assert verify(house.folder) == []
    assert verify(house.folder, trust_code=True) == []
    blob = house.blobs.path(house.backbone["code"]["source"])
    blob.write_text(SOURCE + "\n# changed")
    (problem,) = verify(house.folder)
    assert blob.name in problem


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_list_that_others_can_write_approves_nothing(house, config, what):
    assert cn.Ecology(house.folder).network()
    path = config if what == "file" else config.parent
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(cn.CovNormError, match="not approved"):
        cn.Ecology(house.folder).network()


def test_a_list_that_is_a_link_approves_nothing(house, config, tmp_path):
    config.rename(tmp_path / "elsewhere")
    config.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(cn.CovNormError, match="not approved"):
        cn.Ecology(house.folder).network()


def test_a_configuration_folder_that_is_a_file_is_a_warning(file, tmp_path):
    (tmp_path / "config").write_text("")
    with pytest.warns(cn.CovNormWarning, match="later commands need --trust-code"):
        house = cn.Ecology.create(tmp_path / "house", f"{file}:tiny")
    assert cn.Ecology(house.folder, trust_code=True).network()
