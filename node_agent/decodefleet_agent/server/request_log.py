"""The request log: one JSON line per finished, failed, cancelled or rejected request, for comparison with what clients saw."""

from __future__ import annotations

import json
import time
from typing import Any, TextIO

from decodefleet_agent.server.errors import StartupError
from decodefleet_agent.server.objectives import Measured, Outcome


class RequestLog:
    """Does nothing without a path. Raises StartupError if the file cannot be opened."""

    def __init__(self, path: str | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            try:
                self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (open as long as the process)
            except OSError as error:
                raise StartupError(f"requestLog: {path} cannot be written: {error.strerror}") from error

    def write(
        self,
        request_id: str,
        outcome: Outcome,
        measured: Measured,
        good: dict[str, bool],
        *,
        prompt_tokens: int,
        completion_tokens: int = 0,
        error: str | None = None,
    ) -> None:
        """`good` by objective; an objective that the request says nothing about is absent."""
        if self._file is None:
            return
        line: dict[str, Any] = {
            "id": request_id,
            "time": round(time.time(), 6),
            "outcome": outcome.value,
            "ttft": measured.time_to_first_token,
            "tpot": measured.time_per_output_token,
            "duration": measured.duration,
            "queue_time": measured.queue_time,
            "good": good,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
        }
        if error is not None:
            line["error"] = error
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
