"""Builders of observations, and a small world that does what plans say: pods start, serve, drain and die."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

from decodefleet_operator.api import DecoderDeployment
from decodefleet_operator.fleet import classify, served
from decodefleet_operator.ledger import Ledger
from decodefleet_operator.observation import CurvePoint, Demand, Load, Memory, Observation, PodView, ReplicasWriter
from decodefleet_operator.plan import plan
from decodefleet_operator.planning import Plan, PodRef

NOW = 1_000_000.0
CURVE = (CurvePoint(1, 0.010, 100.0), CurvePoint(4, 0.020, 200.0), CurvePoint(16, 0.040, 400.0))
PREFILL = 1000.0
LONG_AGO = NOW - 86_400
Json = dict[str, Any]


def deployment(generation: int = 1, status: Json | None = None, **spec: Any) -> DecoderDeployment:
    """A resource named `f`; keyword arguments are fields of its spec."""
    body: Json = {
        "metadata": {"name": "f", "uid": "fleet", "generation": generation},
        "spec": {"model": {"uri": "package://m/m.gguf"}, **spec},
    }
    if status is not None:
        body["status"] = status
    return DecoderDeployment.model_validate(body)


def pod(n: int = 0, revision: str = "r1", **fields: Any) -> PodView:
    """A pod that serves, unless told otherwise."""
    name = f"f-{revision}-{n}"
    base: Json = {
        "name": name, "uid": f"uid-{name}", "resource_version": "1", "revision": revision, "created_at": LONG_AGO + n, "phase": "Running",
        "ready": True, "serving": True, "ready_at": LONG_AGO + 60, "started_at": LONG_AGO + 30, "scheduled_at": LONG_AGO + 1,
    }  # fmt: skip
    return PodView(**{**base, **fields})


def pending(n: int = 0, revision: str = "r1", **fields: Any) -> PodView:
    """A pod that has not found a node."""
    base: Json = {"phase": "Pending", "ready": False, "serving": False, "ready_at": None, "started_at": None, "scheduled_at": None}
    return pod(n, revision, **{**base, **fields})


def load(at: float = NOW, instance: str = "i", **fields: Any) -> Load:
    """An idle agent that serves and has measured itself."""
    base: Json = dict.fromkeys(
        ["running", "waiting", "queued_prompt_tokens", "queued_output_tokens", "kv_bytes_used", "kv_bytes_cached", "arrived_requests",
         "arrived_prompt_tokens", "arrived_max_tokens", "prompt_tokens", "generated_tokens", "finished_requests", "finished_output_tokens",
         "failed_requests", "rejected_requests"], 0,
    )  # fmt: skip
    base |= {
        "kv_bytes_total": 1000,
        "busy_seconds": 0.0,
        "state": "SERVING",
        "generation": 1,
        "curve": CURVE,
        "prefill_tokens_per_second": PREFILL,
    }
    return Load(at=at, instance_id=instance, **{**base, **fields})


def demand(prompt: float = 0.0, output: float = 0.0, requests: float | None = None, window: float = 30.0) -> Demand:
    """Arriving tokens per second; answers of 100 tokens on average unless `requests` is given."""
    return Demand(window, output / 100 if requests is None else requests, prompt, output, output)


def observe(
    resource: DecoderDeployment, pods: list[PodView], loads: dict[str, Load] | None = None, *, short: Demand | None = None,
    long: Demand | None = None, memory: Memory | None = None, **fields: Any,
) -> Observation:  # fmt: skip
    """An observation; every ready pod has an idle load unless loads are given, and the memory is old."""
    if loads is None:
        loads = {p.name: load(instance=f"i-{p.name}") for p in pods if p.ready}
    base: Json = {"revision": "r1", "ledger": Ledger(), "memory": memory or Memory(since=LONG_AGO)}
    return Observation(resource=resource, pods=tuple(pods), loads=loads, short=short, long=long, **{**base, **fields})


def quiet(p: Plan) -> bool:
    """Nothing is written to pods, agents or the replica count."""
    return not (p.create or p.configure or p.serve or p.drain or p.delete or p.replicas is not None)


def steady(resource: DecoderDeployment, count: int) -> Memory:
    """The memory of an operator that has followed `count` for a long time."""
    return Memory(since=LONG_AGO, decisions=((LONG_AGO, count),), recommendations=((LONG_AGO, count),))


def check(o: Observation, p: Plan, now: float) -> None:
    """What holds of every plan."""
    spec = o.resource.spec
    fleet = classify(o, now)
    pods = {x.name: x for x in o.pods}
    policy = spec.autoscaling
    wanted = p.memory.decisions[-1][1] if p.memory.decisions else spec.replicas
    before = o.memory.decisions[-1][1] if o.memory.decisions else None

    # Names: the lowest free numbers, each once.
    assert not set(p.create) & set(pods) and len(set(p.create)) == len(p.create)
    for name in p.create:
        stem, n = name.rsplit("-", 1)
        assert all(f"{stem}-{i}" in pods or f"{stem}-{i}" in p.create for i in range(int(n)))

    # Never below min, never above max, and the surge only in a rollout.
    old = [x for x in fleet.supply if x.revision != o.revision]
    if policy is not None and policy.mode == "Active" and not spec.suspend:
        assert max(1, policy.min_replicas) <= wanted <= policy.max_replicas
    most = max(policy.max_replicas if policy else 0, wanted)
    if p.create:
        assert fleet.held + len(p.create) <= most + spec.rollout.max_surge
        assert len(fleet.supply) + len(p.create) <= wanted + (spec.rollout.max_surge if old else 0)
    if p.replicas is not None:
        assert policy is not None and policy.mode == "Active" and p.replicas == wanted != spec.replicas

    # Unknown metrics never shrink a fleet. A lower maximum does: the user asked for it.
    ready = [x for x in fleet.supply if x.ready]
    unknown = not ready or any(x.name not in fleet.loads for x in ready) or o.short is None or o.long is None
    if policy is not None and policy.mode == "Active" and not spec.suspend and before is not None and unknown and spec.cost is None:
        assert wanted >= min(before, policy.max_replicas)

    # Deletes: over already, never served, or drained; a drain comes first.
    for ref in p.delete:
        x = pods[ref.name]
        assert ref == PodRef(x.name, x.uid, x.resource_version)
        if x.lost or x.phase in ("Succeeded", "Failed"):
            continue
        assert x.deleted_at is None
        heard = fleet.loads.get(x.name)
        if x.draining_since is None:
            assert not served(x, heard)
        elif now < x.draining_since + spec.drain_timeout:
            assert heard is not None and heard.state == "DRAINING" and heard.running + heard.waiting == 0
    drained = [pods[ref.name] for ref in p.drain if pods[ref.name].draining_since is None]
    assert all(served(x, fleet.loads.get(x.name)) for x in drained)
    assert not {r.name for r in p.delete} & {r.name for r in p.drain}

    # A rollout keeps what is promised available; outside one, only what is too much leaves.
    up = sum(x.ready and x.serving for x in fleet.supply)
    leaving_up = sum(x.ready and x.serving for x in drained)
    if old and leaving_up:
        away = max(spec.rollout.max_unavailable, 1 if spec.rollout.when_full == "ReplaceInPlace" else 0)
        assert up - leaving_up >= wanted - away
    if not old:
        dropped = [ref for ref in p.delete if pods[ref.name] in fleet.supply]
        assert len(drained) + len(dropped) == max(0, len(fleet.supply) - wanted) or spec.suspend
    assert 0.5 <= p.revisit_after <= 10


@dataclass
class SimPod:
    """A pod of the world and the agent in it."""

    view: PodView
    instance: str
    starts_in: float
    generation: int = 0
    draining: bool = False
    work: int = 0
    reachable: bool = True
    gone_at: float | None = None


@dataclass
class World:
    """Time, a resource, its pods; applies plans and checks each of them."""

    resource: DecoderDeployment
    now: float = NOW
    revision: str = "r1"
    output: float = 0.0  # demanded tokens per second
    metrics: bool = True
    start_seconds: float = 20.0
    work_per_pod: int = 2
    memory: Memory | None = None
    ledger: Ledger = field(default_factory=Ledger)
    writer: ReplicasWriter | None = None
    pods: list[SimPod] = field(default_factory=list)
    last: Plan | None = None
    _uids: itertools.count[int] = field(default_factory=itertools.count)

    def observe(self) -> Observation:
        rates = demand(0.0, self.output) if self.metrics and self.pods else None
        return Observation(
            self.resource, self.revision, tuple(p.view for p in self.pods), self._loads(), rates, rates, self.ledger,
            self.memory or Memory(self.now), self.writer,
        )  # fmt: skip

    def reconcile(self) -> Plan:
        o = self.observe()
        p = plan(o, self.now)
        check(o, p, self.now)
        self.apply(p)
        self.last = p
        return p

    def apply(self, p: Plan) -> None:
        self.memory, self.ledger = p.memory, p.ledger
        if p.replicas is not None:
            self.edit(replicas=p.replicas)
            self.writer = ReplicasWriter("decodefleet", self.now, True)
        self.resource = self.resource.model_copy(update={"status": p.status})
        for name in p.create:
            uid = f"u{next(self._uids)}"
            view = PodView(name, uid, "1", self.revision, self.now)
            self.pods.append(SimPod(view, f"i{uid}", self.start_seconds))
        by_uid = {q.view.uid: q for q in self.pods}
        for ref in p.configure:
            assert p.config is not None
            by_uid[ref.uid].generation = p.config.generation
        for ref in p.serve:
            self._change(by_uid[ref.uid], serving=True)
        for ref in p.drain:
            q = by_uid[ref.uid]
            self._change(q, serving=False, draining_since=q.view.draining_since or self.now)
            q.draining = q.draining or q.reachable
        for ref in p.delete:
            self._change(by_uid[ref.uid], deleted_at=self.now)
            by_uid[ref.uid].gone_at = self.now + 3

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for q in self.pods:
            q.starts_in -= seconds
            v = q.view
            if q.starts_in <= 0 and not v.ready and v.phase != "Failed" and not v.lost and v.draining_since is None:
                self._change(q, phase="Running", ready=True, ready_at=self.now, scheduled_at=v.created_at, started_at=v.created_at)
            q.work = max(0, q.work - int(seconds)) if q.draining else self.work_per_pod if v.serving else 0
        self.pods = [q for q in self.pods if q.gone_at is None or q.gone_at > self.now]

    def run(self, seconds: float, step: float = 5.0) -> Plan:
        """Reconciles every `step` seconds for a while."""
        end = self.now + seconds
        p = self.reconcile()
        while self.now < end:
            self.pass_time(step)
            p = self.reconcile()
        return p

    def edit(self, **spec: Any) -> None:
        """Changes fields of the spec, as a user or the scale subresource does."""
        body = self.resource.model_dump(mode="json", by_alias=True, exclude_none=True)
        body["spec"] |= spec
        body["metadata"]["generation"] += 1
        self.resource = DecoderDeployment.model_validate(body)

    def kill(self, index: int, how: str) -> None:
        """A pod fails, loses its node, is deleted by somebody, vanishes, or its agent cannot be reached."""
        if not self.pods:
            return
        q = self.pods[index % len(self.pods)]
        if how == "fail":
            self._change(q, phase="Failed", ready=False, problem="killed")
        elif how == "lose":
            self._change(q, lost=True, ready=False)
        elif how == "delete":
            self._change(q, deleted_at=self.now)
            q.gone_at = self.now + 10
        elif how == "vanish":
            self.pods.remove(q)
        else:
            q.reachable = False

    def views(self, **fields: Any) -> list[PodView]:
        return [q.view for q in self.pods if all(getattr(q.view, k) == v for k, v in fields.items())]

    def _change(self, q: SimPod, **fields: Any) -> None:
        q.view = replace(q.view, resource_version=str(int(q.view.resource_version) + 1), **fields)

    def _loads(self) -> dict[str, Load]:
        heard = {}
        for q in self.pods:
            if not (self.metrics and q.reachable) or q.view.lost or q.view.phase == "Failed":
                continue
            up = q.starts_in <= 0
            state = "DRAINING" if q.draining else "SERVING" if up else "LOADING"
            measured: Json = {} if up else {"curve": (), "prefill_tokens_per_second": None}
            heard[q.view.name] = load(self.now, q.instance, state=state, generation=q.generation, running=q.work, **measured)
        return heard
