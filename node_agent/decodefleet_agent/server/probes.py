"""The HTTP port: /metrics, and the pod's probes /startupz, /readyz and /livez."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus

from prometheus_client.exposition import choose_encoder

from decodefleet_agent.server.agent import Agent, Phase

_PATIENCE = 10.0  # seconds that a client gets to send its request
_MAX_HEADERS = 100


class Probes:
    """`alive` is False once the agent cannot serve any more. Answers GET and HEAD, one request a connection."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.alive = True

    async def start(self, host: str, port: int) -> asyncio.Server:
        """Raises OSError if the port cannot be bound."""
        return await asyncio.start_server(self._serve, host, port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError, ValueError):  # the client's own affair
            async with asyncio.timeout(_PATIENCE):
                method, path, headers = await _read_request(reader)
                status, kind, body = self._answer(method, path, headers.get("accept", ""))
                head = (
                    f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                )
                writer.write(head.encode() + (b"" if method == "HEAD" else body))
                await writer.drain()
        writer.close()

    def _answer(self, method: str, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        if method not in ("GET", "HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not allowed; use GET")
        match path.partition("?")[0]:
            case "/metrics":
                encode, kind = choose_encoder(accept)
                return HTTPStatus.OK, kind, encode(self._agent.metrics.registry)
            case "/livez":
                return _probe(self.alive, "alive" if self.alive else "the engine died")
            case "/startupz":
                started = self._agent.phase in (Phase.SERVING, Phase.DRAINING)
                return _probe(started, self._agent.phase if started else self._agent.progress)
            case "/readyz":
                ready = self.alive and self._agent.phase is Phase.SERVING
                return _probe(ready, self._agent.phase)
        return _text(HTTPStatus.NOT_FOUND, "not found; there are /metrics, /livez, /readyz and /startupz")


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]]:
    """Method, path and headers. Raises ValueError for what is not HTTP."""
    method, path, _ = (await reader.readuntil(b"\n")).decode("latin-1").split(" ", 2)
    headers: dict[str, str] = {}
    for _ in range(_MAX_HEADERS):
        line = (await reader.readuntil(b"\n")).decode("latin-1").strip()
        if not line:
            return method, path, headers
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    raise ValueError("too many headers")


def _text(status: HTTPStatus, text: str) -> tuple[HTTPStatus, str, bytes]:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


def _probe(ok: bool, text: str) -> tuple[HTTPStatus, str, bytes]:
    return _text(HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE, text)
