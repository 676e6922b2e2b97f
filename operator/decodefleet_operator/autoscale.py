"""How many replicas the measured demand needs, and every limit that changes that number.

Demand is counted in replicas. With P prompt and O output tokens arriving per second, prefill rate r and decode rate d of one replica,
W waiting requests of mean answer o, B prompt tokens queued, time T for the backlog and target utilisation u:

    demand(window) = P / r + O / d
    backlog        = (B / r + Q / d) / T        Q = output tokens of the waiting requests: min(their share of the queued ones, W · o)
    demand         = max(demand(short), demand(long)) + backlog
    computed       = ceil(demand / u)

so a rise shows at once through the short window, a fall only when both windows have it. All numbers are rounded to six digits before they
are used, and `inputs` shows them: a person can recompute the decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from decodefleet.units import parse_duration
from decodefleet_operator import clamps, sla
from decodefleet_operator.api import Autoscaling, AutoscalingMode, AutoscalingStatus, Objective
from decodefleet_operator.capacity import Capacity, Operating, of_revision, operating_point
from decodefleet_operator.fleet import Fleet, available
from decodefleet_operator.observation import Demand, Memory, Observation

FAST_BURN = 2.0  # both over five minutes and over the last one
LEAST_EVIDENCE = 10  # requests in five minutes, before a burn counts
SETTLE = 60.0  # seconds that a count must have stood before feedback or a backlog of unknown size adds one more


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided."""

    count: int  # replicas that the pods should follow
    desired: int  # what the autoscaler says; another one than `count` where it may only recommend
    before: int | None  # what they followed so far; None where that is not known
    memory: Memory
    status: AutoscalingStatus | None = None
    capacity: Capacity | None = None
    operating: Operating | None = None


@dataclass(slots=True)
class Draft:
    """A decision in the making."""

    count: int
    reason: str
    inputs: dict[str, str] = field(default_factory=dict)
    clamped: list[str] = field(default_factory=list)
    may_shrink: bool = True

    def clamp(self, count: int, name: str) -> None:
        """Takes another count, and says why, if it is another one."""
        if count != self.count:
            self.clamped.append(f"{name}: {self.count} -> {count}"[:128])
            self.count = count


def decide(observation: Observation, fleet: Fleet, frozen: bool, now: float) -> Decision:
    """The replica count. `frozen`: nothing may change (suspend, or a spec that this version cannot run)."""
    spec, memory = observation.resource.spec, observation.memory
    capacity = of_revision(memory, observation.revision)
    if spec.autoscaling is None:
        before = memory.decisions[-1][1] if memory.decisions else None
        memory = clamps.follow(memory, spec.replicas, now)
        return Decision(spec.replicas, spec.replicas, before, memory, None, capacity, _point(observation, capacity))
    memory = clamps.note_writer(memory, observation.replicas_writer, spec.replicas, now)
    active = spec.autoscaling.mode == AutoscalingMode.Active
    current = _current(observation, memory) if active and not frozen else spec.replicas
    operating = _point(observation, capacity)
    draft = _computed(observation, fleet, spec.autoscaling, current, capacity, operating)
    _tolerate(draft, spec.autoscaling, current)
    _feed_back(draft, observation, fleet, current, memory, now)
    memory = clamps.limit(draft, observation, spec.autoscaling, memory, current, now)
    count = draft.count if active and not frozen else spec.replicas
    shown = AutoscalingStatus(
        desired=draft.count,
        reason=draft.reason[:256],
        inputs=draft.inputs,
        clamped_by=draft.clamped[:16],
        blocked_by=None if active or frozen else "mode: Recommend",
    )
    return Decision(count, draft.count, current, clamps.follow(memory, count, now), shown, capacity, operating)


def _current(observation: Observation, memory: Memory) -> int:
    """The count that pods follow so far: the last decision; for a new operator, what the resource says of it."""
    if memory.decisions:
        return memory.decisions[-1][1]
    resource, writer = observation.resource, observation.replicas_writer
    told = resource.status.autoscaling.desired if resource.status and resource.status.autoscaling else None
    if writer is None or writer.ours or told is None:
        return resource.spec.replicas
    return max(resource.spec.replicas, told)


def _point(observation: Observation, capacity: Capacity | None) -> Operating | None:
    if capacity is None:
        return None
    rates = observation.long or observation.short
    known = rates is not None and rates.requests > 0
    objectives: Sequence[Objective] = observation.resource.spec.sla.objectives if observation.resource.spec.sla else ()
    prompt = rates.prompt_tokens / rates.requests if rates is not None and known else None
    return operating_point(capacity, objectives, prompt, mean_output(rates))


def mean_output(rates: Demand | None) -> float | None:
    """Tokens of an answer, on average; None where nothing arrived."""
    return rates.output_tokens / rates.requests if rates is not None and rates.requests > 0 else None


