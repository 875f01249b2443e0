"""Serve every domain of an ecology from one network, over HTTP. Needs the extra `serve`.

README.md in this folder follows a request through the modules. This file stays light, because every
worker process imports it: the web framework is imported by `server` only.
"""

from __future__ import annotations

from .keys import Keys
from .limits import Limits

__all__ = ["Keys", "Limits"]
