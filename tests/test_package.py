"""The package itself: lean import, one direction of imports, a README and a recipe that run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "torch_covnorm"

# What comes before may be imported by what comes after; nothing the other way.
FLOW = """
    version errors modulemap moments ranks normalize adapters sites domain routing mixed merge
    records basis files network batches covnorm geometric joint accounting lwf evaluation progress
    schedules seeds snapshot loop training run methods settings adapt data backbones bare prediction export
    ecology report cli __init__ __main__
""".split()  # noqa: SIM905


def test_import_is_lean():
    code = "import sys, torch_covnorm; print(*sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in answer.stdout.split()}
    assert "torch_covnorm" in loaded
    heavy = {"matplotlib", "fastapi", "timm", "torchvision", "typer", "sklearn", "PIL", "ray"}
    assert not loaded & heavy


def imports(file: Path) -> set[str]:
    """The modules of the package that a file imports when it runs (not for types alone)."""
    found = set()
    tree = ast.parse(file.read_text())
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in typing_only:
            here = file.parent.relative_to(SOURCE).parts
            base = here[: len(here) - node.level + 1]
            path = [*base, *(node.module or "").split(".")]
            names = [a.name for a in node.names] if not path[0] else [path[0]]
            found.update(names)
    return found


def test_imports_flow_one_way():
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE).parts
        module = parts[0].removesuffix(".py")
        for imported in imports(file) - {module}:
            assert FLOW.index(imported) < FLOW.index(module), f"{module} imports {imported}"


def test_control_the_flow_test_sees_what_a_file_imports():
    assert {"network", "moments", "adapters"} <= imports(SOURCE / "covnorm.py")
    assert {"errors", "normalize", "maps"} >= imports(SOURCE / "adapters" / "maps.py")


def test_no_module_is_longer_than_400_lines():
    lengths = {f: len(f.read_text().splitlines()) for f in ROOT.glob("[s-t]*/**/*.py")}
    assert lengths
    assert max(lengths.values()) <= 400


def test_nothing_in_the_source_unpickles():
    for file in SOURCE.rglob("*.py"):
        for line in file.read_text().splitlines():
            assert not re.search(r"\bpickle\b|\beval\(\s*[^)]|\bexec\(", line) or ".eval()" in line
            loads = re.search(r"(?<!safetensors\.)torch\.load\(", line)
            assert not loads or "weights_only=True" in line


def test_every_public_name_has_a_docstring():
    import torch_covnorm as cn

    for name in cn.__all__:
        if name not in ("METHODS", "PRESETS", "TRAININGS", "__version__"):
            assert getattr(cn, name).__doc__


@pytest.mark.parametrize("page", ["README.md", "docs/methods.md"])
def test_every_block_of_the_page_runs(page, tmp_path, monkeypatch):
    """Blocks run in order, in one namespace, in an empty folder."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)
    assert blocks
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)


def test_the_recipe_is_one_readable_file():
    text = (ROOT / "recipes" / "one_domain.py").read_text()
    assert len(text.splitlines()) < 150


def test_every_test_that_the_guarantees_name_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "guarantees.md").read_text()))
    there = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        there.update(re.findall(r"^def (test_\w+)", file.read_text(), flags=re.M))
    assert len(named) > 30
    assert named <= there, named - there


def test_every_function_that_the_paper_map_names_exists():
    """Each name in the code column that looks like one of ours is in the source."""
    page = (ROOT / "docs" / "paper-map.md").read_text()
    source = "\n".join(f.read_text() for f in SOURCE.rglob("*.py"))
    for file in set(re.findall(r"`((?:adapters|backbones)/\w+\.py|\w+\.py)`", page)):
        assert (SOURCE / file).exists(), file
    for name in set(re.findall(r"`(?:[A-Z]\w+\.)?(\w+)(?:\([^`]*\))?` \(`", page)):
        assert re.search(rf"\b{name}\b", source), name
