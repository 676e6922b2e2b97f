"""The cluster that KUBECONFIG names: kubectl, helm, load Jobs, a watch on the fleet's pods, and what to print when a test fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "decodefleet"
NAMESPACE = "decodefleet-e2e"
RELEASE = "decodefleet"
FLEET = "e2e"
T = TypeVar("T")
NEEDED = ("KUBECONFIG", "DECODEFLEET_AGENT_IMAGE", "DECODEFLEET_OPERATOR_IMAGE")


def program(name: str) -> str | None:
    """A program from KUBEBUILDER_ASSETS, or else from PATH."""
    return shutil.which(name, path=os.pathsep.join(filter(None, (os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH")))))


def missing() -> str | None:
    """Why these tests cannot run here."""
    unset = [name for name in NEEDED if not os.environ.get(name)]
    absent = [name for name in ("kubectl", "helm") if program(name) is None]
    if unset:
        return f"needs a cluster: {', '.join(unset)} not set"
    return f"{' and '.join(absent)} neither in KUBEBUILDER_ASSETS nor on PATH" if absent else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@dataclass
class PodHistory:
    """What the watch saw of one pod. Times are Unix seconds of this machine's clock."""

    uid: str
    first_seen: float
    drain_began: float | None = None
    gone: float | None = None


class PodWatch:
    """Follows the fleet's pods from now on, in a thread of its own."""

    def __init__(self, kubectl: str, namespace: str, fleet: str) -> None:
        self.pods: dict[str, PodHistory] = {}
        path = f"/api/v1/namespaces/{namespace}/pods?watch=1&labelSelector=decodefleet.dev/deployment%3D{fleet}"
        self.process = subprocess.Popen([kubectl, "get", "--raw", path], stdout=subprocess.PIPE, text=True)
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            event = json.loads(line)
            meta = event["object"]["metadata"]
            pod = self.pods.setdefault(meta["name"], PodHistory(meta["uid"], time.time()))
            if pod.drain_began is None and "decodefleet.dev/draining-since" in meta.get("annotations", {}):
                pod.drain_began = time.time()
            if event["type"] == "DELETED":
                pod.gone = time.time()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.thread.join()


@dataclass(frozen=True)
class Cluster:
    """kubectl and helm, bound to one namespace."""

    kubectl_program: str
    helm_program: str
    namespace: str = NAMESPACE
    agent_image: str = field(default_factory=lambda: os.environ["DECODEFLEET_AGENT_IMAGE"])

    def run(self, *command: str, stdin: str | None = None, seconds: float = 120) -> str:
        """The standard output of a program. Raises RuntimeError with its error output."""
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=seconds)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def kubectl(self, *args: str, stdin: str | None = None, seconds: float = 120) -> str:
        return self.run(self.kubectl_program, "-n", self.namespace, *args, stdin=stdin, seconds=seconds)

    def helm(self, *args: str) -> str:
        return self.run(self.helm_program, "-n", self.namespace, *args)

    def get(self, *args: str) -> Any:
        return json.loads(self.kubectl("get", *args, "-o", "json"))

    def apply(self, *manifests: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))

    def patch(self, spec: dict[str, Any]) -> None:
        """Merges into the fleet's spec."""
        self.kubectl("patch", "dd", FLEET, "--type=merge", "-p", json.dumps({"spec": spec}))

    def fleet(self) -> dict[str, Any]:
        return self.get("dd", FLEET)

    def pods(self) -> list[dict[str, Any]]:
        return self.get("pods", "-l", f"decodefleet.dev/deployment={FLEET}")["items"]

    def until(self, what: str, check: Callable[[], T | None], seconds: float = 120) -> T:
        """What `check` returns once that is true."""
        end = time.monotonic() + seconds
        while not (value := check()):
            if time.monotonic() > end:
                pytest.fail(f"not within {seconds:.0f} s: {what}")
            time.sleep(0.5)
        return value

    def start_load(self, name: str, *args: str) -> None:
        """Starts a Job that runs load_client.py against the fleet's headless Service."""
        code = (Path(__file__).parent / "load_client.py").read_text()
        target = f"dns:///{FLEET}.{self.namespace}.svc.cluster.local:50051"
        container = {
            "name": "load",
            "image": self.agent_image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["python3", "/load/load_client.py", "--target", target, "--name", name, *args],
            "volumeMounts": [{"name": "load", "mountPath": "/load"}],
        }
        pod = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [{"name": "load", "configMap": {"name": "load-client"}}],
        }
        self.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "load-client"}, "data": {"load_client.py": code}},
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"backoffLimit": 0, "template": {"spec": pod}}},
        )

    def finish_load(self, name: str, seconds: float = 300) -> list[SimpleNamespace]:
        """Waits for the Job's end and removes it; its requests in the order in which they ended."""

        def ended() -> str | None:
            status = self.get("job", name).get("status", {})
            return "ok" if status.get("succeeded") else "failed" if status.get("failed") else None

        outcome = self.until(f"load {name} ended", ended, seconds)
        text = self.kubectl("logs", f"job/{name}")
        assert outcome == "ok", f"load {name} failed:\n{text[-4000:]}"
        self.kubectl("delete", "job", name, "--wait=false")
        return [SimpleNamespace(**line) for line in map(json.loads, text.splitlines()) if "outcome" in line]

    def begun(self, name: str, max_tokens: int) -> set[str]:
        """The agents that have begun to answer a running load's requests for so many tokens."""
        lines = map(json.loads, self.kubectl("logs", f"job/{name}", "--tail=-1").splitlines())
        return {line["instance"] for line in lines if "begun" in line and line["max_tokens"] == max_tokens}

    def watch_pods(self) -> PodWatch:
        return PodWatch(self.kubectl_program, self.namespace, FLEET)

    def owned(self) -> set[str]:
        """Everything in the namespace that an installation could leave, as kind/name."""
        kinds = "pods,services,secrets,configmaps,controllerrevisions,deployments,replicasets,jobs,leases,poddisruptionbudgets"
        names = self.kubectl("get", f"{kinds},serviceaccounts,roles,rolebindings,endpointslices", "-o", "name").split()
        return set(names)


