"""Ten decisions worked out by hand, and that a person can recompute each from the status.

One replica: 1,000 prompt tokens/s of prefill; decoding 100, 200 and 400 tokens/s at batch 1, 4 and 16 with steps of 10, 20 and 40 ms.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from plan_world import LONG_AGO, NOW, check, demand, deployment, load, observe, pod, steady

from decodefleet_operator.api import Status
from decodefleet_operator.ledger import Bucket, Ledger
from decodefleet_operator.observation import Demand, Memory, ReplicasWriter
from decodefleet_operator.plan import plan
from decodefleet_operator.planning import Plan

TPOT = {"objectives": [{"name": "tpot", "metric": "TimePerOutputToken", "threshold": "25ms", "target": "95%"}]}


def decide(count: int, short: Demand | None, long: Demand | None = None, *, sla: Any = None, agents: Any = None, memory: Any = None,
           autoscaling: Any = None, writer: Any = None, ledger: Any = None, **spec: Any) -> Plan:  # fmt: skip
    policy = {"minReplicas": 1, "maxReplicas": 10, "targetUtilization": 0.8, **(autoscaling or {})}
    resource = deployment(replicas=count, autoscaling=policy, **({"sla": sla} if sla else {}), **spec)
    pods = [pod(i) for i in range(count)]
    o = observe(
        resource, pods, agents, short=short, long=long or short, memory=memory or steady(resource, count), replicas_writer=writer,
        **({"ledger": ledger} if ledger else {}),
    )  # fmt: skip
    p = plan(o, NOW)
    check(o, p, NOW)
    return p


def desired(p: Plan) -> int:
    assert p.status.autoscaling is not None and p.status.autoscaling.desired is not None
    return p.status.autoscaling.desired


def clamped(p: Plan) -> list[str]:
    assert p.status.autoscaling is not None
    return [entry.partition(":")[0] for entry in p.status.autoscaling.clamped_by]


def test_1_prefill_and_decode_are_priced_apart() -> None:
    # 500 / 1000 of a replica's prefill + 1500 / 400 of its decoding = 0.5 + 3.75 = 4.25 replicas; / 0.8 = 5.3 -> 6.
    p = decide(2, demand(500, 1500))
    assert desired(p) == p.replicas == 6 and len(p.create) == 4 and clamped(p) == []


def test_2_an_objective_lowers_what_a_replica_carries() -> None:
    # 25 ms a token allows batch 4 (20 ms), so a replica decodes 200/s, not 400: 0.5 + 1500 / 200 = 8.0; / 0.8 = 10.
    p = decide(2, demand(500, 1500), sla=TPOT)
    assert desired(p) == 10
    assert p.status.capacity is not None and (p.status.capacity.batch, p.status.capacity.tokens_per_second) == (4, 200.0)


def test_3_a_backlog_must_be_gone_in_ten_seconds() -> None:
    # Arriving: 400 / 400 = 1.0. Each of two agents runs 16 and has 48 waiting; of its 25,600 queued output tokens the waiting ones hold
    # 48 / 64, 19,200, but answers are 100 tokens on average: 96 waiting x 100 = 9,600. Their prompts: 2 x 4,800 tokens.
    # Backlog (9,600 / 1000 + 9,600 / 400) / 10 s = 3.36. Demand 4.36; / 0.8 = 5.45 -> 6.
    busy = {
        f"f-r1-{i}": load(instance=f"i{i}", running=16, waiting=48, queued_prompt_tokens=4800, queued_output_tokens=25600) for i in range(2)
    }
    assert desired(decide(2, demand(0, 400), agents=busy)) == 6


def test_4_running_requests_are_no_backlog() -> None:
    # 320 / 400 = 0.8; / 0.8 = exactly 1, whatever the running requests may still generate.
    busy = {"f-r1-0": load(running=16, queued_output_tokens=99_999)}
    assert desired(decide(1, demand(0, 320), agents=busy)) == 1


def test_5_a_fall_needs_both_windows() -> None:
    # Now 200 / 400 = 0.5; / 0.8 -> 1, but over five minutes 1200 / 400 = 3.0; / 0.8 = 3.75 -> 4: no fewer than 4.
    memory = Memory(since=LONG_AGO, recommendations=((LONG_AGO, 1),), decisions=((LONG_AGO, 6),))
    assert desired(decide(6, demand(0, 200), demand(0, 1200, window=300), memory=memory)) == 4
    # Both windows low, and the count computed was 1 throughout the last 300 s: 1.
    memory = Memory(since=LONG_AGO, recommendations=((LONG_AGO, 4), (NOW - 301, 1)), decisions=((LONG_AGO, 4),))
    p = decide(4, demand(0, 200), demand(0, 200), memory=memory)
    assert desired(p) == 1 and len(p.drain) == 3


def test_5_a_rise_needs_one() -> None:
    # Now 1200 / 400 = 3.0; / 0.8 = 3.75 -> 4, though over five minutes 200 / 400 = 0.5 would need 1.
    assert desired(decide(1, demand(0, 1200), demand(0, 200, window=300))) == 4


def test_6_close_to_what_the_count_carries_changes_nothing() -> None:
    # 2600 / 400 = 6.5 for 8 x 0.8 = 6.4: 1.6 % off, within 10 %, though ceil(6.5 / 0.8) = 9.
    p = decide(8, demand(0, 2600))
    assert desired(p) == 8 and clamped(p) == ["tolerance"] and p.status.autoscaling is not None
    assert p.status.autoscaling.inputs["computed"] == "9"


def test_7_shrinking_waits_for_the_largest_count_of_five_minutes() -> None:
    # 400 / 400 = 1.0; / 0.8 = 1.25 -> 2, but 100 s ago 5 were needed: 5 of the present 6.
    memory = Memory(since=LONG_AGO, recommendations=((LONG_AGO, 5), (NOW - 100, 2)), decisions=((LONG_AGO, 6),))
    p = decide(6, demand(0, 400), memory=memory)
    assert desired(p) == 5 and clamped(p) == ["scaleDown.stabilization"]


def test_8_rate_limits_then_range() -> None:
    # 9000 / 400 = 22.5; / 0.8 = 28.1 -> 29; at most 3 more a minute than 2: 5.
    p = decide(2, demand(0, 9000), autoscaling={"scaleUp": {"maxPodsPerMinute": 3}})
    assert desired(p) == 5 and clamped(p) == ["scaleUp.maxPodsPerMinute"]
    # Without that limit the range of 10 is next.
    p = decide(2, demand(0, 9000))
    assert desired(p) == 10 and clamped(p) == ["maxReplicas 10"]


def test_9_the_budget_pays_for_seven() -> None:
    # 4 pods on spot at 1.00 and the rest at 2.50: 12.00 an hour pays 4 + floor(8 / 2.5) = 7.
    places = {"placements": [{"profile": "spot", "maxReplicas": 4, "hourlyPrice": 1.0}, {"profile": "a100", "hourlyPrice": 2.5}]}
    p = decide(2, demand(0, 9000), resources=places, cost={"maxPerHour": 12})
    assert desired(p) == 7 and clamped(p) == ["maxReplicas 10", "cost.maxPerHour"]
    # The minimum is promised whatever it costs.
    p = decide(6, demand(0, 9000), resources=places, cost={"maxPerHour": 1}, autoscaling={"minReplicas": 5})
    assert desired(p) == 5
    # An unknown price is not zero: the clamp is not applied, and the status says so.
    places["placements"][1].pop("hourlyPrice")
    p = decide(2, demand(0, 9000), resources=places, cost={"maxPerHour": 12})
    assert desired(p) == 10 and p.status.autoscaling is not None and "not known" in p.status.autoscaling.inputs["budget"]


def test_10_a_fast_burn_adds_one() -> None:
    # 800 / 400 = 2.0; / 0.8 = 2.5 -> 3 = the present count. But 30 of 100 requests missed tpot: 0.30 / 0.05 = 6 times the allowed pace.
    minute = int(NOW) // 60 * 60
    ledger = Ledger({"tpot": (Bucket(minute, 60, 70, 100),)}, {}, {"tpot": 0.045})
    loose = {"objectives": [{**TPOT["objectives"][0], "threshold": "45ms"}]}
    p = decide(3, demand(0, 800), sla=loose, ledger=ledger)
    assert desired(p) == 4 and clamped(p) == ["slaFeedback (tpot burns 6.0)"]
    # It was raised half a minute ago: wait for what that brings.
    memory = Memory(since=LONG_AGO, decisions=((LONG_AGO, 2), (NOW - 30, 3)))
    assert desired(decide(3, demand(0, 800), sla=loose, ledger=ledger, memory=memory)) == 3


# -- what is not a formula -------------------------------------------------------------------------------------------------------


def test_a_person_can_recompute_it() -> None:
    busy = {
        f"f-r1-{i}": load(instance=f"i{i}", running=7, waiting=5 + i, queued_prompt_tokens=777, queued_output_tokens=1234) for i in range(3)
    }
    p = decide(3, demand(123.4567891, 987.654321), demand(111, 1000.00049, window=300), agents=busy)
    assert p.status.autoscaling is not None
    i = {k: float(v) for k, v in p.status.autoscaling.inputs.items()}
    r, d = i["prefillTokensPerSecond"], i["decodeTokensPerSecond"]
    rates = [i[f"promptTokensPerSecond{w}"] / r + i[f"outputTokensPerSecond{w}"] / d for w in ("Short", "Long")]
    backlog = (i["backlogPromptTokens"] / r + i["backlogOutputTokens"] / d) / i["backlogTargetSeconds"]
    assert ceil(round((max(rates) + backlog) / i["targetUtilization"], 4)) == i["computed"] == desired(p)


@pytest.mark.parametrize(("short", "agents"), [(None, None), (demand(0, 0), {})])
def test_unknown_holds(short: Demand | None, agents: Any) -> None:
    p = decide(5, short, agents=agents)
    assert desired(p) == 5 and p.replicas is None and not p.drain
    assert p.status.autoscaling is not None and "not known" in (p.status.autoscaling.reason or "")


def test_one_silent_pod_stops_shrinking_but_not_growing() -> None:
    two = {f"f-r1-{i}": load(instance=f"i{i}") for i in range(2)}
    low = Memory(since=LONG_AGO, recommendations=((LONG_AGO, 1),), decisions=((LONG_AGO, 3),))
    p = decide(3, demand(0, 10), agents=two, memory=low)
    assert desired(p) == 3 and clamped(p) == ["metrics"]
    assert desired(decide(3, demand(0, 10), memory=low)) == 1
    assert desired(decide(3, demand(0, 3000), agents=two, memory=low)) == 10


def test_without_a_measured_capacity_a_queue_adds_one() -> None:
    silent = {f"f-r1-{i}": load(instance=f"i{i}", curve=()) for i in range(2)}
    assert desired(decide(2, demand(0, 9000), agents=silent)) == 2
    queue = {f"f-r1-{i}": load(instance=f"i{i}", curve=(), waiting=3) for i in range(2)}
    assert desired(decide(2, demand(0, 9000), agents=queue)) == 3
    # Then it waits a minute, and holds when the queue is gone.
    fresh = Memory(since=LONG_AGO, decisions=((NOW - 59, 2),))
    assert desired(decide(2, demand(0, 9000), agents=queue, memory=fresh)) == 2


def test_a_foreign_write_is_a_floor_for_one_window() -> None:
    memory = Memory(since=LONG_AGO, recommendations=((LONG_AGO, 2),), decisions=((LONG_AGO, 2),))
    for ago, expected in ((10, 6), (299, 6), (301, 2)):
        p = decide(6, demand(0, 400), memory=memory, writer=ReplicasWriter("kubectl", NOW - ago, False))
        assert desired(p) == expected
        assert ("spec.replicas written by kubectl" in clamped(p)) == (expected == 6)
    # A lower count that somebody writes does not pull the fleet down.
    p = decide(1, demand(0, 100), memory=memory, writer=ReplicasWriter("kubectl", NOW, False))
    assert desired(p) == p.replicas == 2 and clamped(p) == ["scaleDown.stabilization"]
    # Ours is none.
    assert desired(decide(6, demand(0, 400), memory=memory, writer=ReplicasWriter("decodefleet", NOW, True))) == 2


def test_recommend_and_suspend_report_and_change_nothing() -> None:
    for spec in ({"autoscaling": {"mode": "Recommend"}}, {"suspend": True}):
        p = decide(2, demand(500, 1500), **spec)
        assert desired(p) == 6 and p.replicas is None and not p.create
        assert p.status.autoscaling is not None and p.status.autoscaling.blocked_by in ("mode: Recommend", "spec.suspend")


def test_a_new_operator_starts_from_what_the_resource_says() -> None:
    # Somebody wrote 1 while no operator ran; the status still says that 5 were decided. One window must pass before it shrinks.
    resource = deployment(replicas=1, autoscaling={"maxReplicas": 10}, status={"autoscaling": {"desired": 5}})
    o = observe(
        resource, [pod(i) for i in range(5)], short=demand(0, 1), long=demand(0, 1), memory=Memory(since=NOW - 1),
        replicas_writer=ReplicasWriter("kubectl", NOW - 100, False),
    )  # fmt: skip
    p = plan(o, NOW)
    assert desired(p) == p.replicas == 5 and not p.drain


def test_the_decision_fits_its_schema() -> None:
    p = decide(3, demand(1e7, 1e7), sla=TPOT)
    Status.model_validate(p.status.model_dump(mode="json", by_alias=True))
