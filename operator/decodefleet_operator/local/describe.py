"""`decodefleet describe`: one fleet in full, to be read at night."""

from __future__ import annotations

import argparse
import textwrap

from decodefleet_operator.api import DecoderDeployment
from decodefleet_operator.local import home
from decodefleet_operator.local.get import dash, table
from decodefleet_operator.local.home import Fleet, Json
from decodefleet_operator.local.watch import Snapshot, look, since

WIDTH = 22  # of the labels
EVENTS = 20


def run(args: argparse.Namespace) -> int:
    fleet = home.only(args.name)
    print(describe(fleet, look(fleet)))
    return 0


def describe(fleet: Fleet, snapshot: Snapshot) -> str:
    """The whole text."""
    resource = DecoderDeployment.model_validate(snapshot.resource)
    events = home.read(fleet.events)
    sections = [
        _summary(fleet, snapshot, resource),
        _conditions(snapshot),
        _sla(snapshot),
        _autoscaling(snapshot, resource),
        _agents(snapshot),
        _events(events if isinstance(events, list) else []),
    ]
    return "\n".join(section for section in sections if section)


def _summary(fleet: Fleet, snapshot: Snapshot, resource: DecoderDeployment) -> str:
    spec, status, gateway = resource.spec, snapshot.status, snapshot.state.get("gateway", {})
    batching, precision = spec.engine.batching, spec.engine.precision
    counts = [
        f"{status.get(field, 0)} {word}"
        for field, word in (("replicas", "exist"), ("readyReplicas", "ready"), ("updatedReplicas", "updated"))
    ]
    overdue = snapshot.state.get("reconcile", {}).get("overdue", 0)
    lines = [
        ("Name", fleet.name + (" (stopping)" if snapshot.info.get("stopping") else "")),
        ("Endpoint", dash(snapshot.endpoint)),
        ("Age", f"{since(snapshot.created)}, generation {resource.metadata.generation}"),
        ("Model", spec.model.uri),
        ("Revision", dash(status.get("revision"))),
        ("Replicas", ", ".join([f"{spec.replicas} desired", *counts])),
        ("Engine", f"maxBatch {batching.max_batch}, chunk {batching.chunk}, weights {precision.weights}, KV cache {precision.kv_cache}"),
        ("Capacity per replica", _capacity(status.get("capacity") or {})),
        ("Rate now", "not known" if (rate := status.get("tokensPerSecond")) is None else f"{rate:g} tokens/s"),
        ("Cost", _cost(status.get("cost") or {}, spec.cost.currency if spec.cost else "USD")),
        ("Gateway", f"{gateway.get('open', 0)} open, {gateway.get('requests', 0)} requests, {gateway.get('retries', 0)} tried elsewhere"),
        ("Files", f"{fleet.path}"),
        ("Supervisor", f"process {snapshot.info.get('pid')}" + (f", a reconcile is overdue by {overdue}s" if overdue > 5 else "")),
    ]
    return "\n".join(f"{label + ':':<{WIDTH}} {value}" for label, value in lines)


def _capacity(capacity: Json) -> str:
    rate = capacity.get("tokensPerSecond")
    return "not measured yet" if rate is None else f"{rate:g} tokens/s at batch {capacity.get('batch', '?')}, measured at warm-up"


def _cost(cost: Json, currency: str) -> str:
    if not cost.get("perHour"):
        return "not known: no hourlyPrice in spec.resources.placements"
    return f"{cost['perHour']} {currency} an hour, {dash(cost.get('perMillionTokens'))} per million tokens"


def _conditions(snapshot: Snapshot) -> str:
    conditions = snapshot.status.get("conditions", [])
    if not conditions:
        return "\nConditions:            none yet"
    rows = [["TYPE", "STATUS", "FOR", "REASON", "MESSAGE"]]
    rows += [[c["type"], c["status"], since(c.get("lastTransitionTime")), c["reason"], c.get("message", "")] for c in conditions]
    return _section("Conditions", rows)


def _sla(snapshot: Snapshot) -> str:
    objectives = (snapshot.status.get("sla") or {}).get("objectives", [])
    if not objectives:
        return ""
    rows = [["OBJECTIVE", "METRIC", "THRESHOLD", "TARGET", "OBSERVED", "ATTAINED", "BUDGET LEFT", "BURN", "REQUESTS"]]
    for o in objectives:
        measured = [o.get("observed"), o.get("attainment"), o.get("errorBudgetRemaining"), o.get("burnRate"), o.get("requests")]
        rows.append([o["name"], o["metric"], dash(o.get("threshold")), o["target"], *(dash(value) for value in measured)])
    return _section("Service level", rows)


def _autoscaling(snapshot: Snapshot, resource: DecoderDeployment) -> str:
    spec, status = resource.spec.autoscaling, snapshot.status.get("autoscaling") or {}
    if spec is None:
        return "\nAutoscaling:           off; `decodefleet scale` sets the count"
    fill = f"{spec.target_utilization:.0%}"
    lines = [
        f"\nAutoscaling:           {spec.mode}, {spec.min_replicas} to {spec.max_replicas} replicas, each filled to {fill}",
        f"  Desired:             {dash(status.get('desired'))}" + (f", because {status['reason']}" if status.get("reason") else ""),
    ]
    if status.get("clampedBy"):
        lines.append(f"  Clamped by:          {', '.join(status['clampedBy'])}")
    if status.get("blockedBy"):
        lines.append(f"  Blocked by:          {status['blockedBy']}")
    if status.get("inputs"):
        lines.append("  Inputs:")
        lines.append(textwrap.indent(table([[name, value] for name, value in status["inputs"].items()]), "    "))
    return "\n".join(lines)


def _agents(snapshot: Snapshot) -> str:
    agents = snapshot.state.get("agents", [])
    if not agents:
        return "\nAgents:                none"
    used = {pod["name"]: pod for pod in snapshot.status.get("pods", [])}
    rows = [["AGENT", "PHASE", "PID", "PORTS", "RUNNING", "WAITING", "KV", "RESTARTS", "REVISION", "COLD START"]]
    for agent in agents:
        pod = used.get(agent["name"], {})
        ports = "/".join(str(port) for port in agent["ports"]) if agent["ports"] else None
        work = [agent["running"], agent["waiting"], pod.get("kvUsed")]
        cells = [agent["name"], agent["phase"], agent["pid"], ports, *work, agent["restarts"], agent["revision"]]
        rows.append([*(dash(cell) for cell in cells), _cold_start(pod.get("coldStart") or {})])
    text = _section("Agents", rows)
    problems = [f"  ! {a['name']}: {a['problem']}" for a in agents if a["problem"] and a["readyAt"] is None]
    return "\n".join([text, *problems])


def _cold_start(phases: Json) -> str:
    named = [("load", phases.get("load")), ("warm-up", phases.get("warmUp"))]
    return ", ".join(f"{name} {seconds:.1f}s" for name, seconds in named if seconds is not None) or "-"


def _events(events: list[Json]) -> str:
    if not events:
        return "\nEvents:                none"
    rows = [["TYPE", "REASON", "AGE", "MESSAGE"]]
    for event in events[-EVENTS:]:
        count = f" (x{event['count']} over {since(event['first'])})" if event["count"] > 1 else ""
        rows.append([event["type"], event["reason"], since(event["last"]) + count, event["message"]])
    return _section("Events", rows)


def _section(title: str, rows: list[list[str]]) -> str:
    return f"\n{title}:\n" + textwrap.indent(table(rows), "  ")
