"""How pods come, serve, leave and are replaced; what the status and the events say of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_world import LONG_AGO, NOW, World, demand, deployment, load, observe, pending, pod, quiet

from decodefleet_operator.api import PodStatus, Status
from decodefleet_operator.conditions import timestamp
from decodefleet_operator.observation import Memory, Observation
from decodefleet_operator.plan import names, plan
from decodefleet_operator.planning import Plan


def reasons(p: Plan) -> list[str]:
    return [event.reason for event in p.events]


def condition(p: Plan, kind: str) -> tuple[str, str, str]:
    (found,) = [c for c in p.status.conditions if c.type == kind]
    return found.status, found.reason, found.message


def refs(some: Any) -> list[str]:
    return [ref.name for ref in some]


# -- creating and serving --------------------------------------------------------------------------------------------------------


def test_names_are_the_lowest_that_no_pod_object_holds() -> None:
    pods = [pod(0), pod(1, deleted_at=NOW), pod(3), pod(2, "r0")]
    assert names("f", "r1", pods, 3) == ("f-r1-2", "f-r1-4", "f-r1-5")


def test_pending_pods_are_supply_and_leaving_ones_are_not() -> None:
    pods = [pod(0), pending(1), pod(2, draining_since=NOW - 1, serving=False), pod(3, deleted_at=NOW)]
    p = plan(observe(deployment(replicas=3), pods), NOW)
    assert p.create == ("f-r1-4",) and p.status.replicas == 2 and p.status.ready_replicas == 1


def test_an_agent_is_told_its_objectives_before_it_serves() -> None:
    resource = deployment(generation=3, replicas=1)
    new = pod(0, serving=False)
    for answer, configured, served in (
        (None, [], []),
        (load(state="WARMING_UP", generation=0), ["f-r1-0"], []),
        (load(generation=2), ["f-r1-0"], []),
        (load(generation=3), [], ["f-r1-0"]),
        (load(NOW - 11, generation=3), [], []),  # too old to be believed
    ):
        p = plan(observe(resource, [new], {"f-r1-0": answer} if answer else {}), NOW)
        assert (refs(p.configure), refs(p.serve)) == (configured, served)
        assert p.config is not None and p.config.generation == 3
    assert not plan(observe(resource, [replace(new, ready=False)], {"f-r1-0": load(generation=3)}), NOW).serve


def test_ready_speaks_of_the_newest_revision_and_generation() -> None:
    p = plan(observe(deployment(generation=7, replicas=2), [pod(0), pod(1, "r0")]), NOW)
    assert condition(p, "Ready")[:2] == ("False", "RollingOut")
    p = plan(observe(deployment(generation=7, replicas=2), [pod(0), pod(1)]), NOW)
    assert condition(p, "Ready")[:2] == ("True", "AllServing")
    assert {c.observed_generation for c in p.status.conditions} == {7} == {p.status.observed_generation}
    assert p.status.selector == "decodefleet.dev/deployment=f"


def test_a_condition_keeps_its_time_while_its_status_stays() -> None:
    resource = deployment(replicas=1)
    first = plan(observe(resource, []), NOW)
    again = resource.model_copy(update={"status": first.status})
    second = plan(observe(again, [pending(0)]), NOW + 60)
    third = plan(observe(again, [pod(0)], {"f-r1-0": load(NOW + 90)}), NOW + 90)
    stamps = [{c.type: c.last_transition_time for c in p.status.conditions}["Ready"] for p in (first, second, third)]
    assert stamps[0] == stamps[1] != stamps[2]


# -- leaving ---------------------------------------------------------------------------------------------------------------------


def test_the_victim_has_the_least_work_then_the_coldest_cache_and_unknown_is_last() -> None:
    pods = [pod(n) for n in range(5)]
    loads = {
        "f-r1-0": load(running=3), "f-r1-1": load(running=1, waiting=1, kv_bytes_cached=500),
        "f-r1-2": load(running=2, kv_bytes_cached=100), "f-r1-3": load(running=2, kv_bytes_cached=900),
    }  # fmt: skip
    order = [refs(plan(observe(deployment(replicas=n), pods, loads), NOW).drain) for n in (4, 3, 2, 1, 0)]
    assert order[-1] == ["f-r1-2", "f-r1-1", "f-r1-3", "f-r1-0", "f-r1-4"]
    assert [len(x) for x in order] == [1, 2, 3, 4, 5] and all(order[-1][: len(x)] == x for x in order)


def test_pods_that_never_served_go_first_and_at_once() -> None:
    p = plan(observe(deployment(replicas=1), [pod(0), pending(1), pod(2, ready=False, serving=False, ready_at=None)]), NOW)
    assert refs(p.drain) == [] and sorted(refs(p.delete)) == ["f-r1-1", "f-r1-2"]
    # One that was ready once may have streams.
    p = plan(observe(deployment(replicas=1), [pod(0), pod(1, ready=False)]), NOW)
    assert refs(p.drain) == ["f-r1-1"] and not p.delete


@pytest.mark.parametrize(
    ("since", "answer", "deleted", "told"),
    [
        (5, load(state="DRAINING", running=1), False, False),
        (5, load(state="DRAINING", waiting=1), False, False),
        (5, load(state="DRAINING"), True, False),
        (5, load(), False, True),  # its agent has not heard of it
        (5, None, False, True),
        (5, load(NOW - 20, state="DRAINING"), False, True),  # too old to be believed
        (121, load(state="DRAINING", running=1), True, False),
        (121, None, True, False),
    ],
)
def test_a_pod_is_deleted_when_it_is_idle_or_its_time_is_over(since: float, answer: Any, deleted: bool, told: bool) -> None:
    leaving = pod(1, draining_since=NOW - since, serving=False)
    loads = {"f-r1-0": load(), **({"f-r1-1": answer} if answer else {})}
    p = plan(observe(deployment(replicas=1), [pod(0), leaving], loads), NOW)
    assert (refs(p.delete) == ["f-r1-1"], refs(p.drain) == ["f-r1-1"]) == (deleted, told)
    assert reasons(p) == (["Drained" if answer and not answer.running else "DrainTimeout"] if deleted else [])


def test_a_growing_fleet_does_not_call_draining_pods_back() -> None:
    pods = [pod(0), pod(1, draining_since=NOW - 5, serving=False), pod(2, draining_since=NOW - 5, serving=False)]
    loads = {"f-r1-0": load(), **{f"f-r1-{n}": load(state="DRAINING", running=1) for n in (1, 2)}}
    p = plan(observe(deployment(replicas=3), pods, loads), NOW)
    # 3 are held and 3 + 1 may be: one new pod now, the next when a place is free.
    assert p.create == ("f-r1-3",) and not p.drain and not p.delete


# -- replacing -------------------------------------------------------------------------------------------------------------------


def test_lost_pods_are_replaced_within_the_surge() -> None:
    pods = [pod(0), pod(1, lost=True), pod(2, lost=True)]
    p = plan(observe(deployment(replicas=3), pods), NOW)
    assert len(p.create) == 1 and sorted(refs(p.delete)) == ["f-r1-1", "f-r1-2"] and "PodLost" in reasons(p)


def test_ended_pods_are_replaced_with_a_growing_pause() -> None:
    resource, memory, at, creates = deployment(replicas=1), Memory(since=LONG_AGO), NOW, []
    for n in range(6):
        dead = pending(n, phase="Failed", problem="model not found: x")
        o = replace(observe(resource, [dead]), memory=memory)
        p = plan(o, at)
        assert refs(p.delete) == [dead.name] and "PodEnded" in reasons(p)
        memory, waited = p.memory, 0.0
        while not p.create:
            waited += 1
            p = plan(replace(observe(resource, []), memory=memory), at + waited)
        creates.append(waited)
        at += waited
    assert creates == [0, 10, 20, 40, 80, 160]
    assert condition(p, "Degraded") == (
        "True",
        "CrashLooping",
        "6 pods ended in the last ten minutes, the last one with: model not found: x",
    )
    # Another revision does not wait.
    assert plan(replace(observe(resource, []), memory=memory, revision="r2"), at).create == ("f-r2-0",)


def test_a_crash_loop_shows_its_last_message() -> None:
    sick = pending(0, phase="Running", restarts=4, problem="CUDA out of memory")
    assert condition(plan(observe(deployment(replicas=1), [sick]), NOW), "Degraded") == (
        "True",
        "CrashLooping",
        "f-r1-0: CUDA out of memory",
    )
    stuck = pending(0, problem="ImagePullBackOff")
    assert condition(plan(observe(deployment(replicas=1), [stuck]), NOW), "Degraded")[:2] == ("True", "PodFailing")
    starting = pending(0, problem="ContainerCreating")
    assert condition(plan(observe(deployment(replicas=1), [starting]), NOW), "Degraded")[:2] == ("False", "AsExpected")


def test_a_pod_that_stopped_answering_is_told_apart_from_one_that_ends_again_and_again() -> None:
    hung = replace(pod(0, ready=False), restarts=1, silent_since=NOW - 30)
    p = plan(observe(deployment(replicas=2), [hung, pod(1)]), NOW)
    since = timestamp(NOW - 30)
    assert condition(p, "Degraded") == ("True", "PodSilent", f"f-r1-0: it runs, but has not answered since {since}")
    assert condition(p, "MetricsFresh") == ("False", "Stale", f"no answer from 1 of 2 ready pods since {since}, such as f-r1-0")
    looping = pending(2, phase="Running", restarts=4, problem="CUDA out of memory")
    both = condition(plan(observe(deployment(replicas=3), [hung, pod(1), looping]), NOW), "Degraded")
    assert both[1] == "CrashLooping" and "f-r1-2: CUDA out of memory; f-r1-0: it runs" in both[2]


def test_no_more_pods_are_asked_for_while_one_finds_no_node() -> None:
    pods = [pod(0), pending(1, unschedulable_since=NOW - 61, problem="0/3 nodes are available")]
    p = plan(observe(deployment(replicas=5), pods), NOW)
    assert not p.create and condition(p, "CapacityAvailable")[:2] == ("False", "InsufficientCapacity")
    assert len(plan(observe(deployment(replicas=5), [pod(0), replace(pods[1], unschedulable_since=NOW - 59)]), NOW).create) == 3


def test_the_next_placement_takes_what_the_first_one_cannot() -> None:
    places = {"placements": [{"profile": "spot", "maxReplicas": 2}, {"profile": "a100"}]}
    p = plan(observe(deployment(replicas=3, resources=places), []), NOW)
    assert p.placement == "spot" and len(p.create) == 2
    p = plan(observe(deployment(replicas=3, resources=places), [pod(0, placement="spot"), pod(1, placement="spot")]), NOW)
    assert p.placement == "a100" and len(p.create) == 1
    stuck = pending(0, placement="spot", unschedulable_since=NOW - 61)
    assert plan(observe(deployment(replicas=3, resources=places), [stuck]), NOW).placement == "a100"


# -- rollout ---------------------------------------------------------------------------------------------------------------------


def test_a_rollout_surges_by_one_and_keeps_all_serving() -> None:
    world = World(deployment(replicas=3))
    world.run(60)
    world.revision = "r2"
    most = 0
    for _ in range(200):
        world.pass_time(2)
        p = world.reconcile()
        serving = world.views(serving=True, ready=True, deleted_at=None)
        most = max(most, len([q for q in world.views() if q.deleted_at is None]))
        assert len(serving) >= 3
        if quiet(p) and not world.views(revision="r1"):
            break
    assert most == 4 and len(world.views(revision="r2", serving=True)) == 3
    assert world.resource.spec.replicas == 3


def test_a_rollout_in_place_takes_one_away_first() -> None:
    world = World(deployment(replicas=3, rollout={"maxSurge": 0, "maxUnavailable": 1}))
    world.run(60)
    world.revision = "r2"
    held = []
    for _ in range(200):
        world.pass_time(2)
        world.reconcile()
        held.append(len([q for q in world.views() if q.deleted_at is None]))
    assert max(held) == 3 and len(world.views(revision="r2", serving=True)) == 3


def test_a_rollout_that_does_not_become_ready_stops_and_says_so() -> None:
    world = World(deployment(replicas=3))
    world.run(60)
    world.revision, world.start_seconds = "r2", 1e9
    p = world.run(700)
    assert len(world.views(revision="r1", serving=True)) == 3 and len(world.views(revision="r2")) == 1
    assert condition(p, "Progressing")[:2] == ("False", "RolloutStalled")
    # It rolls on when the spec changes again.
    world.revision, world.start_seconds = "r3", 10.0
    world.run(300)
    assert len(world.views(serving=True)) == 3 == len(world.views(revision="r3"))


def test_scaling_goes_on_during_a_rollout() -> None:
    world = World(deployment(replicas=2))
    world.run(60)
    world.revision = "r2"
    world.run(10)
    world.edit(replicas=5)
    world.run(300)
    assert len(world.views(revision="r2", serving=True)) == 5 == len(world.views())


def test_no_room_for_the_surge_pod() -> None:
    pods = [pod(0, "r0"), pod(1, "r0"), pending(0, unschedulable_since=NOW - 61)]
    p = plan(observe(deployment(replicas=2), pods), NOW)
    assert condition(p, "Progressing")[:2] == ("False", "NoSurgeCapacity") and not p.drain
    p = plan(observe(deployment(replicas=2, rollout={"whenFull": "ReplaceInPlace"}), pods), NOW)
    assert len(p.drain) == 1


# -- what is not done ------------------------------------------------------------------------------------------------------------


def test_a_malformed_resource_changes_the_status_alone() -> None:
    pods = [pod(0), pod(1, draining_since=NOW - 999, serving=False)]
    o = replace(observe(deployment(replicas=5), pods), error="spec.replicas: -1 is less than 0")
    p = plan(o, NOW)
    assert quiet(p) and (p.ledger, p.memory) == (o.ledger, o.memory)
    assert condition(p, "Degraded") == ("True", "InvalidSpec", "spec.replicas: -1 is less than 0")
    assert condition(p, "Ready")[0] == "False"


@pytest.mark.parametrize(
    ("spec", "named", "blocks"),
    [
        ({"engine": {"precision": {"weights": "int4"}}}, "spec.engine.precision.weights: int4", True),
        ({"engine": {"precision": {"schedule": "ByComplexity"}}}, "spec.engine.precision.schedule: ByComplexity", True),
        ({"engine": {"precision": {"kvCache": "bf16"}}}, "spec.engine.precision.kvCache: bf16", True),
        (
            {"engine": {"precision": {"kvCache": "fp32"}, "kvCache": {"sparsity": {"policy": "Hierarchical"}}}},
            "spec.engine.kvCache.sparsity.policy: Hierarchical with precision.kvCache fp32",
            True,
        ),
        (
            {"engine": {"precision": {"kvCache": "fp8"}, "kvCache": {"sparsity": {"policy": "Hierarchical"}}}},
            "spec.engine.kvCache.sparsity.policy: Hierarchical with precision.kvCache fp8",
            True,
        ),
        (
            {"engine": {"precision": {"weights": "fp32"}, "kvCache": {"sparsity": {"policy": "Hierarchical"}}}},
            "spec.engine.kvCache.sparsity.policy: Hierarchical with precision.weights fp32",
            True,
        ),
        ({"engine": {"batching": {"controller": "DQN"}}}, "spec.engine.batching.controller: DQN", True),
        ({"engine": {"prediction": {"method": "Medusa"}}}, "spec.engine.prediction.method: Medusa", True),
        ({"parallelism": {"tensor": 2}}, "spec.parallelism.tensor: 2", True),
        ({"rollout": {"canary": {"replicas": 1}}}, "spec.rollout.canary: replicas: 1", True),
        ({"sla": {"window": "6h"}}, "spec.sla.window: 6h", False),
        ({"autoscaling": {"minReplicas": 0, "maxReplicas": 3}}, "spec.autoscaling.minReplicas: 0", False),
        (
            {"autoscaling": {"maxReplicas": 3, "schedules": [{"cron": "0 8 * * *", "minReplicas": 2}]}},
            "spec.autoscaling.schedules: 0 8",
            False,
        ),
    ],
)
def test_what_this_version_does_not_have_is_named(spec: dict[str, Any], named: str, blocks: bool) -> None:
    p = plan(observe(deployment(replicas=2, **spec), []), NOW)
    status, reason, message = condition(p, "Degraded")
    assert (status, reason) == ("True", "Unsupported") and named in message
    assert (p.create == ()) == blocks


@pytest.mark.parametrize(
    "engine",
    [
        {"precision": {"weights": "fp32", "attention": "fp32", "kvCache": "fp32"}, "batching": {"chunk": "256"}},
        {"precision": {"kvCache": "fp32"}, "kvCache": {"sparsity": {"policy": "SlidingWindow"}}},
        {"precision": {"kvCache": "fp8"}, "kvCache": {"sparsity": {"policy": "SlidingWindow"}}},
        {"precision": {"kvCache": "int8"}, "kvCache": {"sparsity": {"policy": "Hierarchical"}}},
        {"kvCache": {"sparsity": {"policy": "Hierarchical"}}},
    ],
)
def test_every_value_that_is_supported_is_not_named(engine: dict[str, Any]) -> None:
    p = plan(observe(deployment(replicas=2, engine=engine, sla={"window": "30m"}), []), NOW)
    assert condition(p, "Degraded")[0] == "False" and len(p.create) == 2


@pytest.mark.parametrize(
    ("kv_format", "placements", "named"),
    [("fp8", ["cpu"], None), ("fp8", ["cpu", "a100"], "a100"), ("auto", ["a100"], None), ("int8", ["a100"], None)],
)
def test_fp8_is_refused_where_pods_may_get_a_gpu(kv_format: str, placements: list[str], named: str | None) -> None:
    asked = {"engine": {"precision": {"kvCache": kv_format}}, "resources": {"placements": [{"profile": name} for name in placements]}}
    p = plan(replace(observe(deployment(replicas=2, **asked), []), gpu_profiles=frozenset({"a100", "h100"})), NOW)
    status, reason, message = condition(p, "Degraded")
    if named is None:
        assert status == "False" and len(p.create) == 2
    else:
        assert (status, reason, p.create) == ("True", "Unsupported", ())
        assert f"spec.engine.precision.kvCache: fp8 with placement {named}, which has GPUs," in message


# -- status ----------------------------------------------------------------------------------------------------------------------


def test_the_cost_is_known_only_with_every_price() -> None:
    places: Any = {"placements": [{"profile": "a100", "hourlyPrice": 2.5}, {"profile": "t4"}]}
    resource = deployment(replicas=2, resources=places)

    def cost(*placements: str) -> Any:
        pods = [pod(n, placement=x) for n, x in enumerate(placements)]
        return plan(observe(resource, pods, short=replace(demand(), generated_tokens=500.0)), NOW).status.cost

    known = cost("a100", "a100")
    # 5.00 an hour for 1.8 million tokens.
    assert (known.per_hour, known.per_million_tokens) == ("5.00 USD", "2.78 USD")
    assert cost("a100", "t4") is None


def test_pods_in_the_status_are_bounded_and_say_where_they_are() -> None:
    kinds = [
        pod(0), pending(1), pending(2, phase="Running"), pod(3, draining_since=NOW), pod(4, deleted_at=NOW), pod(5, lost=True),
        pod(6, phase="Failed"),
    ]  # fmt: skip
    p = plan(observe(deployment(replicas=1), kinds), NOW)
    assert [x.phase for x in p.status.pods] == ["Ready", "Pending", "Starting", "Draining", "Terminating", "Lost", "Failed"]
    many = plan(observe(deployment(replicas=100), [pod(n) for n in range(100)]), NOW).status
    assert len(many.pods) == 64 and isinstance(many.pods[0], PodStatus)
    assert many == Status.model_validate(many.model_dump(mode="json", by_alias=True))


def test_the_next_look_is_at_the_next_deadline() -> None:
    def soon(o: Observation) -> float:
        return plan(o, NOW).revisit_after

    assert soon(observe(deployment(replicas=1), [pod(0)])) == 10
    assert soon(observe(deployment(replicas=1), [pending(0)])) == 1
    leaving = pod(1, draining_since=NOW - 119.3, serving=False)
    answers = {"f-r1-0": load(), "f-r1-1": load(state="DRAINING", running=1)}
    assert soon(observe(deployment(replicas=1), [pod(0), leaving], answers)) == pytest.approx(0.7)
