"""The server's log: one line per event, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

LOG = logging.getLogger("torch_covnorm.serve")


class LineFormatter(logging.Formatter):
    """Format a record and its `fields` as one line: text, or one JSON object."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        stamp = when.replace("+00:00", "Z")
        level, event = record.levelname.lower(), record.getMessage()
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info).replace("\n", " | ")
        if self.as_json:
            return json.dumps({"time": stamp, "level": level, "event": event, **fields})
        rest = " ".join(f"{key}={value}" for key, value in fields.items())
        return f"{stamp} {level:7} {event} {rest}".rstrip().replace("\n", " | ")


def log_to_stderr(as_json: bool) -> None:
    """Send the server's log, and the warnings of the libraries below it, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(as_json))
    logging.getLogger().handlers = [handler]
    logging.getLogger().setLevel(logging.WARNING)
    LOG.setLevel(logging.INFO)
    for name in ("python_multipart", "multipart"):  # they warn about every malformed form
        logging.getLogger(name).setLevel(logging.CRITICAL)
