"""Logs of the control plane: text or one JSON object a line, each record with its request id."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from opentinker_server.api.calls import current_request_id
from opentinker_server.config import LoggingSettings

_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        extras = " ".join(f"{key}={value}" for key, value in _extras(record).items())
        return f"{line} {extras}" if extras else line


def _add_request_id(record: logging.LogRecord) -> bool:
    request_id = current_request_id()
    if request_id and not hasattr(record, "request_id"):
        record.request_id = request_id
    return True


def set_up_logging(settings: LoggingSettings) -> None:
    """Send the server's records to standard error in the configured form."""
    handler = logging.StreamHandler(sys.stderr)
    text = _TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonFormatter() if settings.json else text)
    handler.addFilter(_add_request_id)
    root = logging.getLogger("opentinker_server")
    root.handlers[:] = [handler]
    root.setLevel(settings.level)
    root.propagate = False
