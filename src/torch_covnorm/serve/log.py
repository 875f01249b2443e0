"""The server's log: a line a request, for people or for machines."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

LOG = logging.getLogger("torch_covnorm.serve")


class Lines(logging.Formatter):
    """Log lines for people, or for machines: one JSON object each."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        said: dict[str, Any] = getattr(record, "said", {})
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        stamp = f"{when}.{int(record.msecs):03}Z"
        if record.exc_info:
            said = {**said, "error": self.formatException(record.exc_info).replace("\n", " | ")}
        if self.as_json:
            whole = {"time": stamp, "level": record.levelname.lower()}
            return json.dumps({**whole, "event": record.getMessage(), **said})
        rest = " ".join(f"{key}={value}" for key, value in said.items())
        line = f"{stamp} {record.levelname.lower():7} {record.getMessage()} {rest}".rstrip()
        return line.replace("\n", " | ")


def log_to_stderr(as_json: bool) -> None:
    """Send the server's lines, and the warnings of what it stands on, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(as_json))
    logging.getLogger().handlers = [handler]
    logging.getLogger().setLevel(logging.WARNING)
    LOG.setLevel(logging.INFO)
    for name in ("python_multipart", "multipart"):  # a client's broken form is no news
        logging.getLogger(name).setLevel(logging.CRITICAL)
