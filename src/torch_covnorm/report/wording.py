"""Numbers as the report writes them."""

from __future__ import annotations

GAP = "\u00a0"  # no place for a line break


def number(n: int | None) -> str:
    """4652008 → 4 652 008."""
    return "–" if n is None else f"{n:,}".replace(",", GAP)


def size(n: float | None) -> str:
    """Bytes in units of a thousand: 301234 → 301 kB, 18608032 → 18.6 MB."""
    if n is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5 or unit == "TB":
            break
        n /= 1000
    return f"{n:.0f}{GAP}{unit}" if unit == "B" or n >= 99.95 else f"{n:.1f}{GAP}{unit}"


def percent(p: float | None, digits: int | None = None) -> str:
    """A percentage with its sign; two digits below 10, one below 100; – for None."""
    if p is None:
        return "–"
    if digits is None:
        if 0 < p < 0.005:
            return f"<{GAP}0.01{GAP}%"
        digits = 0 if p >= 99.95 or p == 0 else 1 if p >= 9.995 else 2
    return f"{p:,.{digits}f}{GAP}%".replace(",", GAP)


def share(part: float, whole: float) -> str:
    """A part in percent of the whole, whose name stands beside it."""
    return percent(100 * part / whole) if whole else "–"


def plural(n: int, one: str, many: str | None = None) -> str:
    """1 domain, 4 domains."""
    return f"{number(n)} {one if n == 1 else many or one + 's'}"
