"""What a fleet looks like from outside: a snapshot of its files, and what it means."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime

from decodefleet_operator.local import home
from decodefleet_operator.local.home import Fleet, Json

PHRASES = {
    "Starting": "starting",
    "Loading": "loading the model",
    "WarmingUp": "warming up",
    "Ready": "warm",
    "Serving": "serving",
    "Silent": "does not answer",
    "Draining": "draining",
    "Stopping": "stopping",
    "Restarting": "waiting to start again",
    "Ended": "ended",
}


@dataclass(frozen=True, slots=True)
class Agent:
    """One process of the fleet."""

    name: str
    phase: str
    since: float | None
    restarts: int
    problem: str | None
    running: int | None
    waiting: int | None
    ready: bool
    revision: str

    @property
    def phrase(self) -> str:
        return PHRASES.get(self.phase, self.phase.lower())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A fleet at one moment. Whatever its supervisor has not written yet is empty."""

    info: Json = field(default_factory=dict)
    resource: Json = field(default_factory=dict)
    state: Json = field(default_factory=dict)

    @property
    def status(self) -> Json:
        return self.resource.get("status") or {}

    @property
    def created(self) -> str | None:
        return self.resource.get("metadata", {}).get("creationTimestamp")

    @property
    def endpoint(self) -> str | None:
        return self.info.get("endpoint")

    @property
    def agents(self) -> list[Agent]:
        return [
            Agent(
                name=a["name"],
                phase=a["phase"],
                since=a["startedAt"],
                restarts=a["restarts"],
                problem=a["problem"],
                running=a["running"],
                waiting=a["waiting"],
                ready=a["readyAt"] is not None,
                revision=a["revision"],
            )
            for a in self.state.get("agents", [])
        ]

    @property
    def open_streams(self) -> int:
        return self.state.get("gateway", {}).get("open", 0)

    def condition(self, type_: str) -> Json | None:
        return next((c for c in self.status.get("conditions", []) if c["type"] == type_), None)

    @property
    def current(self) -> bool:
        """Whether the status speaks of the spec as it is."""
        return self.status.get("observedGeneration") == self.resource.get("metadata", {}).get("generation", 0)

    @property
    def ready(self) -> bool:
        """Whether the fleet is what the newest spec asks for."""
        ready = self.condition("Ready")
        return self.current and ready is not None and ready["status"] == "True" and self.endpoint is not None

    @property
    def failure(self) -> str | None:
        """Why the fleet cannot become what is asked for: by its supervisor, by the plan, or by the first words of an agent that ended."""
        if self.info.get("error"):
            return self.info["error"]
        progressing, degraded = self.condition("Progressing"), self.condition("Degraded")
        if self.current and progressing and progressing["reason"] in ("Blocked", "Suspended"):
            return degraded["message"] if degraded and degraded["status"] == "True" else progressing["message"]
        newest = [agent for agent in self.agents if agent.revision == self.status.get("revision")]
        if any(agent.ready for agent in newest):
            return None
        return next((agent.problem for agent in newest if agent.problem and agent.restarts), None)


def look(fleet: Fleet) -> Snapshot:
    """The fleet as its files tell it now."""
    return Snapshot(home.read(fleet.info) or {}, home.read(fleet.resource) or {}, home.read(fleet.agents) or {})


def age(seconds: float) -> str:
    """`45s`, `3m20s`, `2h5m`, `4d3h`: two units at most, as kubectl shows ages."""
    whole = max(0, int(seconds))
    for large, small, size, step in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            rest = whole % size // step
            return f"{whole // size}{large}" + (f"{rest}{small}" if rest and whole // size < 10 else "")
    return f"{whole}s"


def since(timestamp: str | None) -> str:
    """The age of an RFC 3339 time; a dash where there is none."""
    if not timestamp:
        return "-"
    return age(time.time() - datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp())
