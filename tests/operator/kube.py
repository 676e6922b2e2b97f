"""Short words for what the operator's tests do with the API server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from decodefleet_operator.cluster.client import ApiClient, ApiError, Object, object_path

PATIENCE = 120.0  # seconds; what is waited for takes one or two of them on a machine of one's own

_PATHS = {
    "dd": ("decodefleet.dev/v1alpha1", "decoderdeployments"),
    "pods": ("v1", "pods"),
    "services": ("v1", "services"),
    "secrets": ("v1", "secrets"),
    "configmaps": ("v1", "configmaps"),
    "pdb": ("policy/v1", "poddisruptionbudgets"),
    "revisions": ("apps/v1", "controllerrevisions"),
    "leases": ("coordination.k8s.io/v1", "leases"),
    "events": ("events.k8s.io/v1", "events"),
    "quotas": ("v1", "resourcequotas"),
}
CHILDREN = ("pods", "services", "secrets", "configmaps", "pdb", "revisions")


def path(kind: str, namespace: str, name: str | None = None, subresource: str | None = None) -> str:
    return object_path(*_PATHS[kind], namespace, name, subresource)


async def eventually(check: Callable[[], Awaitable[Any]], what: str, within: float = PATIENCE) -> Any:
    """The first true answer of `check`. Its AssertionErrors and 404s count as not yet; the last one is shown when time is up."""
    deadline = time.monotonic() + within
    last: object = None
    while time.monotonic() < deadline:
        try:
            if answer := await check():
                return answer
            last = answer
        except AssertionError as error:
            last = error
        except ApiError as error:
            if error.status != 404:
                raise
            last = error
        await asyncio.sleep(0.05)
    raise AssertionError(f"not within {within:.0f} s: {what}; last: {last}")


class Kube:
    """One namespace of the API server."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self.api, self.namespace = api, namespace

    async def get(self, kind: str, name: str) -> Object:
        return await self.api.get(path(kind, self.namespace, name))

    async def find(self, kind: str, name: str) -> Object | None:
        try:
            return await self.get(kind, name)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, kind: str, selector: str | None = None) -> list[Object]:
        params = {"labelSelector": selector} if selector else {}
        answer = await self.api.get(path(kind, self.namespace), **params)
        return answer["items"] or []

    async def pods(self, fleet: str) -> list[Object]:
        """Not yet terminating, by name."""
        found = await self.list("pods", f"decodefleet.dev/deployment={fleet}")
        return sorted((p for p in found if "deletionTimestamp" not in p["metadata"]), key=lambda p: p["metadata"]["name"])

    async def create(self, kind: str, body: Object) -> Object:
        return await self.api.create(path(kind, self.namespace), body)

    async def merge(self, kind: str, name: str, changes: Object, subresource: str | None = None) -> Object:
        return await self.api.merge(path(kind, self.namespace, name, subresource), changes)

    async def delete(self, kind: str, name: str, propagation: str = "Background") -> None:
        await self.api._send(
            "DELETE", path(kind, self.namespace, name), {"propagationPolicy": propagation, "gracePeriodSeconds": "0"}, None, None
        )

    async def status(self, name: str) -> Object:
        return (await self.get("dd", name)).get("status") or {}

    async def condition(self, name: str, type_: str) -> Object | None:
        conditions = (await self.status(name)).get("conditions", [])
        return next((c for c in conditions if c["type"] == type_), None)

    async def until_condition(self, name: str, type_: str, status: str, reason: str | None = None) -> Object:
        async def check() -> Object | None:
            found = await self.condition(name, type_)
            assert found is not None, f"{type_} is not set"
            assert found["status"] == status and reason in (None, found["reason"]), found
            return found

        return await eventually(check, f"{name} {type_}={status} {reason or ''}")


def fleet(name: str, **spec: Any) -> Object:
    """A DecoderDeployment, small."""
    body = {"model": {"uri": "file:///models/none.gguf"}, "resources": {"cpu": "100m", "memory": "64Mi"}} | spec
    return {"apiVersion": "decodefleet.dev/v1alpha1", "kind": "DecoderDeployment", "metadata": {"name": name}, "spec": body}
