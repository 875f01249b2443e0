"""The one error class and the one warning class of the package."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class CovNormError(ValueError):
    """Bad input. The message names the site, file or value, and what to do."""


class CovNormWarning(UserWarning):
    """Something works, but perhaps not as the caller expects."""


def choices(value: object, options: Iterable[str]) -> str:
    """Return the end of an error message: ``did you mean 'vgg16'?`` or the list of options."""
    names = sorted(options)
    close = difflib.get_close_matches(str(value), names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"choose one of: {shown}" if names else "none exists yet"


def check_choice(key: str, value: object, options: Iterable[str]) -> None:
    """Check that a setting has one of its possible values."""
    names = list(options)
    if value not in names:
        raise CovNormError(f"{key}={value!r}: {choices(value, names)}")


def check_integer(name: str, value: object, least: int = 1) -> None:
    """Raise an error unless the value is an integer, `least` or more."""
    if not isinstance(value, int) or value < least:
        raise CovNormError(f"{name}={value!r}: must be an integer, {least} or more")


@contextlib.contextmanager
def at_site(site: str) -> Iterator[None]:
    """Name the site in every `CovNormError` raised inside."""
    try:
        yield
    except CovNormError as error:
        raise CovNormError(f"site {site!r}: {error}") from None
