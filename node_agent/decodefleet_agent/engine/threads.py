"""How many threads the engine may use: what the cgroup, the affinity mask and the configuration allow, never the machine's count."""

from __future__ import annotations

import os

from decodefleet.cgroups import cgroup_cpus
from decodefleet.units import parse_quantity


def thread_count(cpu: str | int | None) -> int:
    """Whole cores that are this process's own, at least 1. `cpu`: the pod's limit, a Kubernetes quantity."""
    limits = [float(len(os.sched_getaffinity(0)))]
    if (quota := cgroup_cpus()) is not None:
        limits.append(quota)
    if cpu is not None:
        limits.append(parse_quantity(cpu))
    return max(1, int(min(limits)))
