"""The Backend of one machine: a file is the resource, and processes are its pods."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from decodefleet_operator import conditions as c
from decodefleet_operator.api import DecoderDeployment, Spec
from decodefleet_operator.backend import Known
from decodefleet_operator.gateway import Agent
from decodefleet_operator.invalid import explain
from decodefleet_operator.ledger import Ledger
from decodefleet_operator.local import home, told
from decodefleet_operator.local.events import Events
from decodefleet_operator.local.home import Fleet, Json
from decodefleet_operator.local.process import AgentProcess
from decodefleet_operator.observation import Key, Load, PodView, ReplicasWriter
from decodefleet_operator.planning import Event, Plan, PodRef

log = logging.getLogger(__name__)

MANAGER = "decodefleet-operator"
REPLICAS_MANAGER = "decodefleet.dev/replicas-manager"  # who wrote spec.replicas last, as managedFields tells on Kubernetes
REPLICAS_WRITTEN_AT = "decodefleet.dev/replicas-written-at"
POLL = 0.2  # seconds between looks at the resource's file
UNANSWERED = 3  # samples without an answer after which an agent is not ready, as with a probe
KILL_AFTER = 15.0  # seconds beyond the drain timeout

_LEDGER = TypeAdapter(Ledger)


@dataclass(slots=True)
class _Pod:
    """An agent's process and what Kubernetes would keep in its object."""

    process: AgentProcess
    uid: str
    revision: str
    created_at: float
    version: int = 1
    serving: bool = False
    draining_since: float | None = None
    deleted_at: float | None = None
    unanswered: int = 0
    answered_at: float = 0.0


