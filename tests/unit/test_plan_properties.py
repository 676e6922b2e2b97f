"""What holds of the plan for all observations, and for all that may happen to a fleet over time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_world import NOW, World, check, deployment, load, observe, quiet

from decodefleet_operator.observation import Demand, Memory, PodView, ReplicasWriter
from decodefleet_operator.plan import plan

times = (st.floats(-700, 0) | st.floats(-60, 0)).map(lambda ago: NOW + ago)
maybe_time = st.none() | times
counts = st.integers(0, 12)

autoscalings = st.builds(
    lambda low, span, util, mode, down: {
        "minReplicas": low, "maxReplicas": max(1, low + span), "targetUtilization": util, "mode": mode,
        "scaleDown": {"stabilization": down, "drainTimeout": "60s"},
    },
    st.integers(0, 6), st.integers(0, 8), st.sampled_from([0.3, 0.8, 1.0]), st.sampled_from(["Active", "Active", "Recommend"]),
    st.sampled_from(["0s", "60s", "300s"]),
)  # fmt: skip
rollouts = st.sampled_from(
    [{}, {"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": 3, "maxUnavailable": 2}, {"maxSurge": 1, "whenFull": "ReplaceInPlace"}]
)
objectives: list[dict[str, Any]] = [
    {"name": "tpot", "metric": "TimePerOutputToken", "threshold": "30ms", "target": "95%"},
    {"name": "up", "metric": "Availability", "target": "99%"},
]


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    spec: dict[str, Any] = {"replicas": draw(counts), "rollout": draw(rollouts), "suspend": draw(st.booleans()) and draw(st.booleans())}
    if draw(st.booleans()):
        spec["autoscaling"] = draw(autoscalings)
    if draw(st.booleans()):
        spec["sla"] = {"objectives": objectives}
    return spec


@st.composite
def pods(draw: st.DrawFn, n: int) -> PodView:
    revision = draw(st.sampled_from(["r1", "r1", "r0"]))
    ready = draw(st.booleans())
    return PodView(
        f"f-{revision}-{n}", f"u{n}", "1", revision, draw(times),
        draw(st.sampled_from(["Pending", "Running", "Running", "Failed", "Succeeded"])), ready, draw(st.booleans()), draw(maybe_time),
        draw(st.none() | st.none() | times), ready_at=draw(times) if ready else draw(maybe_time),
        unschedulable_since=draw(st.none() | st.none() | times),
        lost=draw(st.integers(0, 5)) == 0, restarts=draw(st.integers(0, 2)), problem=draw(st.none() | st.just("exit 1")),
    )  # fmt: skip


demands = st.none() | st.builds(lambda r, p, o: Demand(30, r, r * p, r * o, r * o), st.floats(0, 50), st.floats(0, 1000), st.floats(0, 500))
memories = st.builds(
    lambda since, told, decided: Memory(since, tuple(sorted(told)), decisions=tuple(sorted(decided))),
    times, st.lists(st.tuples(times, st.integers(1, 14)), max_size=5), st.lists(st.tuples(times, st.integers(0, 14)), max_size=4),
)  # fmt: skip


@st.composite
def observations(draw: st.DrawFn) -> Any:
    some = [draw(pods(n)) for n in range(draw(st.integers(0, 8)))]
    answers = {}
    for n, pod in enumerate(some):
        states = ["LOADING", "SERVING", "SERVING", "DRAINING"] if pod.draining_since is None else ["SERVING", "DRAINING"]
        if draw(st.integers(0, 3)):
            answers[pod.name] = load(
                NOW - draw(st.sampled_from([0, 1, 5, 30])), f"i{n}",
                state=draw(st.sampled_from(states)), running=draw(st.integers(0, 3)), waiting=draw(st.just(0) | st.integers(0, 20)),
                queued_prompt_tokens=draw(st.integers(0, 9000)),
                queued_output_tokens=draw(st.integers(0, 9000)), generation=draw(st.integers(0, 2)),
                **({} if draw(st.booleans()) else {"curve": ()}),
            )  # fmt: skip
    return observe(
        deployment(**draw(specs())), some, answers, short=draw(demands), long=draw(demands), memory=draw(memories),
        replicas_writer=draw(st.none() | st.builds(ReplicasWriter, st.just("kubectl"), maybe_time, st.booleans())),
    )  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example])
@given(observations())
def test_of_every_observation(o: Any) -> None:
    p = plan(o, NOW)
    check(o, p, NOW)
    assert p == plan(o, NOW)
    if o.resource.spec.suspend:
        assert quiet(p)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example])
@given(observations(), st.integers(0, 299))
def test_a_new_operator_never_shrinks_before_one_window(o: Any, age: int) -> None:
    policy = o.resource.spec.autoscaling
    if policy is None or policy.mode != "Active" or policy.scale_down.stabilization != "300s":
        return
    count = min(max(o.resource.spec.replicas, policy.min_replicas, 1), policy.max_replicas)
    o = replace(o, memory=Memory(since=NOW - age, decisions=((NOW - age, count),)))
    if o.resource.spec.suspend:
        return
    p = plan(o, NOW)
    assert p.memory.decisions[-1][1] >= count


actions = st.one_of(
    st.tuples(st.just("demand"), st.sampled_from([0.0, 100.0, 700.0, 3000.0, 9000.0])),
    st.tuples(st.just("metrics"), st.booleans()),
    st.tuples(st.just("fail"), counts), st.tuples(st.just("lose"), counts), st.tuples(st.just("delete"), counts),
    st.tuples(st.just("vanish"), counts), st.tuples(st.just("silence"), counts),
    st.tuples(st.just("replicas"), st.integers(0, 8)), st.tuples(st.just("revision"), st.sampled_from(["r1", "r2", "r3"])),
    st.tuples(st.just("forget"), st.none()), st.tuples(st.just("wait"), st.integers(1, 60)),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs(), st.lists(st.tuples(actions, st.integers(0, 30)), max_size=12))
def test_of_every_history_and_then_it_comes_to_rest(spec: dict[str, Any], history: list[Any]) -> None:
    spec["suspend"] = False
    world = World(deployment(**spec))
    for (action, value), seconds in history:
        if action == "demand":
            world.output = value
        elif action == "metrics":
            world.metrics = value
        elif action == "replicas":
            world.edit(replicas=value)
            world.writer = ReplicasWriter("kubectl", world.now, False)
        elif action == "revision":
            world.revision = value
        elif action == "forget":
            world.memory = None
        elif action == "wait":
            world.pass_time(value)
        else:
            world.kill(value, action)
        world.run(seconds, 5.0)

    world.metrics = True
    for sim in world.pods:
        sim.reachable = True
    calm, steps = 0, 0
    while calm < 20:  # 400 s, longer than any window
        world.pass_time(20)
        p = world.reconcile()
        calm, steps = (calm + 1 if quiet(p) else 0), steps + 1
        assert steps < 300, p
    assert not p.events
    current = world.views(revision=world.revision, lost=False)
    wanted = world.memory.decisions[-1][1] if world.memory else 0
    assert len(current) == wanted and all(pod.ready and pod.serving for pod in current)
    assert [c.status for c in p.status.conditions if c.type == "Ready"] == ["True"]