def image_values(prefix: str, image: str) -> list[str]:
    """Helm's --set of an image that is named as repository:tag."""
    repository, _, tag = image.rpartition(":")
    return ["--set-string", f"{prefix}.repository={repository},{prefix}.tag={tag},{prefix}.pullPolicy=IfNotPresent"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A namespace of its own, removed at the end."""
    kubectl, helm = program("kubectl"), program("helm")
    assert kubectl and helm
    cluster = Cluster(kubectl, helm)
    cluster.run(kubectl, "create", "namespace", NAMESPACE)
    try:
        made_by_kubernetes = {"serviceaccount/default", "configmap/kube-root-ca.crt"}
        cluster.until("the namespace is furnished", lambda: made_by_kubernetes <= cluster.owned())
        yield cluster
    finally:
        cluster.run(kubectl, "delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture(scope="session")
def chart() -> list[str]:
    """The chart and the values that name the images under test."""
    return [
        str(CHART),
        *image_values("image", os.environ["DECODEFLEET_OPERATOR_IMAGE"]),
        *image_values("agent.image", os.environ["DECODEFLEET_AGENT_IMAGE"]),
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Adds the state of the cluster to the report of a test that failed."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.when == "call" and report.failed and cluster is not None:
        report.sections.append(("cluster", state_of(cluster)))
    return report


def state_of(cluster: Cluster) -> str:
    """The fleet, its pods, events and logs, for a person."""
    commands = (
        ["get", "dd,pods,jobs,services,endpointslices", "-o", "wide"],
        ["get", "dd", "-o", "yaml"],
        ["describe", "pods", "-l", "app.kubernetes.io/name"],
        ["get", "events", "--sort-by=.lastTimestamp"],
        ["logs", "-l", "app.kubernetes.io/name=decodefleet-operator", "--tail=120", "--prefix"],
        ["logs", "-l", "app.kubernetes.io/name=decodefleet-agent", "--tail=60", "--prefix"],
    )
    parts = []
    for command in commands:
        done = subprocess.run([cluster.kubectl_program, "-n", cluster.namespace, *command], capture_output=True, text=True, timeout=60)
        parts.append(f"$ kubectl {' '.join(command)}\n{done.stdout}{done.stderr}")
    return "\n".join(parts)


@pytest.fixture(scope="session")
def grpcurl() -> str:
    found = program("grpcurl")
    if found is None:
        pytest.skip("grpcurl neither in KUBEBUILDER_ASSETS nor on PATH")
    return found