class LocalBackend:
    """One fleet. All calls come from one event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.key = Key("default", fleet.name)
        self.endpoint: str | None = None
        self.events = Events(fleet.events)
        self._resource: DecoderDeployment | None = None
        self._error: str | None = None
        self._stamp: tuple[int, int] | None = None
        self._pods: dict[str, _Pod] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._ledger: Ledger | None = None
        self._token: str | None = None
        self._synced = asyncio.Event()
        self._wake: Callable[[Key], None] = lambda key: None
        self.closing = False

    # -- Backend -----------------------------------------------------------------------------------------------------------------

    async def run(self, wake: Callable[[Key], None]) -> None:
        self._wake = wake
        while True:
            try:
                if self._read_resource():
                    self._changed()
                self._synced.set()
            except OSError:
                log.exception("the resource cannot be read", extra={"file": str(self.fleet.resource)})
            await asyncio.sleep(POLL)

    async def synced(self) -> None:
        await self._synced.wait()

    def keys(self) -> Iterable[Key]:
        return (self.key,) if self._resource is not None and not self.closing else ()

    def known(self, key: Key) -> Known | None:
        if key != self.key or self._resource is None or self.closing:
            return None
        return Known(
            resource=self._resource,
            revision=told.revision(self._resource.spec),
            pods=self.pods(),
            ledger=self._ledger,
            control_token=self._token,
            replicas_writer=_writer(self._resource),
            endpoint=self.endpoint,
            error=self._error,
        )

    async def prepare(self, key: Key) -> None:
        if self._token is None:
            if not self.fleet.token.exists():
                home.write_text(self.fleet.token, secrets.token_urlsafe(32))
            self._token = self.fleet.token.read_text().strip()
        if self._ledger is None:
            written = home.read(self.fleet.ledger)
            self._ledger = _LEDGER.validate_python(written) if written else Ledger()

    async def apply(self, key: Key, plan: Plan) -> None:
        if self.closing or self._resource is None:
            return
        for name in plan.create:
            if name not in self._pods:
                self._create(name, self._resource.spec)
        if plan.replicas is not None and plan.replicas != self._resource.spec.replicas:
            self._write_replicas(plan.replicas)
        for pod in self._named(plan.serve):
            pod.serving = True
        for pod in self._named(plan.drain):
            pod.serving = False
            pod.process.draining = True
            pod.draining_since = pod.draining_since or time.time()
        for pod in self._named(plan.delete):
            pod.serving = False
            pod.deleted_at = pod.deleted_at or time.time()
            # Whoever is deleted undrained gets the time that Kubernetes would give it; a drained agent ends at once.
            pod.process.stop(self._resource.spec.drain_timeout + KILL_AFTER)
        self._pods = {name: pod for name, pod in self._pods.items() if pod.deleted_at is None or pod.process.exit_code is None}
        self.events.add(plan.events)
        if plan.ledger != self._ledger:
            self._ledger = plan.ledger
            home.write(self.fleet.ledger, _LEDGER.dump_python(plan.ledger, mode="json"))
        self._write_status(plan)
        if plan.create or plan.serve or plan.drain or plan.delete:
            self._changed()

    # -- what else the supervisor needs ------------------------------------------------------------------------------------------

    def pods(self) -> tuple[PodView, ...]:
        return tuple(_view(name, pod) for name, pod in self._pods.items())

    def processes(self) -> dict[str, AgentProcess]:
        return {name: pod.process for name, pod in self._pods.items()}

    def serving(self) -> list[Agent]:
        """The agents that the gateway may give requests."""
        if self.closing:
            return []
        return [
            Agent(name, f"127.0.0.1:{pod.process.ports.serving}")
            for name, pod in self._pods.items()
            if pod.serving and pod.draining_since is None and pod.process.ready_at is not None and pod.process.ports is not None
        ]

    def observe(self, key: Key, view: PodView, load: Load | None) -> None:
        """Takes readiness from the sampler's answers, as a kubelet does from its probe's."""
        pod = self._pods.get(view.name)
        if pod is None or pod.uid != view.uid:
            return
        pod.unanswered = 0 if load else pod.unanswered + 1
        if load is not None:
            pod.answered_at = load.at
            pod.process.ready(load.state == "SERVING")
        elif pod.unanswered >= UNANSWERED:
            pod.process.silent(pod.answered_at)

    async def close(self, grace: float) -> None:
        """Stops all agents; returns when no process is left. Calling it again may only shorten the time."""
        self.closing = True
        for pod in self._pods.values():
            pod.process.stop(grace)
        if self._running:
            await asyncio.wait(self._running)

    # -- the resource's file -----------------------------------------------------------------------------------------------------

    def _read_resource(self) -> bool:
        """Whether the file has news for the controller."""
        stat = self.fleet.resource.stat()
        stamp = (stat.st_mtime_ns, stat.st_ino)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        return self._take(home.read(self.fleet.resource))

    def _take(self, document: Json | None) -> bool:
        before = self._shown()
        try:
            self._resource, self._error = DecoderDeployment.model_validate(document), None
        except ValidationError as error:
            self._error = "; ".join(explain(error, DecoderDeployment))
            log.warning("the resource is malformed", extra={"error": self._error})
        return before != self._shown()

    def _shown(self) -> tuple[Any, ...]:
        """What of the resource concerns a decision: its status does not."""
        resource = self._resource
        if resource is None:
            return (self._error,)
        return (resource.spec, resource.metadata.generation, resource.metadata.annotations, self._error)

    def _edit(self, change: Callable[[Json], Json]) -> None:
        """Writes the resource, and knows the result at once: what somebody else wrote since the last look is in it."""
        if self._take(home.edit(self.fleet, change)):
            self._changed()

    def _write_replicas(self, replicas: int) -> None:
        self._edit(lambda resource: with_replicas(resource, replicas, MANAGER))

    def _write_status(self, plan: Plan) -> None:
        status = plan.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        self._edit(lambda resource: resource | {"status": status})

    # -- pods --------------------------------------------------------------------------------------------------------------------

    def _create(self, name: str, spec: Spec) -> None:
        def restarting(why: str) -> None:
            try:
                self.events.add([Event("Warning", c.RESTARTING, f"{name} ended and is started again: {why}"[:1024])])
            except OSError:
                log.exception("an event cannot be written", extra={"pod": name})

        config = told.agent_config(spec, self.fleet.token)
        process = AgentProcess(self.fleet.agent_folder(name), config, told.environment(spec), self._changed, restarting)
        self._pods[name] = _Pod(process, str(uuid.uuid4()), told.revision(spec), time.time())
        task = asyncio.create_task(self._own(name, process), name=f"agent {name}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _own(self, name: str, process: AgentProcess) -> None:
        try:
            await process.run()
        except Exception:
            log.exception("agent cannot be run", extra={"pod": name})
            process.problem, process.exit_code = "the agent cannot be started; see the supervisor's log", 1
        if process.stopping:
            self._pods.pop(name, None)
        self._changed()

    def _named(self, refs: Iterable[PodRef]) -> list[_Pod]:
        found = [self._pods[ref.name] for ref in refs if ref.name in self._pods and self._pods[ref.name].uid == ref.uid]
        for pod in found:
            pod.version += 1
        return found

    def _changed(self) -> None:
        self._wake(self.key)


def with_replicas(resource: Json, replicas: int, manager: str) -> Json:
    """The resource with another count, and who wrote it."""
    resource["spec"]["replicas"] = replicas
    resource["metadata"].setdefault("annotations", {}).update({REPLICAS_MANAGER: manager, REPLICAS_WRITTEN_AT: repr(time.time())})
    return resource


def _writer(resource: DecoderDeployment) -> ReplicasWriter | None:
    annotations = resource.metadata.annotations
    manager = annotations.get(REPLICAS_MANAGER)
    if manager is None:
        return None
    at = annotations.get(REPLICAS_WRITTEN_AT)
    return ReplicasWriter(manager=manager, at=float(at) if at else None, ours=manager == MANAGER)


def _view(name: str, pod: _Pod) -> PodView:
    process = pod.process
    ended = process.exit_code is not None
    return PodView(
        name=name,
        uid=pod.uid,
        resource_version=str(pod.version),
        revision=pod.revision,
        created_at=pod.created_at,
        phase=("Failed" if process.exit_code else "Succeeded") if ended else "Running" if process.started_at else "Pending",
        ready=process.ready_at is not None,
        serving=pod.serving,
        draining_since=pod.draining_since,
        deleted_at=pod.deleted_at,
        node=sys.platform,
        address="127.0.0.1" if process.ports else None,
        serving_port=process.ports.serving if process.ports else 0,
        control_port=process.ports.control if process.ports else 0,
        scheduled_at=pod.created_at,
        started_at=process.started_at,
        ready_at=process.ready_at,
        restarts=process.restarts,
        problem=process.problem if process.ready_at is None else None,
        silent_since=process.silent_since,
    )
