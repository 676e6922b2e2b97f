"""Leader election by a Lease: one operator writes, the others stand by."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime

from decodefleet_operator.cluster.client import OUTAGE, ApiClient, ApiError, Object, object_path

log = logging.getLogger(__name__)

DURATION = 10.0  # seconds after the last renewal that anybody saw, after which a lease is up for grabs
RENEW_WITHIN = 7.0  # seconds; a leader that could not renew for so long stops, before others may start
RETRY = 2.0


class LostLease(Exception):
    """Another operator may lead now, so this process must end."""


class Lease:
    """Times are measured by the monotonic clock of this process: other machines' clocks are compared with nothing."""

    def __init__(self, api: ApiClient, namespace: str, name: str, identity: str) -> None:
        self._api = api
        self._collection = object_path("coordination.k8s.io/v1", "leases", namespace)
        self._path = object_path("coordination.k8s.io/v1", "leases", namespace, name)
        self._metadata = {"name": name, "namespace": namespace}
        self._identity = identity
        self._seen: tuple[object, float] | None = None  # (holder and renewal as written, when this process first saw them)
        self._held: Object | None = None
        self._renewed_at = -RENEW_WITHIN
        self.tried_at = time.monotonic()

    @property
    def leading(self) -> bool:
        """Whether writes are allowed now."""
        return self._held is not None and time.monotonic() - self._renewed_at < RENEW_WITHIN

    async def acquire(self) -> None:
        """Returns once this process leads."""
        while not await self._try():
            await asyncio.sleep(RETRY)
        log.info("leading", extra={"identity": self._identity})

    async def keep(self) -> None:
        """Renews until cancelled. Raises LostLease."""
        while True:
            await asyncio.sleep(RETRY)
            left = RENEW_WITHIN - (time.monotonic() - self._renewed_at)
            try:
                async with asyncio.timeout(max(left, 0.0)):
                    held = await self._try()
            except TimeoutError:
                held = False
            if not held and not self.leading:
                raise LostLease(self._identity)

    async def release(self) -> None:
        """Lets a successor start at once; best effort."""
        if self._held is None:
            return
        held, self._held = self._held, None
        held["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
        try:
            await self._api.replace(self._path, held)
        except OUTAGE as error:
            log.info("lease not released", extra={"error": repr(error)})

    async def _try(self) -> bool:
        """One attempt to acquire or renew; whether this process holds the lease after it."""
        self.tried_at = began = time.monotonic()
        try:
            if self._held is None:
                lease = await self._read()
                if lease is not None and not self._free(lease):
                    return False
                self._held = await self._take(lease)
            else:
                self._held = await self._write(self._held)
        except OUTAGE as error:
            if isinstance(error, ApiError) and error.status in (404, 409):
                self._held = None  # somebody else wrote it
            log.warning("lease not written", extra={"error": repr(error)})
            return False
        self._renewed_at = began
        return True

    async def _read(self) -> Object | None:
        try:
            return await self._api.get(self._path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def _free(self, lease: Object) -> bool:
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity")
        if not holder or holder == self._identity:
            return True
        written = (holder, spec.get("renewTime"), lease["metadata"]["resourceVersion"])
        now = time.monotonic()
        if self._seen is None or self._seen[0] != written:
            self._seen = (written, now)
        return now - self._seen[1] > float(spec.get("leaseDurationSeconds") or DURATION)

    async def _take(self, lease: Object | None) -> Object:
        if lease is None:
            new = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": self._metadata, "spec": self._spec(0)}
            return await self._api.create(self._collection, new)
        transitions = (lease.get("spec") or {}).get("leaseTransitions") or 0
        return await self._api.replace(self._path, lease | {"spec": self._spec(transitions + 1)})

    async def _write(self, held: Object) -> Object:
        held["spec"]["renewTime"] = _now()
        return await self._api.replace(self._path, held)

    def _spec(self, transitions: int) -> Object:
        times = {"acquireTime": _now(), "renewTime": _now()}
        return {"holderIdentity": self._identity, "leaseDurationSeconds": round(DURATION), "leaseTransitions": transitions} | times


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
