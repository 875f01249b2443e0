"""Stores with hostile code in them: every checksum fits, and still nothing runs."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import pytest
import small_ecology as small
from command import covnorm

import torch_covnorm as cn
from torch_covnorm.ecology import code, verify

TRAP = """
from pathlib import Path
Path({trap!r}).touch()
"""
SMALL = """
from torch import nn

def net():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    )

def other():
    from pathlib import Path
    Path({trap!r}).touch()
    return net()
"""

pytestmark = pytest.mark.filterwarnings("ignore:the backbone is code")  # what `verify` says


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "torch-covnorm" / code.APPROVED


@pytest.fixture
def trap(tmp_path):
    """A file that appears as soon as the hostile code runs."""
    return tmp_path / "sprung"


@pytest.fixture
def house(tmp_path, trap):
    """An ecology of this user's code, which is approved."""
    file = tmp_path / "nets.py"
    file.write_text(SMALL.format(trap=str(trap)))
    house = cn.Ecology.create(tmp_path / "house", f"{file}:net")
    assert not trap.exists()
    return house


def write_source(house, text):
    """Put source into the store under the name of its content; return the blob's name."""
    blob = f"{hashlib.sha256(text.encode()).hexdigest()}.py"
    (house.folder / "blobs" / blob).write_text(text)
    return blob


def code_is(**changes):
    return lambda manifest: manifest["backbone"]["code"].update(changes)


def every_way(folder):
    """Open the network in every way that needs no trust; return what was said."""
    said = []
    with pytest.raises(cn.CovNormError) as caught:
        cn.Ecology(folder).network()
    said.append(str(caught.value))
    for words in (
        ("predict", "a", "x.png", "--ecology", folder),
        ("serve", folder, "--port", 0),
        ("add", "b", folder, "--ecology", folder),
        ("export", "a", "--ecology", folder),
    ):
        ran = covnorm(*words)
        assert ran.code == 2
        said.append(ran.err)
    covnorm("list", "--ecology", folder)
    covnorm("verify", "--ecology", folder)
    return said


def test_hostile_code_does_not_run_when_it_is_opened_listed_verified_or_served(house, trap):
    blob = write_source(house, TRAP.format(trap=str(trap)) + SMALL.format(trap=str(trap)))
    small.forge(house.folder, code_is(source=blob))
    said = every_way(house.folder)
    assert not trap.exists()
    assert blob in said[0]
    assert "--trust-code" in said[0]
    cn.Ecology(house.folder, trust_code=True).network()  # control: it would have sprung
    assert trap.exists()


def test_another_function_of_approved_source_does_not_run(house, trap):
    small.forge(house.folder, code_is(function="other"))
    every_way(house.folder)
    assert not trap.exists()
    cn.Ecology(house.folder, trust_code=True).network()  # control
    assert trap.exists()


def test_changed_source_under_its_old_name_is_refused_even_when_trusted(house, trap):
    blob = house.blobs.path(house.backbone["code"]["source"])
    blob.write_text(TRAP.format(trap=str(trap)) + blob.read_text())
    for trust in (False, True):
        with pytest.raises(cn.CovNormError, match=f"{blob.name}: is damaged"):
            cn.Ecology(house.folder, trust_code=trust).network()
    assert any(blob.name in problem for problem in verify(house.folder))
    assert not trap.exists()


def test_code_that_a_store_adds_to_a_backbone_without_code_does_not_run(tmp_path, trap):
    house = cn.Ecology.create(tmp_path / "plain", "resnet26", "random")
    blob = write_source(house, TRAP.format(trap=str(trap)) + SMALL.format(trap=str(trap)))
    changed = {"source": blob, "function": "net"}
    small.forge(house.folder, lambda m: m["backbone"].update(code=changed))
    every_way(house.folder)
    assert not trap.exists()


def test_a_name_of_the_form_file_function_without_code_runs_no_file(tmp_path, trap):
    """Only `init` reads a file by this form; the name in a manifest is a word like any other."""
    hostile = tmp_path / "hostile.py"
    hostile.write_text(TRAP.format(trap=str(trap)) + SMALL.format(trap=str(trap)))
    house = cn.Ecology.create(tmp_path / "plain", "resnet26", "random")
    small.forge(house.folder, lambda m: m["backbone"].update(name=f"{hostile}:net"))
    every_way(house.folder)
    assert not trap.exists()


def test_approvals_inside_a_store_count_for_nothing(house, trap, tmp_path, monkeypatch):
    blob = write_source(house, TRAP.format(trap=str(trap)) + SMALL.format(trap=str(trap)))
    small.forge(house.folder, code_is(source=blob))
    for place in (house.folder, house.folder / "torch-covnorm", house.folder / "blobs"):
        place.mkdir(exist_ok=True)
        (place / code.APPROVED).write_text(f"{blob.removesuffix('.py')} net\n")
    monkeypatch.chdir(house.folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", ".")  # a relative path is not a configuration
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    every_way(house.folder)
    assert not trap.exists()


@pytest.mark.parametrize(
    "forged",
    [
        *({}, None, 7, "net", ["net"], {"source": "x"}, {"function": "net"}),
        {"source": "../../nets.py", "function": "net"},
        {"source": "/tmp/nets.py", "function": "net"},
        {"source": f"{'a' * 64}.json", "function": "net"},
        {"source": f"{'a' * 64}.py", "function": "net; import os"},
        {"source": f"{'a' * 64}.py", "function": None},
        {"source": f"{'a' * 64}.py", "function": 7},
        {"source": f"{'a' * 64}.py", "function": "net", "more": 1},
        {"source": f"{'a' * 64}.py", "function": "net"},  # well-formed, and not there
    ],
    ids=repr,
)
def test_a_forged_description_of_code_is_an_error_and_opens_nothing_else(house, forged):
    small.forge(house.folder, lambda m: m["backbone"].update(code=forged))
    with small.opened() as seen, pytest.raises(cn.CovNormError):
        cn.Ecology(house.folder, trust_code=True).network()
    assert not [f for f in seen if f.endswith("nets.py")]
    assert verify(house.folder) != []


def test_a_copied_store_runs_here_and_not_elsewhere(house, tmp_path, monkeypatch):
    copy = shutil.copytree(house.folder, tmp_path / "copy")
    assert cn.Ecology(copy).network()  # the same source, approved by this user
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another machine"))
    with pytest.raises(cn.CovNormError, match="not approved"):
        cn.Ecology(copy).network()


def test_code_runs_in_one_place_of_the_package():
    source = Path(cn.__file__).parent
    running = re.compile(r"\b(exec_module|run_path|run_module|__import__)\(")
    found = [f for f in source.rglob("*.py") if running.search(f.read_text())]
    assert found == [source / "ecology" / "code.py"]
