"""What a local agent is told when it starts, and the revision that this makes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from decodefleet.cgroups import cgroup_cpus
from decodefleet.config import AgentConfig
from decodefleet.units import format_duration
from decodefleet_operator.api import Spec


def agent_config(spec: Spec, token: Path | None = None) -> AgentConfig:
    """What agents of the spec are told; the file of their ports aside."""
    threads = spec.resources.cpu or str(max(1, cores() // most_replicas(spec)))
    return AgentConfig(
        model_uri=spec.model.uri,
        engine=spec.engine,
        tensor_parallel=spec.parallelism.tensor,
        cpu=threads,
        memory=spec.resources.memory,
        host="127.0.0.1",
        serving_port=0,
        control_port=0,
        http_port=0,
        ports_file=None,
        request_log=None,
        control_token_file=str(token) if token else None,
        drain_timeout=format_duration(spec.drain_timeout),
    )


def most_replicas(spec: Spec) -> int:
    """As many as share this machine."""
    return max(1, spec.autoscaling.max_replicas if spec.autoscaling else spec.replicas)


def revision(spec: Spec) -> str:
    """A hash of what an agent cannot be told while it runs. Threads by the replica count stay out: `scale` restarts nothing."""
    told: dict[str, Any] = agent_config(spec).model_dump(mode="json", exclude={"drain_timeout"})
    told["engine"]["batching"].pop("max_waiting")
    told["cpu"] = spec.resources.cpu
    told["env"] = spec.pod_template.env
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]


def cores() -> int:
    """Cores that this process may use: by affinity, and by the quota of its control group."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpus()
    return count if quota is None else max(1, min(count, int(quota)))


def environment(spec: Spec) -> dict[str, str]:
    """Ours, without what would let a folder of the user's shadow the agent's modules, and with the plain values of podTemplate.env."""
    added = {str(item["name"]): str(item["value"]) for item in spec.pod_template.env if "name" in item and "value" in item}
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **added}
