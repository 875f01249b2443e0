"""Pages of which one part is made by a program: what stands between two markers."""

from __future__ import annotations

from torch_covnorm.errors import CovNormError


def filled(page: str, begin: str, end: str, text: str) -> str:
    """Return a page with this text between the lines `begin` and `end`."""
    if begin not in page or end not in page:
        raise CovNormError(f"the page has no lines {begin!r} and {end!r}. Restore them.")
    return f"{page.partition(begin)[0]}{begin}\n\n{text}\n\n{end}{page.partition(end)[2]}"
