"""The engine's configuration: threads that are its own, sizes that follow, and clear words about what is not built."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decodefleet.cgroups import cgroup_cpus, cgroup_memory
from decodefleet.config import AgentConfig
from decodefleet_agent.engine import settings
from decodefleet_agent.engine.controllers.base import Limits
from decodefleet_agent.engine.sparsity import Window, pool_context
from decodefleet_agent.engine.threads import thread_count
from decodefleet_agent.engine.warmup import batch_sizes
from decodefleet_agent.model_files import ModelError, resolve

PAGE = 1 << 20


def config(engine: dict[str, Any] | None = None, **fields: Any) -> AgentConfig:
    return AgentConfig.model_validate({"modelUri": "file:///m", "engine": engine or {}, **fields})


def files(root: Path, **content: str) -> None:
    for name, text in content.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def membership(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "membership"
    path.write_text(text)
    return path


def test_v2_quota_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    files(tmp_path, cpu_dot_max="max 100000", a__cpu_dot_max="150000 100000", a__b__cpu_dot_max="300000 100000")
    assert cgroup_cpus(tmp_path, membership(tmp_path, "0::/a/b\n")) == 1.5


def test_v2_quota_inside_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    files(tmp_path, cpu_dot_max="50000 100000", memory_dot_max="1024")
    host = membership(tmp_path, "0::/kubepods/pod1/c1\n")
    assert cgroup_cpus(tmp_path, host) == 0.5
    assert cgroup_memory(tmp_path, host) == 1024


def test_v1_quota(tmp_path: Path) -> None:
    files(tmp_path, cpu__cpu_dot_cfs_quota_us="250000", cpu__cpu_dot_cfs_period_us="100000", memory__p__memory_dot_limit_in_bytes="2048")
    lines = membership(tmp_path, "4:cpu,cpuacct:/\n3:memory:/p\n")
    assert cgroup_cpus(tmp_path, lines) == 2.5
    assert cgroup_memory(tmp_path, lines) == 2048


def test_no_quota_is_unknown(tmp_path: Path) -> None:
    files(tmp_path, cpu__cpu_dot_cfs_quota_us="-1", cpu__cpu_dot_cfs_period_us="100000", cpu_dot_max="max 100000")
    assert cgroup_cpus(tmp_path, membership(tmp_path, "4:cpu:/\n0::/\n")) is None


def test_threads_never_exceed_the_pods_limit_and_are_at_least_one() -> None:
    assert thread_count("500m") == 1
    assert thread_count("1900m") == 1
    assert 1 <= thread_count(None) <= len(os.sched_getaffinity(0))
    assert thread_count("1000") <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("engine", "field"),
    [
        ({"precision": {"weights": "int8"}}, "engine.precision.weights: int8"),
        ({"precision": {"attention": "bf16"}}, "engine.precision.attention: bf16"),
        ({"precision": {"kvCache": "bf16"}}, "engine.precision.kvCache: bf16"),
        ({"precision": {"schedule": "ByComplexity"}}, "engine.precision.schedule: ByComplexity"),
        ({"batching": {"controller": "DQN"}}, "engine.batching.controller: DQN"),
        ({"prediction": {"method": "Suffix"}}, "engine.prediction.method: Suffix"),
    ],
)
def test_what_is_not_built_is_named(engine: dict[str, Any], field: str) -> None:
    message = settings.unsupported(config(engine))
    assert message and message.startswith(field) and "set " in message


def test_what_is_built_is_supported() -> None:
    for batching in ({}, {"chunk": "512"}, {"chunk": "None"}, {"chunk": "Formula", "controller": "Static"}):
        assert settings.unsupported(config({"precision": {"kvCache": "fp32", "weights": "fp32"}, "batching": batching})) is None
    assert "parallelism.tensor" in (settings.unsupported(config(tensorParallel=2)) or "")


def test_what_a_step_may_hold_follows_from_the_configuration() -> None:
    assert [settings.chunk(text) for text in ("None", "Dynamic", "Formula", "300")] == [None, "Dynamic", "Formula", 300]
    limits = settings.limits(config({"batching": {"maxBatch": 3, "maxBatchTokens": 99, "batchSizeThreshold": 2}}, cpu="1"))
    assert limits == Limits(3, 99, "Dynamic", 2, cores=1)
    assert replace(limits, max_batch=200).most_running == 99


def test_pool_size() -> None:
    assert settings.pool_pages(config({"kvCache": {"memory": "10Mi"}}), 4096, PAGE) == 10
    assert settings.pool_pages(config({"batching": {"maxBatch": 2}}, memory="1Gi"), 160, PAGE) == 20
    assert settings.pool_pages(config({"batching": {"maxBatch": 64}}, memory="1Gi"), 4096, PAGE) == 256
    assert settings.pool_pages(config({"batching": {"maxBatch": 64}}, memory="1Gi"), 4096, PAGE, device_memory=40 * PAGE) == 30
    with pytest.raises(ModelError, match=r"engine\.kvCache\.memory: 1Ki is less than one page"):
        settings.pool_pages(config({"kvCache": {"memory": "1Ki"}}), 4096, PAGE)


def test_a_window_bounds_the_pool_and_not_the_context() -> None:
    sparse = {"kvCache": {"sparsity": {"policy": "SlidingWindow", "sinks": 4, "window": 64}}, "batching": {"maxBatch": 2}}
    window = settings.limits(config(sparse)).window
    assert window == Window(4, 64) and window.pages == 6
    assert settings.pool_pages(config(sparse, memory="1Gi"), 20_000, PAGE) == 2 * 6 + 128
    assert pool_context(20_000, 6, window) == 20_000
    assert pool_context(20_000, 5, window) == 80 == pool_context(20_000, 5, None)


def test_warm_up_sizes() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(16) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("/models/x", "has no scheme"),
        ("s3://bucket/x", "unknown scheme 's3'"),
        ("file://models/x", "three slashes"),
        ("file:///no/such/model", "there is no /no/such/model"),
        ("pvc://claim/x", "only pods can mount"),
        ("package://no_such_package_here/x.gguf", "is not installed"),
        ("package://decodefleet/nothing.gguf", "holds no nothing.gguf"),
        ("package://decodefleet/../../x", "inside the package"),
        ("hf://justname", "must be hf://org/name"),
    ],
)
def test_a_bad_model_address_says_what_to_change(uri: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        resolve(uri)


def test_good_model_addresses(tmp_path: Path) -> None:
    (tmp_path / "a model").mkdir()
    assert resolve(f"file://{tmp_path}/a%20model") == tmp_path / "a model"
    assert resolve("package://decodefleet/config.py").name == "config.py"
