"""A reverse proxy in front of the API server: counts what passes, spoils answers, and cuts the operator off after write N."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp
from aiohttp import web
from yarl import URL

WRITES = ("POST", "PUT", "PATCH", "DELETE")
_HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive", "authorization"}


@dataclass(frozen=True)
class Request:
    verb: str  # GET, LIST, WATCH or the method of a write
    path: str
    status: int | None = None  # what the API server answered

    @property
    def write(self) -> bool:
        return self.verb in WRITES


@dataclass
class Fault:
    """What to do with the next `times` requests that match, instead of passing them on."""

    matches: Callable[[Request], bool]
    status: int | None  # None: hang until the client gives up
    times: int = 1
    after: bool = False  # pass the request on first: it is done, but the client does not hear of it
    hits: int = 0


@dataclass
class Proxy:
    server: str
    token: str
    faults: list[Fault] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    passed: list[Request] = field(default_factory=list)
    writes_left: int | None = None  # None: any number
    spent: asyncio.Event = field(default_factory=asyncio.Event)  # the last allowed write was done
    url: str = ""
    _session: aiohttp.ClientSession | None = None

    def __post_init__(self) -> None:
        self._streams = asyncio.Event()

    def drop_watches(self) -> None:
        """Ends all streams, as a restarted API server does."""
        self._streams.set()
        self._streams = asyncio.Event()

    @asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        """Nothing passes."""
        self.spent.set()
        self.drop_watches()
        try:
            yield
        finally:
            self.spent.clear()

    def created(self, plural: str) -> int:
        """Objects that POSTs through here made."""
        return sum(r.verb == "POST" and r.path.endswith(f"/{plural}") and r.status == 201 for r in self.passed)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        seen = _classify(request)
        if self.spent.is_set():
            return _cut(request)
        for fault in self.faults:
            if fault.hits < fault.times and fault.matches(seen):
                fault.hits += 1
                if fault.after:
                    await self._forward(request, seen)
                if fault.status is None:
                    await asyncio.sleep(3600)
                return _status(fault.status or 500)
        if seen.write and "/leases" not in seen.path and self.writes_left is not None:
            if self.writes_left == 0:
                self.spent.set()
                return _cut(request)
            self.writes_left -= 1
            response = await self._forward(request, seen)
            if self.writes_left == 0:
                self.spent.set()
                return _cut(request)  # it is done, and nobody hears of it
            return response
        return await self._forward(request, seen)

    async def _forward(self, request: web.Request, seen: Request) -> web.StreamResponse:
        assert self._session is not None
        self.counts[seen.verb] += 1
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP} | {"Authorization": f"Bearer {self.token}"}
        body = await request.read()
        async with self._session.request(
            request.method, URL(self.server + request.raw_path, encoded=True), headers=headers, data=body or None
        ) as answer:
            self.passed.append(replace(seen, status=answer.status))
            kept = {k: v for k, v in answer.headers.items() if k.lower() in ("content-type", "retry-after")}
            if seen.verb != "WATCH" or answer.status >= 400:
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)
            stream = web.StreamResponse(status=answer.status, headers=kept)
            await stream.prepare(request)
            dropped = asyncio.create_task(self._streams.wait())
            try:
                while not self.spent.is_set():
                    chunk = asyncio.create_task(answer.content.readany())
                    await asyncio.wait({chunk, dropped}, return_when=asyncio.FIRST_COMPLETED)
                    if dropped.done() or not (data := await chunk):
                        chunk.cancel()
                        break
                    await stream.write(data)
            except ConnectionError:
                pass  # the operator has gone
            finally:
                dropped.cancel()
            return stream


def _classify(request: web.Request) -> Request:
    verb = request.method
    if verb == "GET":
        named = len(request.path.strip("/").split("/")) % 2 == (0 if request.path.startswith("/api/") else 1)
        is_list = "limit" in request.query or "labelSelector" in request.query
        verb = "WATCH" if request.query.get("watch") in ("true", "1") else "LIST" if is_list or not named else "GET"
    return Request(verb, request.path)


def _cut(request: web.Request) -> web.Response:
    """The connection ends without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


def _status(code: int) -> web.Response:
    reasons = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reasons[code], "code": code, "message": "injected"}
    headers = {"Retry-After": "1"} if code == 429 else {}
    return web.Response(status=code, text=json.dumps(body), content_type="application/json", headers=headers)


@asynccontextmanager
async def proxy(server: str, token: str) -> AsyncIterator[Proxy]:
    made = Proxy(server, token)
    context = ssl._create_unverified_context()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=context, limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        made._session = session
        application = web.Application(client_max_size=2**25)
        application.router.add_route("*", "/{path:.*}", made.handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield made
        finally:
            await runner.cleanup()
