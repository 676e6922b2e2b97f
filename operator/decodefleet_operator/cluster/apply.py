"""Makes a plan true on Kubernetes. Each write can be repeated, so that an operator which died between any two goes on from there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from decodefleet_operator import ledger as ledgers
from decodefleet_operator.api import API_VERSION, PLURAL, Status
from decodefleet_operator.backend import Known
from decodefleet_operator.cluster import objects
from decodefleet_operator.cluster.client import OUTAGE, ApiError, Object, object_path
from decodefleet_operator.cluster.fleet import Fleet
from decodefleet_operator.cluster.prepare import ensure_token, refusal, refused
from decodefleet_operator.observation import Key, PodView
from decodefleet_operator.planning import Event, Plan, PodRef
from decodefleet_operator.render import finish

if TYPE_CHECKING:
    from decodefleet_operator.cluster.backend import KubernetesBackend

log = logging.getLogger(__name__)

STATUS_EVERY = 10.0  # seconds between writes of a status in which no condition and no count changed
LEDGER_EVERY = 10.0  # seconds; what an agent counted since the last write is still in its counters
EVENT_AGAIN = 300.0  # seconds until an equal event is posted again
_PARALLEL = 16
_TRIES = 4


class Stale(Exception):
    """The plan stood on something that has changed; the next reconcile sees it."""


async def apply_plan(backend: KubernetesBackend, known: Known, fleet: Fleet, plan: Plan) -> None:
    """The plan's writes, in an order in which each prefix of them is harmless. Raises ApiError or Stale; the caller comes again."""
    key = Key(known.resource.metadata.namespace, known.resource.metadata.name)
    warnings = fleet.warnings
    if plan.replicas is not None and plan.replicas != known.resource.spec.replicas:
        await _scale(backend, known, plan.replicas)
    if plan.create:
        await _create(backend, known, fleet, plan)
    else:
        fleet.rejected_pods = None
    views = {pod.name: pod for pod in known.pods}
    marks = [_mark(backend, key, ref, objects.serve_changes()) for ref in plan.serve]
    drain = objects.drain_changes(backend.clock())
    marks += [_mark(backend, key, ref, drain) for ref in plan.drain if not _drains(views.get(ref.name))]
    await _together(marks)
    fleet.ledger = plan.ledger
    await _write_ledger(backend, known, fleet, at_once=bool(plan.delete))
    await _together(_delete(backend, key, ref) for ref in plan.delete)
    for event in plan.events:
        await _post(backend, known, fleet, event)
    await _write_status(backend, known, fleet, plan.status)
    backend.refresh(key)
    if fleet.warnings != warnings:
        backend.changed(key)  # the status should say so now


async def _scale(backend: KubernetesBackend, known: Known, replicas: int) -> None:
    metadata = known.resource.metadata
    path = object_path(API_VERSION, PLURAL, metadata.namespace, metadata.name, "scale")
    await backend.api.merge(path, {"spec": {"replicas": replicas}})


# -- pods ------------------------------------------------------------------------------------------------------------------------


async def _create(backend: KubernetesBackend, known: Known, fleet: Fleet, plan: Plan) -> None:
    """In batches of 1, 2, 4 …, so that a full quota refuses one pod and not a thousand."""
    resource = known.resource
    name, namespace = resource.metadata.name, resource.metadata.namespace
    if not await _confirm(backend, known):
        return
    await ensure_token(backend, known, fleet)
    bodies = []
    for pod_name in plan.create:
        revision = pod_name.removeprefix(f"{name}-").rpartition("-")[0]
        if revision in fleet.renderings and fleet.token is not None:
            profile = backend.profiles.get(plan.placement) if plan.placement else None
            rendered = finish(fleet.renderings[revision], resource.spec, profile)
            bodies.append(objects.pod(resource, pod_name, revision, rendered))
    fleet.rejected_pods = None
    path = object_path("v1", "pods", namespace)
    size = 1
    while bodies and fleet.rejected_pods is None:
        batch, bodies = bodies[:size], bodies[size:]
        await _together(_create_one(backend, fleet, path, body) for body in batch)
        size *= 2


async def _create_one(backend: KubernetesBackend, fleet: Fleet, path: str, body: Object) -> None:
    name = body["metadata"]["name"]
    try:
        backend.pods.observe(await backend.api.create(path, body))
    except ApiError as error:
        if error.status == 409 and error.reason == "AlreadyExists":
            log.info("the pod exists already; the cache is behind", extra={"pod": name})
        elif error.status == 403 and "being terminated" in error.message:
            log.info("the namespace is being deleted", extra={"pod": name})
        elif refusal(error):
            fleet.rejected_pods = error.message
            log.warning("pod refused", extra={"pod": name, "error": error.message})
        else:
            raise


