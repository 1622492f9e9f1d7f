"""Logs as JSON lines, in one format for all processes of a server."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

# loggers with handlers: the root logger, and transformers'
HANDLED_LOGGERS = ("", "transformers")


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, exception, and fixed fields.

    Args:
        fields: further fields of every line.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.values(record))

    def values(self, record: logging.LogRecord) -> dict[str, Any]:
        line: dict[str, Any] = {"time": iso(record.created), "level": record.levelname, "logger": record.name}
        line |= {"message": record.getMessage()} | self._fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return line


def write_json(formatter: JsonLines) -> None:
    """Write the process's logs and warnings as JSON lines; call it again after importing transformers."""
    logging.captureWarnings(True)
    for name in HANDLED_LOGGERS:
        for handler in logging.getLogger(name).handlers:
            handler.setFormatter(formatter)


def writes_json() -> bool:
    """Whether the process's logs are JSON lines."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
