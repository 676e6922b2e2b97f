"""The service-level ledger: agents' exact counters become attainment, error budget and burn rate over a window.

    attainment  = good / total                                       in the window
    budget left = 1 - (bad / total) / (1 - target)                   in the window; negative when overspent
    burn rate   = (bad / total) / (1 - target)                       in the last five minutes; 1 spends the budget exactly in a window

Only differences of counters enter the ledger, and the counters they were taken from are kept in the same value, so a restart, a replay or
a second reader counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from decodefleet.units import format_duration, parse_duration
from decodefleet_operator.api import Objective, ObjectiveStatus, Sla, SlaStatus, parse_percent
from decodefleet_operator.ledger import Base, Bucket, Ledger
from decodefleet_operator.observation import Load, ObjectiveCount, PodView

WIDTH = 60  # seconds of a bucket
LONGEST = 3600.0  # seconds of the longest window that one-minute buckets are kept for
BURN_WINDOW = 300.0
RECENT = 60.0  # seconds that a fast burn must still be going on

Added = dict[str, dict[int, tuple[int, int]]]  # by objective and minute: good and total to add


@dataclass(frozen=True, slots=True)
class Attainment:
    """Requests of one objective in a window."""

    good: int
    total: int
    target: float

    @property
    def share(self) -> float | None:
        """Good of total; None without requests."""
        return self.good / self.total if self.total else None

    @property
    def burn(self) -> float | None:
        """Bad requests over those allowed; None without requests."""
        return (self.total - self.good) / self.total / (1 - self.target) if self.total else None


def threshold(objective: Objective) -> float:
    """Seconds; 0 for Availability, which has none."""
    return parse_duration(objective.threshold) if objective.threshold is not None else 0.0


def advance(
    ledger: Ledger, objectives: Sequence[Objective], pods: Iterable[PodView], loads: Mapping[str, Load], drain_timeout: float, now: float
) -> Ledger:
    """The ledger with everything that the newest answers say.

    An instance that is gone without having drained, with requests in flight when it was last heard, has them counted as bad in every
    objective.
    """
    wanted = {objective.name: threshold(objective) for objective in objectives}
    added: Added = {name: {} for name in wanted}
    if not wanted:
        return Ledger()
    same = {name for name, limit in wanted.items() if ledger.thresholds.get(name) == limit}
    before = ledger.bases
    bases: dict[str, Base] = {}
    unheard: dict[str, Base | None] = {}  # pods without an answer
    for pod in pods:
        load = loads.get(pod.name)
        if load is None:
            unheard[pod.name] = None
            continue
        base = before.get(load.instance_id)
        if base is None or load.at > base.at:
            base = _taken(base, pod, load, wanted, same, added, drain_timeout)
        bases[load.instance_id] = base
    for instance, base in before.items():
        if instance in bases:
            continue
        if base.pod in unheard:  # the instance may still be there
            bases[instance] = base
        elif base.in_flight > 0:
            for minutes in added.values():
                _add(minutes, base.at, 0, base.in_flight)
    buckets = {name: _merged(ledger.buckets.get(name, ()) if name in same else (), added[name], now) for name in wanted}
    return Ledger(buckets, bases, wanted)


def attainment(ledger: Ledger, objective: Objective, window: float, now: float) -> Attainment:
    """What the ledger says of an objective over the last `window` seconds, whole buckets."""
    buckets = [b for b in ledger.buckets.get(objective.name, ()) if now - window < b.start + b.width and b.start <= now]
    return Attainment(sum(b.good for b in buckets), sum(b.total for b in buckets), parse_percent(objective.target))


def window(sla: Sla) -> float:
    """Seconds of the window that is counted."""
    return min(parse_duration(sla.window), LONGEST)


def sla_status(ledger: Ledger, sla: Sla, loads: Iterable[Load], now: float) -> SlaStatus:
    """The promises as they are kept. What is not known is absent."""
    loads = list(loads)
    lowest: float | None = None
    shown = []
    for objective in sla.objectives:
        whole = attainment(ledger, objective, window(sla), now)
        burn = attainment(ledger, objective, BURN_WINDOW, now).burn
        seen = _observed(load.objectives[objective.name] for load in loads if objective.name in load.objectives)
        if whole.share is not None:
            lowest = whole.share if lowest is None else min(lowest, whole.share)
        shown.append(
            ObjectiveStatus(
                name=objective.name,
                metric=objective.metric,
                threshold=objective.threshold,
                target=objective.target,
                observed=format_duration(seen) if seen is not None else None,
                attainment=percent(whole.share),
                error_budget_remaining=percent(1 - whole.burn) if whole.burn is not None else None,
                burn_rate=round(burn, 2) if burn is not None else None,
                requests=whole.total or None,
            )
        )
    return SlaStatus(objectives=shown, attainment=percent(lowest))


def percent(share: float | None) -> str | None:
    """0.9875 is `98.75%`."""
    return None if share is None else f"{100 * share:.2f}%"


def _taken(
    old: Base | None, pod: PodView, load: Load, wanted: Mapping[str, float], same: set[str], added: Added, drain_timeout: float
) -> Base:
    """Adds what an agent counted since its base, and returns its new base. `same`: objectives whose threshold the base was counted at."""
    counts = {}
    known = old.counts if old is not None else {}
    for name, limit in wanted.items():
        count = load.objectives.get(name)
        if count is None or not -1e-6 < count.threshold - limit < 1e-6:
            continue  # the agent has not been told of this threshold yet
        now = (count.epoch, count.good, count.total)
        before = known.get(name) if name in same else None
        counts[name] = now
        if before == now:
            continue
        _, good, total = before if before is not None and before[0] == count.epoch else (0, 0, 0)
        new, bad = count.good - good, (count.total - count.good) - (total - good)
        if new > 0 or bad > 0:
            _add(added[name], load.at, max(0, new), max(0, new) + max(0, bad))
    return Base(pod.name, load.instance_id, load.at, _at_risk(pod, load, drain_timeout), counts)


def _at_risk(pod: PodView, load: Load, drain_timeout: float) -> int:
    """Requests that are lost if the agent is not heard again. One that drains within its time ends only when nothing is left."""
    if pod.phase == "Succeeded":
        return 0
    if load.state == "DRAINING":
        ends = pod.deleted_at if pod.draining_since is None else pod.draining_since + drain_timeout
        if ends is not None and load.at + 5.0 < ends:
            return 0
    return load.running + load.waiting


def _add(minutes: dict[int, tuple[int, int]], at: float, good: int, total: int) -> None:
    start = int(at) // WIDTH * WIDTH
    before = minutes.get(start, (0, 0))
    minutes[start] = (before[0] + good, before[1] + total)


def _merged(buckets: Iterable[Bucket], minutes: dict[int, tuple[int, int]], now: float) -> tuple[Bucket, ...]:
    """The buckets with the new minutes in them, those out of every window left out."""
    merged = {b.start: b for b in buckets}
    for start, (good, total) in minutes.items():
        b = merged.get(start, Bucket(start, WIDTH, 0, 0))
        merged[start] = replace(b, good=b.good + good, total=b.total + total)
    return tuple(merged[start] for start in sorted(merged) if now - LONGEST < start + WIDTH and start <= now + LONGEST)


def _observed(counts: Iterable[ObjectiveCount]) -> float | None:
    """The agents' quantiles weighted by their requests: an estimate of the fleet's."""
    known = [(count.observed, count.total) for count in counts if count.observed is not None and count.total > 0]
    weight = sum(total for _, total in known)
    return sum(value * total for value, total in known) / weight if weight else None
