"""Logs as events with fields: `logging` calls pass them as `extra`, and each line shows them."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}


def fields(record: logging.LogRecord) -> dict[str, object]:
    """What the caller passed as `extra`."""
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


class Lines(logging.Formatter):
    """`2026-01-02T03:04:05.678Z INFO  event key=value`, or one JSON object per line."""

    def __init__(self, json_lines: bool) -> None:
        super().__init__()
        self._json = json_lines

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._json:
            line = {
                "time": time,
                "level": record.levelname.lower(),
                "message": record.getMessage(),
                "logger": record.name,
                **fields(record),
            }
            return json.dumps(line | ({"trace": trace} if trace else {}), default=str)
        text = " ".join([time, f"{record.levelname:<7}", record.getMessage(), *(f"{k}={_shown(v)}" for k, v in fields(record).items())])
        return f"{text}\n{trace}" if trace else text


def set_up(level: str = "INFO", json_lines: bool = True) -> None:
    """Sends all logs of the process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(json_lines))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _shown(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return json.dumps(text) if not text or any(c.isspace() or c in '"=' for c in text) else text
