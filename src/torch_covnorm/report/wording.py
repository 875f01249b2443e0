"""Numbers, sizes and names as people read them, for the report and the command."""

from __future__ import annotations

import unicodedata


def number(n: int | None) -> str:
    """Group thousands: 4652008 → 4 652 008; None → –."""
    return "–" if n is None else f"{n:,}".replace(",", " ")


def size(n: float | None) -> str:
    """Write bytes in units of a thousand: 301234 → 301 kB, 18608032 → 18.6 MB; None → –."""
    if n is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5 or unit == "TB":
            break
        n /= 1000
    return f"{n:.0f} {unit}" if unit == "B" or n >= 99.95 else f"{n:.1f} {unit}"


def percent(p: float | None, digits: int | None = None) -> str:
    """Write a percentage, by default with two digits below 10 and one below 100; None → –."""
    if p is None:
        return "–"
    if digits is None:
        if 0 < p < 0.005:
            return "< 0.01 %"
        digits = 0 if p >= 99.95 or p == 0 else 1 if p >= 9.995 else 2
    return f"{p:,.{digits}f} %".replace(",", " ")


def share(part: float, whole: float) -> str:
    """Write a part in percent of the whole."""
    return percent(100 * part / whole) if whole else "–"


def plural(n: int, one: str, many: str | None = None) -> str:
    """Write a count with its noun: 1 domain, 4 domains."""
    return f"{number(n)} {one if n == 1 else many or one + 's'}"


def shortened(text: str, columns: int) -> str:
    """Cut a text to that many columns and end it with …; wide characters take two columns."""
    used = 0
    for i, character in enumerate(text):
        used += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used > columns:
            return text[: max(i - 1, 1)] + "…"
    return text
