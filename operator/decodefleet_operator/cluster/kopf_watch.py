"""kopf, reduced to what it is here for: it watches DecoderDeployments and hands their events over."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import kopf
import kubernetes.client

from decodefleet_operator.api import GROUP, PLURAL, VERSION
from decodefleet_operator.cluster.client import FIELD_MANAGER, OUTAGE, ApiClient, Object, authorization
from decodefleet_operator.cluster.resources import Resources, installed

log = logging.getLogger(__name__)

Feed = Callable[[str | None, Object], None]

_LONGEST_BACKOFF = 5.0
_START_TIMEOUT = 30.0  # seconds until its watch must be there
_END_TIMEOUT = 3.0
_SETTLE = 1.0  # seconds after a new list of kopf's in which more of it comes


class Watch:
    """kopf in threads and event loops of their own: when it ends, it cancels every task of its loop.

    What its events cannot say, that a resource went while nobody watched, a list of ours finds: at the start, after each of its lists,
    and whenever it had to be started again.
    """

    def __init__(self, api: ApiClient, resources: Resources, namespace: str | None) -> None:
        self._api = api
        self._resources = resources
        self._namespace = namespace
        self._again = asyncio.Event()
        self.seeded = asyncio.Event()

    async def run(self) -> None:
        """Watches until cancelled, through any outage."""
        while True:
            await installed(self._api)
            if await self._seed():
                self.seeded.set()
                await self._session()
            await asyncio.sleep(1.0)

    async def _seed(self) -> bool:
        try:
            await self._resources.seed(self._api, self._namespace)
        except OUTAGE as error:
            log.warning("cannot list the resources", extra={"error": repr(error)})
            return False
        return True

    async def _session(self) -> None:
        """One run of kopf; returns when it has ended."""
        loop = asyncio.get_running_loop()
        stop, ended = threading.Event(), asyncio.Event()

        def tell(what: Callable[..., object], *arguments: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(what, *arguments)

        def body() -> None:
            own = asyncio.new_event_loop()
            try:
                own.run_until_complete(_operate(lambda *event: tell(self._hear, *event), self._api.configuration, self._namespace, stop))
            except Exception:
                log.exception("the watch of resources failed; beginning anew")
            finally:
                tell(ended.set)
                own.close()

        threading.Thread(target=body, name="kopf", daemon=True).start()
        try:
            while not ended.is_set():
                waits = {asyncio.create_task(ended.wait()), asyncio.create_task(self._again.wait())}
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
                if self._again.is_set() and not ended.is_set():
                    await asyncio.sleep(_SETTLE)
                    self._again.clear()
                    while not await self._seed():
                        await asyncio.sleep(_LONGEST_BACKOFF)
        finally:
            stop.set()

    def _hear(self, kind: str | None, raw: Object) -> None:
        if kind is None:
            self._again.set()  # of a new list
        self._resources.feed(kind, raw)


class _Forever:
    """Seconds between the tries of a request that an outage fails: longer and longer, and no end."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.2, 0.5, 1.0, 2.0), itertools.repeat(_LONGEST_BACKOFF))


async def _operate(feed: Feed, configuration: kubernetes.client.Configuration, namespace: str | None, stop: threading.Event) -> None:
    """kopf with one event handler: no finalizer, no timers, no state on the resource, no peers. Returns when a part of it has died.

    kopf's own way to end waits for requests that are tried for ever, and it lets a watch die without ending at all.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return _connection(configuration)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def handle(event: Any, **_: Any) -> None:
        feed(event["type"], event["object"])

    parts = await kopf.spawn_tasks(
        registry=registry,
        settings=settings(),
        standalone=True,
        identity=FIELD_MANAGER,  # type: ignore[arg-type]  # else kopf would look the user up, which a container need not have
        clusterwide=namespace is None,
        namespaces=[namespace] if namespace else (),
        stop_flag=stop,
    )
    loop = asyncio.get_running_loop()
    watching_by, seen = loop.time() + _START_TIMEOUT, False
    while True:
        done, _ = await asyncio.wait(parts, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        alive = any(task.get_name().startswith("watcher for") and not task.done() for task in asyncio.all_tasks())
        seen = seen or alive
        if done or (not alive and (seen or loop.time() > watching_by)):
            break
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.wait(left, timeout=_END_TIMEOUT)
    if not stop.is_set():
        log.warning("kopf's watch ended; beginning anew")


def _connection(configuration: kubernetes.client.Configuration) -> kopf.ConnectionInfo:
    """kopf connects as ApiClient does."""
    scheme, _, token = (authorization(configuration) or "").partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )


def settings() -> kopf.OperatorSettings:
    """What kopf may do: watch, quietly and for ever."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.posting.loggers = False
    chosen.scanning.disabled = True  # a namespaced Role may not list namespaces or CRDs
    chosen.networking.error_backoffs = _Forever()
    chosen.networking.connect_timeout = 10.0
    chosen.networking.request_timeout = 30.0
    chosen.process.ultimate_exiting_timeout = None
    return chosen
