"""Make links from docs/ to other files of the repository work in the site.

In the repository a page links to ``../recipes/one_domain.py`` and names code as
``stats.moments.Moments``. The site has no such files. This hook of mkdocs adds each file that is
linked as a page below ``source/``, and points the links there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PACKAGE = "src/torch_covnorm"
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
DOTTED = re.compile(r"`([a-z]\w*(?:\.\w+)+)`")
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")  # in the site even if no page links to them


def page_of(file: str) -> str:
    """Return the page of the site that shows a file of the repository."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return f"source/{file}" if file.endswith(".md") else f"source/{file}.md"


def module_of(name: str) -> str | None:
    """Return the file that a dotted path inside the package leads to."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        for file in ("/".join([PACKAGE, *parts[:n]]) + end for end in (".py", "/__init__.py")):
            if (ROOT / file).is_file():
                return file
    return None


def links(markdown: str, file: str) -> dict[str, str]:
    """Return {link: file of the repository that it leads to} for the Markdown of a file."""
    folder = posixpath.dirname(file)
    found = {
        link: posixpath.normpath(posixpath.join(folder, link)) for link in LINK.findall(markdown)
    }
    return {link: target for link, target in found.items() if (ROOT / target).is_file()}


def rewritten(markdown: str, file: str) -> str:
    """Return the Markdown of a file of the repository, with links as its page needs them."""
    folder = posixpath.dirname(page_of(file))

    def to(target: str) -> str:
        return posixpath.relpath(page_of(target), folder or ".")

    def code(match: re.Match[str]) -> str:
        target = module_of(match[1])
        return f"[{match[0]}]({to(target)})" if target else match[0]

    found = links(markdown, file)
    markdown = LINK.sub(lambda m: to(found[m[1]]) if m[1] in found else m[1], markdown)
    return DOTTED.sub(code, markdown) if file == "docs/paper-map.md" else markdown


def on_files(files: Files, config: Any) -> Files:
    """Add the files that pages link to as pages of their own."""
    waiting = [f"docs/{f.src_uri}" for f in files.documentation_pages()] + list(PAGES)
    seen: set[str] = set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        text = (ROOT / file).read_text(encoding="utf-8") if file.endswith((".md", ".py")) else ""
        if not file.startswith("docs/"):
            content = rewritten(text, file) if file.endswith(".md") else _as_code(file)
            files.append(File.generated(config, page_of(file), content=content))
        if file.endswith(".md"):
            waiting += [t for t in links(text, file).values() if not t.startswith("docs/")]
        if file == "docs/paper-map.md":
            waiting += [t for name in DOTTED.findall(text) if (t := module_of(name))]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page of docs/ into the site."""
    inside = not page.file.src_uri.startswith("source/")
    return rewritten(markdown, f"docs/{page.file.src_uri}") if inside else markdown


def _as_code(file: str) -> str:
    """Return a page that shows a file, and that the search leaves out."""
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# {file}\n\n"
    size = (ROOT / file).stat().st_size
    if size > 100_000:
        return f"{head}{size:,} bytes, in the repository.\n"
    text = (ROOT / file).read_text(encoding="utf-8")
    language = "python" if file.endswith(".py") else "text"
    return f"{head}~~~~~~~~ {language}\n{text}\n~~~~~~~~\n"