async def _confirm(backend: KubernetesBackend, known: Known) -> bool:
    """Whether the resource still exists: a pod of a deleted one would only be collected."""
    metadata = known.resource.metadata
    key = Key(metadata.namespace, metadata.name)
    try:
        raw = await backend.api.get(object_path(API_VERSION, PLURAL, key.namespace, key.name))
    except ApiError as error:
        if error.status != 404:
            raise
        backend.resources.forget(key)
        return False
    backend.resources.feed(None, raw)
    return raw["metadata"]["uid"] == metadata.uid and "deletionTimestamp" not in raw["metadata"]


def _drains(view: PodView | None) -> bool:
    return view is not None and view.draining_since is not None and not view.serving


async def _mark(backend: KubernetesBackend, key: Key, ref: PodRef, changes: Object) -> None:
    """Changes the pod's metadata. The kubelet writes pods all the time, so a conflict is no reason to give up on the same pod."""
    path = object_path("v1", "pods", key.namespace, ref.name)
    version = ref.resource_version
    for _ in range(_TRIES):
        try:
            backend.pods.observe(await backend.api.merge(path, {"metadata": {"resourceVersion": version} | changes}))
            return
        except ApiError as error:
            if error.status == 404:
                return
            if error.status != 409:
                raise
        try:
            raw = await backend.api.get(path)
        except ApiError as error:
            if error.status == 404:
                return
            raise
        if raw["metadata"]["uid"] != ref.uid:
            return
        version = raw["metadata"]["resourceVersion"]
    raise Stale(f"pod {key.namespace}/{ref.name} changes faster than it can be marked")


async def _delete(backend: KubernetesBackend, key: Key, ref: PodRef) -> None:
    try:
        answer = await backend.api.delete(object_path("v1", "pods", key.namespace, ref.name), ref.uid, ref.resource_version)
    except ApiError as error:
        if error.status not in (404, 409):
            raise
        log.info("the pod has changed since the decision to delete it", extra={"pod": f"{key.namespace}/{ref.name}"})
    else:
        if answer.get("kind") == "Pod":  # it terminates; a pod that went at once leaves to the watch to say so
            backend.pods.observe(answer)


async def _together(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """At most _PARALLEL at a time; all are tried, and the first failure is raised."""
    slots = asyncio.Semaphore(_PARALLEL)

    async def one(call: Coroutine[Any, Any, None]) -> None:
        async with slots:
            await call

    results = await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


# -- ledger, status, events --------------------------------------------------------------------------------------------------------


async def _write_ledger(backend: KubernetesBackend, known: Known, fleet: Fleet, at_once: bool) -> None:
    """Before a pod goes, and every LEDGER_EVERY seconds while something is counted."""
    now = backend.clock()
    if fleet.ledger is None or (not at_once and fleet.ledger_written and 0 <= now - fleet.ledger_written[1] < LEDGER_EVERY):
        return
    text = ledgers.dumps(fleet.ledger)
    if fleet.ledger_written and fleet.ledger_written[0] == text:
        return
    body = objects.ledger_map(known.resource, text)
    try:
        await backend.api.apply(objects.path_of(body, "configmaps"), body)
    except ApiError as error:
        refused(fleet, "configmaps", error)
        return
    fleet.rejected_children.pop("configmaps", None)
    fleet.ledger_written = (text, now)


async def _write_status(backend: KubernetesBackend, known: Known, fleet: Fleet, status: Status) -> None:
    now = backend.clock()
    written, at = fleet.status_written or (known.resource.status, None)
    if written == status:
        return
    if written is not None and at is not None and _gist(written) == _gist(status) and 0 <= now - at < STATUS_EVERY:
        return
    body = objects.status(known.resource, status)
    try:
        answer = await backend.api.apply(objects.path_of(body, PLURAL, "status"), body)
    except ApiError as error:
        if error.status == 404:
            backend.resources.forget(Key(known.resource.metadata.namespace, known.resource.metadata.name))
            return
        raise
    fleet.status_written = (status, now)
    backend.resources.observe(answer)


def _gist(status: Status) -> tuple[object, ...]:
    """What somebody may wait for."""
    conditions = tuple((c.type, c.status, c.reason) for c in status.conditions)
    counts = (status.observed_generation, status.replicas, status.ready_replicas, status.updated_replicas)
    desired = status.autoscaling.desired if status.autoscaling else None
    return (conditions, counts, status.revision, status.selector, status.endpoint, desired)


async def _post(backend: KubernetesBackend, known: Known, fleet: Fleet, event: Event) -> None:
    """Best effort: an event that is lost changes nothing."""
    now = backend.clock()
    fleet.told = {what: at for what, at in fleet.told.items() if now - at < EVENT_AGAIN}
    if (event.reason, event.message) in fleet.told:
        return
    body = objects.event(known.resource, event, now, backend.identity)
    try:
        await backend.api.create(object_path("events.k8s.io/v1", "events", known.resource.metadata.namespace), body)
        fleet.told[(event.reason, event.message)] = now
    except OUTAGE as error:
        log.info("event not posted", extra={"reason": event.reason, "error": repr(error)})
