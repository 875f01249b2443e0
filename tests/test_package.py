"""The package itself: lean import, one direction of imports, docs that run and links that lead."""

from __future__ import annotations

import ast
import contextlib
import glob
import graphlib
import importlib
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import loggers
import pytest
from command import covnorm, npz, photos

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "torch_covnorm"

# The flow: a file imports only from what stands before its own folder.
FLOW = (
    *(
        "version",
        "errors",
        "threads",
        "records",
        "stats",
        "adapters",
        "network",
        "training",
        "compress",
    ),
    *("methods", "backbones", "data", "ecology", "engines", "report", "serve", "cli"),
    *("api", "__init__", "__main__"),
)


def test_import_is_lean():
    code = "import sys, torch_covnorm; print(*sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in answer.stdout.split()}
    assert "torch_covnorm" in loaded
    heavy = {"matplotlib", "fastapi", "timm", "torchvision", "typer", "sklearn", "PIL"}
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
    assert set(FLOW) - {"version", "errors", "api", "__init__", "__main__"} <= named


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


# Every page, and those with blocks that run. "docs/howto/serve.md" needs a server and has none.
PAGES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *(str(file.relative_to(ROOT)) for file in sorted((ROOT / "docs").rglob("*.md"))),
]
GUIDES = (
    *("at-work", "size", "joint", "network", "training", "baselines", "cost", "store"),
    "decathlon",
)
RUN = {
    "python": [
        "README.md",
        "docs/images.md",
        "docs/tutorial.md",
        *(f"docs/howto/{name}.md" for name in GUIDES),
    ],
    "sh": ["README.md", "docs/tutorial.md", "docs/command.md", "docs/howto/at-work.md"],
}


def blocks(page, language):
    """The blocks of a page in one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


def test_every_page_with_blocks_is_run():
    for language, pages in RUN.items():
        assert [page for page in PAGES if blocks(page, language)] == sorted(pages, key=PAGES.index)


@pytest.mark.parametrize("page", RUN["python"])
@pytest.mark.slow
def test_every_block_of_the_page_runs(page, tmp_path, monkeypatch):
    """Blocks run in order, in one namespace, in an empty folder."""
    found = blocks(page, "python")
    assert found
    monkeypatch.chdir(tmp_path)
    missing = loggers.stand_in(monkeypatch)
    namespace: dict[str, object] = {}
    for block in found:
        exec(compile(block, page, "exec"), namespace)
    used = {name for name in missing if any(name in block for block in found)}
    assert {name for name, _ in loggers.LOGGED} == used, "what logs has logged"


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


@pytest.mark.parametrize("page", RUN["sh"])
@pytest.mark.slow
def test_every_command_of_the_page_runs(page, shell):
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    assert lines
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


# ── the paper map and the API reference ──────────────────────────────────────────────────────

FOLDERS = [name for name in FLOW if (SOURCE / name).is_dir()]


def resolve(name: str) -> object:
    """Import a dotted path, such as torch_covnorm.stats.moments.Moments.pca, or raise."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):  # a module before a function of its name
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.import_module(".".join(parts[:n]))
            break
    for part in parts[n:]:
        fields = getattr(found, "__dataclass_fields__", {})  # those without a default
        found = fields[part] if part in fields else getattr(found, part)
    return found


def missing_in_map(page: str) -> list[str]:
    """What a paper map names and the code does not have, or has in another module.

    Code is a dotted path from a folder of the package, and may then be named by its last part.
    """
    dotted = set(re.findall(rf"`((?:{'|'.join(FOLDERS)})\.[\w.]+)`", page))
    missing = []
    for name in dotted:
        try:
            found = resolve(f"torch_covnorm.{name}")
        except AttributeError:
            missing.append(name)
            continue
        place = getattr(found, "__module__", "")
        of_ours = isinstance(found, type | types.FunctionType)
        if of_ours and not f"torch_covnorm.{name}".startswith(f"{place}."):
            missing.append(f"{name}: is in {place}")
    known = {part for name in dotted for part in name.split(".")}
    known |= set(re.findall(r"\w+", (SOURCE / "__init__.py").read_text()))
    words = re.findall(r"`([A-Z][a-z]\w*[A-Z]\w*|\w+_|\w+(?=\(…))(?:\([^`]*\))?`", page)
    missing += [word for word in words if word not in known]
    files = re.findall(r"`([\w/]+\.py)`", page)
    return missing + [file for file in files if not (ROOT / file).exists()]


def test_every_name_of_the_paper_map_can_be_imported():
    page = (ROOT / "docs" / "paper-map.md").read_text()
    assert missing_in_map(page) == []
    tables = [
        page.partition(f"## {head}\n")[2].partition("\n## ")[0]
        for head in ("Equations", "Algorithm 1")
    ]
    rows = [line for table in tables for line in table.splitlines()[3:] if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[:10]] == [str(n) for n in range(1, 11)]
    assert len(rows) > 20
    for row in rows:
        assert re.search(rf"`(?:{'|'.join(FOLDERS)})\.[\w.]+`", row), row


def test_control_a_wrong_name_in_the_paper_map_is_seen():
    right = "`stats.moments.Moments.pca`, `compress.joint.Joined.captured`, `tests/test_package.py`"
    assert missing_in_map(f"{right}, `normalize_(…, M=)`, `CovNormError`") == []
    for wrong in (
        *("stats.moments.Moments.pcb", "stats.moment.Moments", "compress.joint.Joined.capture"),
        *(
            "compress.joint.Moments",
            "normalise_(…, M=)",
            "CovNormMistake",
            "recipes/two_domains.py",
        ),
    ):
        assert len(missing_in_map(f"{right}, `{wrong}`")) == 1, wrong


def test_the_api_reference_has_every_public_name():
    import torch_covnorm as cn
    from torch_covnorm import data, ecology

    pages = "\n".join(file.read_text() for file in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: (torch_covnorm\.[\w.]+)$", pages, flags=re.M)
    for name in shown:
        resolve(name)
    assert len(shown) == len(set(shown))
    for module in (cn, data, ecology):
        for name in module.__all__:
            assert {f"torch_covnorm.{name}", f"{module.__name__}.{name}"} & set(shown), name


# ── links ────────────────────────────────────────────────────────────────────────────────────


def prose(page: Path) -> str:
    """The text of a page without its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return re.sub(r"^ {4}.*$", "", text, flags=re.M)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs both make them."""
    heads = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", head.strip().lower())) for head in heads}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading of it."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "`", prose(page))):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page):
    assert broken_links(ROOT / page) == []


def test_control_a_broken_link_is_seen(tmp_path):
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# Other\n\n## What `it` does, and why\n\n```sh\n# no heading\n```\n")
    page.write_text(
        "# Page\n[a](other.md) [b](other.md#what-it-does-and-why) [c](#page) [d](https://x.org/y)\n"
        "[e](another.md) [f](other.md#no-heading) [g](#pages) ![h](picture.png) `[i](none.md)`\n"
    )
    assert broken_links(page) == ["another.md", "other.md#no-heading", "#pages", "picture.png"]


def test_every_page_can_be_reached_from_the_first():
    site = (ROOT / "mkdocs.yml").read_text()
    first = (ROOT / "docs" / "index.md").read_text()
    for page in (p.removeprefix("docs/") for p in PAGES if p.startswith("docs/")):
        assert f" {page}\n" in site, f"mkdocs.yml: add {page} to nav"
        assert f"({page})" in first or page == "index.md", f"docs/index.md: link to {page}"


def test_the_readme_is_read_in_one_go():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_no_two_test_files_have_the_same_name():
    """Pytest imports them by name: one of the two would not be run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
