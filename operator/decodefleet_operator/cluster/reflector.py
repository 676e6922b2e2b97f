"""A cache of one kind of object: a paged LIST, then WATCH with bookmarks, through any outage."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from decodefleet_operator.cluster.client import OUTAGE, ApiClient, ApiError, Object
from decodefleet_operator.observation import Key

log = logging.getLogger(__name__)

V = TypeVar("V")

IDLE = 90.0  # seconds without even a bookmark, of which the server sends one a minute, after which a watch counts as dead


@dataclass(frozen=True, slots=True)
class _Entry(Generic[V]):
    version: int
    value: V


class Reflector(Generic[V]):
    """Holds `reduce(object)` of each object that matches the label selector, and calls `changed(name, old, new)` when it changes.

    `observe` takes the answer to a write, so that a decision after it sees its own writes before the watch brings them.
    """

    def __init__(
        self,
        api: ApiClient,
        path: str,
        selector: str,
        reduce: Callable[[Object], V],
        changed: Callable[[Key, V | None, V | None], None],
        metadata_only: bool = False,
        idle: float = IDLE,
    ) -> None:
        self._api = api
        self._path = path
        self._selector = selector
        self._reduce = reduce
        self._changed = changed
        self._metadata_only = metadata_only
        self._idle = idle
        self._entries: dict[Key, _Entry[V]] = {}
        self._version = 0  # what the cache has seen: of the last list, event or bookmark
        self.synced = asyncio.Event()
        self.heard_at = time.monotonic()  # when the server last answered or sent an event or bookmark

    def get(self, key: Key) -> V | None:
        entry = self._entries.get(key)
        return entry.value if entry else None

    def observe(self, raw: Object) -> None:
        """Takes an object from the answer to a write, unless the watch has been past it: it may have been deleted since."""
        version = int(raw["metadata"]["resourceVersion"])
        key = _key(raw)
        known = self._entries.get(key)
        if version > self._version and (known is None or version > known.version):
            self._set(key, version, raw)

    async def run(self) -> None:
        """Keeps the cache until cancelled."""
        failures = 0
        listed = False
        while True:
            try:
                if not listed:
                    await self._list()
                    listed = True
                failures = 0 if await self._watch() else failures
            except OUTAGE as error:
                failures += 1
                if isinstance(error, ApiError) and error.status == 410:
                    listed = False  # the version is too old to watch from
                log.warning("watch failed", extra={"path": self._path, "error": repr(error)})
            if failures:
                await asyncio.sleep(min(0.2 * 2 ** min(failures, 10), 5.0) * random.uniform(0.5, 1.0))

    async def _list(self) -> None:
        """Replaces the cache; what was written meanwhile stays."""
        found: dict[Key, tuple[int, Object]] = {}
        version = 0
        async for page in self._api.pages(self._path, self._metadata_only, labelSelector=self._selector):
            version = int(page["metadata"]["resourceVersion"])
            for raw in page["items"]:
                found[_key(raw)] = (int(raw["metadata"]["resourceVersion"]), raw)
            self.heard_at = time.monotonic()
        for key, entry in list(self._entries.items()):
            if key not in found and entry.version <= version:
                self._remove(key)
        for key, (object_version, raw) in found.items():
            known = self._entries.get(key)
            if known is None or known.version < object_version:
                self._set(key, object_version, raw)
        self._version = version
        self.synced.set()

    async def _watch(self) -> bool:
        """Follows one stream to its end; whether anything came."""
        heard = False
        events = self._api.watch(self._path, str(self._version), self._idle, self._metadata_only, labelSelector=self._selector)
        async for event in events:
            heard = True
            self.heard_at = time.monotonic()
            raw = event["object"]
            self._version = version = int(raw["metadata"]["resourceVersion"])
            if event["type"] == "BOOKMARK":
                continue
            key = _key(raw)
            known = self._entries.get(key)
            if known is not None and known.version > version:
                continue  # the answer to a write came first
            if event["type"] == "DELETED":
                self._remove(key)
            else:
                self._set(key, version, raw)
        return heard

    def _set(self, key: Key, version: int, raw: Object) -> None:
        old = self._entries.get(key)
        value = self._reduce(raw)
        self._entries[key] = _Entry(version, value)
        self._changed(key, old.value if old else None, value)

    def _remove(self, key: Key) -> None:
        if old := self._entries.pop(key, None):
            self._changed(key, old.value, None)


def _key(raw: Object) -> Key:
    return Key(raw["metadata"]["namespace"], raw["metadata"]["name"])
