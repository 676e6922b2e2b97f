"""The DecoderDeployments that exist, as kopf's watch brings them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import kopf
import kubernetes.client

from decodefleet_operator.api import API_VERSION, GROUP, PLURAL, VERSION
from decodefleet_operator.cluster.client import FIELD_MANAGER, OUTAGE, ApiClient, ApiError, Object, authorization, object_path
from decodefleet_operator.cluster.views import Parsed, parse_resource
from decodefleet_operator.observation import Key

log = logging.getLogger(__name__)

Feed = Callable[[str | None, Object], None]

_LONGEST_BACKOFF = 5.0


class Resources:
    """Newest known form of each resource; `changed` is called for each change, a deletion included."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self._changed = changed
        self._parsed: dict[Key, Parsed] = {}

    def __iter__(self) -> Iterator[Key]:
        return iter(tuple(self._parsed))

    def get(self, key: Key) -> Parsed | None:
        return self._parsed.get(key)

    def feed(self, kind: str | None, raw: Object) -> None:
        """An event, or an object that was read, with the kind None. Older than what is known, it changes nothing."""
        key = _key(raw)
        known = self._parsed.get(key)
        if kind == "DELETED":
            if known is not None and known.resource.metadata.uid == raw["metadata"]["uid"]:
                self.forget(key)
        elif self.observe(raw):
            self._changed(key)

    def observe(self, raw: Object) -> bool:
        """The answer to a write of ours, which is no news to whoever wrote it. Whether it is newer than what is known."""
        key = _key(raw)
        known = self._parsed.get(key)
        if known is not None and int(raw["metadata"]["resourceVersion"]) <= known.version:
            return False
        self._parsed[key] = parse_resource(raw, known.resource if known else None)
        return True

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        if self._parsed.pop(key, None) is not None:
            self._changed(key)

    async def seed(self, api: ApiClient, namespace: str | None) -> None:
        """Lists them once, as the first thing and when the watch had to begin anew; what is not listed is gone."""
        found = set()
        async for page in api.pages(object_path(API_VERSION, PLURAL, namespace)):
            for raw in page["items"]:
                found.add(_key(raw))
                self.feed(None, raw)
        for key in self._parsed.keys() - found:
            self.forget(key)


def _key(raw: Object) -> Key:
    return Key(raw["metadata"]["namespace"], raw["metadata"]["name"])


async def installed(api: ApiClient) -> None:
    """Returns once the API server serves the resource; kopf would give up on one that comes later."""
    told = False
    while True:
        try:
            kinds = await api.get(f"/apis/{GROUP}/{VERSION}")
            if any(kind["name"] == PLURAL for kind in kinds["resources"]):
                return
        except OUTAGE as error:
            if not isinstance(error, ApiError) or error.status != 404:
                log.warning("API server does not answer", extra={"error": repr(error)})
        if not told:
            log.warning("the CustomResourceDefinition is not installed yet; waiting for it", extra={"crd": f"{PLURAL}.{GROUP}"})
            told = True
        await asyncio.sleep(2.0)


class Watch:
    """kopf in a thread and an event loop of its own: when it ends, it cancels every task of its loop."""

    def __init__(self, api: ApiClient, resources: Resources, namespace: str | None) -> None:
        self._api = api
        self._resources = resources
        self._namespace = namespace
        self.seeded = asyncio.Event()

    async def run(self) -> None:
        """Watches until cancelled. Whatever ends kopf, it starts again, after a new list that finds what was deleted meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            await installed(self._api)
            try:
                await self._resources.seed(self._api, self._namespace)
            except OUTAGE as error:
                log.warning("cannot list the resources", extra={"error": repr(error)})
                await asyncio.sleep(_LONGEST_BACKOFF)
                continue
            self.seeded.set()
            stop, ended = threading.Event(), asyncio.Event()

            def body(stop: threading.Event = stop, ended: asyncio.Event = ended) -> None:
                try:
                    asyncio.run(_operate(self._hear(loop), self._api.configuration, self._namespace, stop))
                except Exception:
                    log.exception("the watch of resources failed; beginning anew")
                finally:
                    if not loop.is_closed():
                        loop.call_soon_threadsafe(ended.set)

            threading.Thread(target=body, name="kopf", daemon=True).start()
            try:
                await ended.wait()
            finally:
                stop.set()
            await asyncio.sleep(1.0)

    def _hear(self, loop: asyncio.AbstractEventLoop) -> Feed:
        def hand_over(kind: str | None, raw: Object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._resources.feed, kind, raw)

        return hand_over


class _Forever:
    """Seconds between the tries of a request that an outage fails: longer and longer, and no end."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.2, 0.5, 1.0, 2.0), itertools.repeat(_LONGEST_BACKOFF))


async def _operate(feed: Feed, configuration: kubernetes.client.Configuration, namespace: str | None, stop: threading.Event) -> None:
    """kopf with one event handler: no finalizer, no timers, no state on the resource, no peers."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return _connection(configuration)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def handle(event: Any, **_: Any) -> None:
        feed(event["type"], event["object"])

    await kopf.operator(
        registry=registry,
        settings=settings(),
        standalone=True,
        identity=FIELD_MANAGER,  # type: ignore[arg-type]  # else kopf would look the user up, which a container need not have
        clusterwide=namespace is None,
        namespaces=[namespace] if namespace else (),
        stop_flag=stop,
    )


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
