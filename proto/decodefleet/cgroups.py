"""What the control groups of this process, of version 1 or 2, leave it of the machine."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def cgroup_cpus(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """The smallest CPU quota of this process's cgroup and those above it, in cores; None without a quota."""
    quotas = []
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            quotas += [_quota_v2(directory / "cpu.max") for directory in _upwards(root, path)]
        elif "cpu" in controllers.split(","):
            quotas += [_quota_v1(directory) for base in (root / "cpu", root / controllers) for directory in _upwards(base, path)]
    known = [quota for quota in quotas if quota is not None]
    return min(known) if known else None


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """The smallest memory limit of this process's cgroup and those above it, in bytes; None without a limit."""
    limits = []
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += [_number(directory / "memory.max") for directory in _upwards(root, path)]
        elif "memory" in controllers.split(","):
            limits += [_number(directory / "memory.limit_in_bytes") for directory in _upwards(root / "memory", path)]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _upwards(root: Path, path: str) -> list[Path]:
    """The cgroup's directory and all above it. Inside a container the path may not exist, and the root is the container's own."""
    inside = PurePosixPath(path.lstrip("/"))
    return [root / part for part in (inside, *inside.parents)]


def _quota_v2(file: Path) -> float | None:
    if not file.is_file():
        return None
    quota, period = file.read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(directory: Path) -> float | None:
    quota, period = _number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else "max"
    return None if text == "max" else int(text)
