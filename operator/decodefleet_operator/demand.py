"""Fleet-wide demand from the agents' counters, as a pure value.

Whoever samples a fleet keeps one `History` per resource, starts it with `History()`, and after each round of GetLoad does

    history = record(history, loads, now)        # loads: newest answer by pod name, as in Observation.loads; pods that are gone left out
    short = demand(history, short_window, now)   # Demand | None, for Observation.short and Observation.long
    long = demand(history, long_window, now)

One call of `record` a second is plenty and one in ten seconds is the least. All times are Unix seconds of one clock. A history costs
at most 160 small tuples and one sample per pod, whatever the number of samples: differences of each agent's counters are added to running
sums of the fleet as they come.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from decodefleet_operator.observation import Demand, Load

MAX_GAP = 20.0  # seconds without a record, or a clock that jumps as far: what was known before is no base for a rate
SPACING = 1.0  # seconds between the sums that are kept, for a minute
COARSE = 10.0  # and after it
HORIZON = 900.0  # seconds that sums are kept
LEAST_COVERED = 2.0  # seconds; a rate over less is noise


class Counters(NamedTuple):
    """What demand needs of an agent's counters, or the fleet's running sums of them."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    max_tokens: float = 0.0
    finished: float = 0.0
    finished_tokens: float = 0.0
    generated: float = 0.0
    busy: float = 0.0
    seconds: float = 0.0  # of sampled agents


class Sample(NamedTuple):
    """The last that was seen of one agent."""

    at: float
    instance_id: str
    counters: Counters


class Tick(NamedTuple):
    """The fleet's sums at a time."""

    at: float
    sums: Counters


@dataclass(frozen=True, slots=True)
class History:
    """What demand is computed from. Start with an empty one."""

    last: Mapping[str, Sample] = field(default_factory=dict)
    ticks: tuple[Tick, ...] = ()


def record(history: History, loads: Mapping[str, Load], now: float) -> History:
    """The history with one more round of samples.

    A new instance in a known pod counts from zero; a pod seen for the first time is a base only (its counters may be old). A round that
    comes after a gap, or after the clock went back, starts a new history. What a pod counted while it could not be reached is spread
    evenly over that time, and only the part since the last round is taken.
    """
    previous = history.ticks[-1] if history.ticks else None
    continuous = previous is not None and 0 <= now - previous.at <= MAX_GAP
    last = {pod: Sample(load.at, load.instance_id, _counters(load)) for pod, load in loads.items() if load.at <= now + 1.0}
    if previous is None or not continuous:
        return History(last, (Tick(now, Counters()),))
    sums = list(previous.sums)
    for pod, sample in last.items():
        before = history.last.get(pod)
        if before is None or sample.at <= before.at:
            continue
        elapsed = sample.at - before.at
        share = min(1.0, (now - previous.at) / elapsed) if elapsed > MAX_GAP else 1.0
        base = before.counters if sample.instance_id == before.instance_id else Counters()
        for i, (new, old) in enumerate(zip(sample.counters, base, strict=True)):
            sums[i] += max(0.0, new - old) * share
        sums[-1] += elapsed * share
    ticks = history.ticks
    if len(ticks) > 1 and now - ticks[-2].at < SPACING:
        ticks = ticks[:-1]
    return History(last, (*_thinned(ticks, now), Tick(now, Counters(*sums))))


def demand(history: History, window: float, now: float) -> Demand | None:
    """Rates over the last `window` seconds, or what is known of them; None where that is under two seconds, or the last round is too old.

    Output tokens are arrived requests x mean length of the answers that finished in the window; of those that finished in the whole history
    where none did; of what was asked for (max_tokens) where none ever did.
    """
    ticks = history.ticks
    if not ticks or not -1.0 <= now - ticks[-1].at <= MAX_GAP:
        return None
    end = ticks[-1]
    start = max(end.at - window, ticks[0].at)
    covered = end.at - start
    if covered < LEAST_COVERED:
        return None
    then = _at(ticks, start)
    change = Counters(*(new - old for new, old in zip(end.sums, then, strict=True)))
    return Demand(
        window=covered,
        requests=change.requests / covered,
        prompt_tokens=change.prompt_tokens / covered,
        output_tokens=change.requests * _mean_output(change, end.sums) / covered,
        generated_tokens=change.generated / covered,
        busy=min(1.0, change.busy / change.seconds) if change.seconds > 0 else None,
    )


def _counters(load: Load) -> Counters:
    return Counters(
        load.arrived_requests,
        load.arrived_prompt_tokens,
        load.arrived_max_tokens,
        load.finished_requests,
        load.finished_output_tokens,
        load.generated_tokens,
        load.busy_seconds,
    )


def _thinned(ticks: tuple[Tick, ...], now: float) -> tuple[Tick, ...]:
    """Ticks of the last minute, one in ten seconds of those before, none beyond the horizon but the one that starts it."""
    recent = bisect_right(ticks, now - 60.0, key=lambda tick: tick.at)
    first = max(0, bisect_right(ticks, now - HORIZON, key=lambda tick: tick.at) - 1)
    coarse = {int(tick.at // COARSE): tick for tick in reversed(ticks[first:recent])}
    return (*reversed(coarse.values()), *ticks[recent:])


def _at(ticks: tuple[Tick, ...], at: float) -> Counters:
    """The sums at a time between the first and the last tick, by linear interpolation."""
    i = bisect_right(ticks, at, key=lambda tick: tick.at)
    if i == len(ticks):
        return ticks[-1].sums
    a, b = ticks[max(0, i - 1)], ticks[i]
    share = (at - a.at) / (b.at - a.at) if b.at > a.at else 1.0
    return Counters(*(x + (y - x) * share for x, y in zip(a.sums, b.sums, strict=True)))


def _mean_output(change: Counters, ever: Counters) -> float:
    for counters in (change, ever):
        if counters.finished > 0:
            return counters.finished_tokens / counters.finished
    return change.max_tokens / change.requests if change.requests > 0 else 0.0
