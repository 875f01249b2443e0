"""The package itself: lean import, one direction of imports, a README and a recipe that run."""

from __future__ import annotations

import ast
import glob
import graphlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command import covnorm, npz, photos

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "torch_covnorm"

# The flow: a file imports only from what stands before its own folder.
FLOW = (
    *("version", "errors", "records", "stats", "adapters", "network", "training", "compress"),
    *("methods", "backbones", "data", "ecology", "engines", "report", "serve", "cli"),
    *("__init__", "__main__"),
)


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
    """Folders and root modules of the package that a file imports, for types alone included."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            here = file.parent.relative_to(SOURCE).parts
            base = here[: len(here) - node.level + 1]
            path = [*base, *(node.module or "").split(".")]
            found.update([a.name for a in node.names] if not path[0] else [path[0]])
    return found


def test_imports_flow_one_way():
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE).parts
        module = parts[0].removesuffix(".py")
        for imported in imports(file) - {module}:
            assert FLOW.index(imported) < FLOW.index(module), f"{module} imports {imported}"


def module_imports(source: Path) -> dict[str, set[str]]:
    """{module: modules of the same package that it imports when it is loaded, or for types}."""
    modules = {
        ".".join(f.relative_to(source).with_suffix("").parts): f for f in source.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        statements, graph[module] = list(ast.parse(file.read_text()).body), set()
        for node in statements:  # grows while it is read: `if` and `try`, but no function bodies
            if isinstance(node, ast.If | ast.Try):
                statements += [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
            if isinstance(node, ast.ImportFrom) and node.level:
                package = module.split(".")[: -node.level]
                path = [*package, *(node.module.split(".") if node.module else [])]
                for name in node.names:
                    wanted = ([*path, name.name], path, [*path, "__init__"])
                    found = [m for m in (".".join(w) for w in wanted) if m in modules]
                    graph[module].update(found[:1])
    return graph


def test_no_module_imports_itself_in_a_circle_not_even_for_types():
    graph = module_imports(SOURCE)
    assert {"network.files", "network.basis", "errors"} <= graph["network.network"]
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("types_only", [False, True])
def test_control_a_circle_of_imports_is_seen(types_only, tmp_path):
    (tmp_path / "inner").mkdir()
    line = "from .inner import b\n"
    guarded = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {line}"
    (tmp_path / "a.py").write_text(guarded if types_only else line)
    (tmp_path / "inner" / "__init__.py").write_text("")
    (tmp_path / "inner" / "b.py").write_text("from ..c import x\n")
    (tmp_path / "c.py").write_text("def x():\n    from .a import y\n")  # when called: no circle
    list(graphlib.TopologicalSorter(module_imports(tmp_path)).static_order())
    (tmp_path / "c.py").write_text("from .a import y\n")
    with pytest.raises(graphlib.CycleError) as error:
        list(graphlib.TopologicalSorter(module_imports(tmp_path)).static_order())
    assert set(error.value.args[1]) == {"a", "inner.b", "c"}


def test_the_page_for_contributors_names_every_module():
    table = re.findall(r"^\| (`.*?`) \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)
    named = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert set(FLOW) - {"version", "errors", "__init__", "__main__"} <= named


def test_control_the_flow_test_sees_what_a_file_imports():
    assert {"network", "stats", "adapters"} <= imports(SOURCE / "compress" / "covnorm.py")
    assert {"errors", "stats", "adapters"} >= imports(SOURCE / "adapters" / "maps.py")


def test_the_root_holds_only_what_everybody_uses():
    assert len(list(SOURCE.glob("*.py"))) <= 8


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


def blocks(page, language):
    """The blocks of a page in one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


@pytest.mark.parametrize("page", ["README.md", "docs/methods.md", "docs/ecology.md"])
def test_every_block_of_the_page_runs(page, tmp_path, monkeypatch):
    """Blocks run in order, in one namespace, in an empty folder."""
    found = blocks(page, "python")
    assert found
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in found:
        exec(compile(block, page, "exec"), namespace)


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs lines as a shell would, in a folder with small real images: `covnorm`, `cd`, `export`.

    A line may end with ``# exit 2`` to say that it fails.
    """
    images = sorted(photos(tmp_path / "photos").rglob("*.png"))
    rows = [f"{image.relative_to(tmp_path)},{image.parent.name}\n" for image in images]
    (tmp_path / "photos.csv").write_text("path,label\n" + "".join(rows))
    npz(tmp_path / "digits.npz")
    digits = photos(tmp_path / "digits", classes=10, name="digits")
    next((digits / "7").iterdir()).rename(tmp_path / "seven.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COVNORM_ECOLOGY", "")

    def run(line):
        program, *words = shlex.split(line, comments=True) or [""]
        if program == "cd":
            monkeypatch.chdir(words[0])
        elif program == "export":
            monkeypatch.setenv(*words[0].split("=", 1))
        elif program:
            assert program == "covnorm", f"what is {line}?"
            said = re.search(r"# exit (\d+)$", line)
            ran = covnorm(*(file for word in words for file in sorted(glob.glob(word)) or [word]))  # noqa: PTH207
            assert ran.code == (int(said[1]) if said else 0), f"{line}\n{ran.err}"

    return run


@pytest.mark.parametrize("page", ["README.md", "docs/command.md"])
def test_every_command_of_the_page_runs(page, shell):
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    assert lines or page == "README.md"
    for line in lines:
        shell(line)


def test_control_a_command_that_fails_is_seen(shell):
    shell("covnorm lst   # exit 2")
    for line in ("covnorm lst", "covnorm --version   # exit 2", "rm -r photos"):
        with pytest.raises(AssertionError):
            shell(line)


def test_the_page_of_the_command_names_every_subcommand_and_option():
    import typer

    from torch_covnorm.cli.app import app

    page = (ROOT / "docs" / "command.md").read_text()
    commands = typer.main.get_command(app).commands
    assert len(commands) > 10
    for name, command in commands.items():
        section = re.search(rf"^## {name}\n(.*?)(?=^## )", page, flags=re.M | re.S)
        assert section, name
        for option in (o for parameter in command.params for o in parameter.opts):
            assert not option.startswith("--") or f"`{option}" in page, f"{name} {option}"


def test_the_recipe_is_one_readable_file():
    text = (ROOT / "recipes" / "one_domain.py").read_text()
    assert len(text.splitlines()) < 150


def test_every_test_that_the_guarantees_name_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "guarantees.md").read_text()))
    there = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        there.update(re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), flags=re.M))
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
