"""Why a request does not get its stream, as a gRPC status."""

from __future__ import annotations

import grpc


class Refused(Exception):
    """Ends a request with a status. `reason` is the label of the rejection in metrics; `retry_after` seconds go out as RetryInfo."""

    def __init__(self, code: grpc.StatusCode, message: str, *, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.reason, self.retry_after = code, message, reason, retry_after


def invalid(message: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message, reason="invalid")


def unavailable(message: str, reason: str) -> Refused:
    return Refused(grpc.StatusCode.UNAVAILABLE, message, reason=reason)


class StartupError(Exception):
    """The agent cannot start as it is configured; the message says what to change."""
