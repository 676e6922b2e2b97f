"""The DecoderDeployments that exist, in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from decodefleet_operator.api import API_VERSION, GROUP, PLURAL, VERSION
from decodefleet_operator.cluster.client import OUTAGE, ApiClient, ApiError, Object, object_path
from decodefleet_operator.cluster.views import Parsed, parse_resource
from decodefleet_operator.observation import Key

log = logging.getLogger(__name__)


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