def _computed(
    observation: Observation, fleet: Fleet, policy: Autoscaling, current: int, capacity: Capacity | None, operating: Operating | None
) -> Draft:
    """The count before any limit."""
    draft = Draft(current, "", {"current": str(current), "targetUtilization": _text(policy.target_utilization)})
    ready = [pod for pod in fleet.supply if pod.ready]
    heard = [fleet.loads[pod.name] for pod in ready if pod.name in fleet.loads]
    short, long = observation.short, observation.long
    draft.inputs["readyReplicas"] = str(len(ready))
    if not ready:
        return _held(draft, "no replica is ready yet")
    if not heard or short is None:
        return _held(draft, "metrics are not known")
    draft.may_shrink = len(heard) == len(ready) and long is not None
    running, waiting = sum(load.running for load in heard), sum(load.waiting for load in heard)
    draft.inputs |= {"runningRequests": str(running), "waitingRequests": str(waiting)}
    if capacity is None or operating is None:
        draft.inputs["capacity"] = "not measured"
        return _by_one(draft, waiting)

    decode = _round(operating.point.tokens_per_second)
    prefill = _round(capacity.prefill) if capacity.prefill else decode
    draft.inputs |= {"prefillTokensPerSecond": _text(prefill), "decodeTokensPerSecond": _text(decode), "batch": str(operating.point.batch)}
    if operating.unreachable:
        draft.inputs["unreachable"] = ", ".join(operating.unreachable)[:64]
    demands = []
    for name, rates in (("Short", short), ("Long", long)):
        if rates is not None:
            prompt, output = _round(rates.prompt_tokens), _round(rates.output_tokens)
            demands.append(_round(prompt / prefill + output / decode))
            draft.inputs |= {f"promptTokensPerSecond{name}": _text(prompt), f"outputTokensPerSecond{name}": _text(output)}
            draft.inputs[f"demand{name}"] = _text(demands[-1])
    queued_prompt = sum(load.queued_prompt_tokens for load in heard if load.waiting)
    queued_output = sum(load.queued_output_tokens * load.waiting / (load.running + load.waiting) for load in heard if load.waiting)
    mean = mean_output(short) or mean_output(long)
    queued_output = _round(queued_output if mean is None else min(queued_output, waiting * mean))
    target = max(parse_duration(policy.backlog_target), 0.1)
    backlog = _round((queued_prompt / prefill + queued_output / decode) / target)
    demand = _round(max(demands) + backlog)
    draft.count = ceil(_round(demand / policy.target_utilization))
    draft.inputs |= {
        "backlogPromptTokens": str(queued_prompt),
        "backlogOutputTokens": _text(queued_output),
        "backlogTargetSeconds": _text(target),
        "backlog": _text(backlog),
        "demand": _text(demand),
        "computed": str(draft.count),
    }
    draft.reason = f"demand of {demand:.3g} replicas at {100 * policy.target_utilization:.0f}% utilisation needs {draft.count}"
    return draft


def _held(draft: Draft, why: str) -> Draft:
    draft.may_shrink = False
    draft.reason = f"{why}: the count of {draft.count} is held"
    return draft


def _by_one(draft: Draft, waiting: int) -> Draft:
    """Without a measured capacity the count is held; only a queue adds one replica at a time."""
    if waiting > 0:
        draft.inputs["waitingWithoutCapacity"] = str(waiting)
    return _held(draft, "capacity is not measured")


def _tolerate(draft: Draft, policy: Autoscaling, current: int) -> None:
    """A demand close to what the present count carries changes nothing."""
    demand = draft.inputs.get("demand")
    if demand is None or current == 0:
        return
    filled = float(demand) / (current * policy.target_utilization)
    draft.inputs["tolerance"] = _text(policy.tolerance)
    if abs(filled - 1) <= policy.tolerance:
        draft.clamp(current, "tolerance")


def _feed_back(draft: Draft, observation: Observation, fleet: Fleet, current: int, memory: Memory, now: float) -> None:
    """A fast burn, or a queue before replicas of unknown capacity, adds one to a count that stood for a minute with all serving."""
    settled = (
        len(fleet.supply) >= current and all(available(pod) for pod in fleet.supply) and now - clamps.stood_since(memory, now) >= SETTLE
    )
    burning = _burning(observation, now)
    if burning is not None:
        draft.inputs["burnRate"] = burning
        if draft.count <= current:
            draft.clamp(current + 1 if settled else current, f"slaFeedback ({burning})")
    if "waitingWithoutCapacity" in draft.inputs and settled:
        draft.clamp(max(draft.count, current + 1), "backlog")


def _burning(observation: Observation, now: float) -> str | None:
    """The objective that burns its budget fast, over five minutes and still in the last one."""
    promised = observation.resource.spec.sla
    worst: tuple[float, str] | None = None
    for objective in promised.objectives if promised else ():
        lately = sla.attainment(observation.ledger, objective, sla.BURN_WINDOW, now)
        just_now = sla.attainment(observation.ledger, objective, sla.RECENT, now)
        rate = min(lately.burn or 0.0, just_now.burn or 0.0)
        if lately.total >= LEAST_EVIDENCE and rate >= FAST_BURN and (worst is None or rate > worst[0]):
            worst = (rate, f"{objective.name} burns {rate:.1f}")
    return worst[1] if worst else None


def _round(value: float) -> float:
    """Six digits, as they are shown."""
    return float(f"{value:.6g}")


def _text(value: float) -> str:
    return f"{value:.6g}"
