"""What a fleet has beside its pods, made where missing: Service, disruption budget, token, ledger and revision."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from decodefleet_operator import ledger as ledgers
from decodefleet_operator.backend import Known
from decodefleet_operator.cluster import objects
from decodefleet_operator.cluster.client import ApiError, Object, object_path
from decodefleet_operator.cluster.fleet import Fleet
from decodefleet_operator.observation import Key
from decodefleet_operator.render import render, spec_hash

if TYPE_CHECKING:
    from decodefleet_operator.cluster.backend import KubernetesBackend

log = logging.getLogger(__name__)

REFRESH = 300.0  # seconds after which Service and budget are applied again, in case somebody edited them


async def prepare_fleet(backend: KubernetesBackend, known: Known, fleet: Fleet) -> None:
    """Idempotent; without I/O where nothing is missing. What the API server refuses becomes a warning, an outage raises."""
    key = Key(known.resource.metadata.namespace, known.resource.metadata.name)
    before = (fleet.warnings, fleet.token, fleet.ledger)
    if fleet.ledger is None:
        await _read_ledger(backend, known, fleet)
    if fleet.token is None:
        await ensure_token(backend, known, fleet)
    if known.error is None:
        await _ensure_children(backend, known, fleet, key)
        if known.revision not in fleet.renderings:
            await _ensure_revision(backend, known, fleet)
    if before != (fleet.warnings, fleet.token, fleet.ledger):
        backend.refresh(key)


async def ensure_token(backend: KubernetesBackend, known: Known, fleet: Fleet) -> None:
    """The fleet's token in memory and in its Secret. Running agents hold it, so a Secret that was deleted comes back with the same one."""
    body = objects.control_secret(known.resource, fleet.token or secrets.token_urlsafe(32))
    path = objects.path_of(body, "secrets")
    try:
        secret: Object | None = await backend.api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        secret = await _make(backend, fleet, body, "secrets")
    if secret is not None and objects.token_of(secret) is None:
        secret = await backend.api.apply(path, body)
    if secret is not None:
        fleet.token = objects.token_of(secret)


async def _read_ledger(backend: KubernetesBackend, known: Known, fleet: Fleet) -> None:
    name, namespace = known.resource.metadata.name, known.resource.metadata.namespace
    text = None
    try:
        config_map = await backend.api.get(object_path("v1", "configmaps", namespace, objects.ledger_name(name)))
        text = (config_map.get("data") or {}).get(objects.LEDGER_KEY)
        fleet.ledger = ledgers.loads(text) if text else ledgers.Ledger()
    except ApiError as error:
        if error.status != 404:
            raise
        fleet.ledger = ledgers.Ledger()
    except ledgers.LedgerError as error:
        log.warning("the SLA ledger begins anew", extra={"resource": f"{namespace}/{name}", "error": str(error)})
        fleet.ledger = ledgers.Ledger()
    fleet.ledger_written = (text, backend.clock()) if text else None


async def _ensure_children(backend: KubernetesBackend, known: Known, fleet: Fleet, key: Key) -> None:
    """Server-side apply where the watch misses one of this owner, and now and then, to undo what others changed."""
    due = fleet.ensured_at is None or backend.clock() - fleet.ensured_at > REFRESH
    children = (
        (backend.services, "services", objects.service(known.resource)),
        (backend.budgets, "poddisruptionbudgets", objects.disruption_budget(known.resource)),
    )
    for reflector, plural, body in children:
        seen = reflector.get(key)
        if not due and seen is not None and seen.owner == fleet.uid:
            continue
        try:
            answer = await backend.api.apply(objects.path_of(body, plural), body)
        except ApiError as error:
            refused(fleet, plural, error)
        else:
            fleet.rejected_children.pop(plural, None)
            reflector.observe(answer)
    if due:
        fleet.ensured_at = backend.clock()


async def _ensure_revision(backend: KubernetesBackend, known: Known, fleet: Fleet) -> None:
    """What is stored wins over what this operator would render."""
    resource, revision = known.resource, known.revision
    name, namespace = objects.revision_name(resource.metadata.name, revision), resource.metadata.namespace
    path = object_path("apps/v1", "controllerrevisions", namespace, name)
    try:
        stored: Object | None = await backend.api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        image = resource.spec.image or backend.image
        secret = objects.control_secret_name(resource.metadata.name)
        data = {"image": image, "pod": render(resource.spec, image, secret, backend.pull_policy)}
        body = objects.controller_revision(resource, revision, spec_hash(resource.spec), data)
        stored = await _make(backend, fleet, body, "controllerrevisions")
    if stored is not None:
        fleet.renderings[revision] = stored["data"]["pod"]
        backend.revisions.observe(stored)


async def _make(backend: KubernetesBackend, fleet: Fleet, body: Object, plural: str) -> Object | None:
    """Creates it, or reads what another writer was first with; None where it was refused."""
    collection = object_path(body["apiVersion"], plural, body["metadata"]["namespace"])
    try:
        made = await backend.api.create(collection, body)
    except ApiError as error:
        if error.status == 409 and error.reason == "AlreadyExists":
            return await backend.api.get(objects.path_of(body, plural))
        refused(fleet, plural, error)
        return None
    fleet.rejected_children.pop(plural, None)
    return made


def refused(fleet: Fleet, plural: str, error: ApiError) -> None:
    """Keeps the refusal for the status; raises what may pass by itself."""
    if not refusal(error):
        raise error
    fleet.rejected_children[plural] = error.message
    log.warning("object refused", extra={"kind": plural, "error": str(error)})


def refusal(error: ApiError) -> bool:
    """Whether the server understood the write and will refuse it again: rights, quota, admission, validation."""
    return error.status in (400, 403, 422)
