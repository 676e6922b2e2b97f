"""Which backend serves a model: `cuda` where a GPU is, `cpu` where its library is, each if the model fits it; else `reference`."""

from __future__ import annotations

import logging
import os

import torch

from decodefleet.config import AgentConfig, SparsityPolicy
from decodefleet_agent.engine.backends import cpu, cuda, native
from decodefleet_agent.engine.backends.base import Backend
from decodefleet_agent.engine.backends.cpu import CpuBackend
from decodefleet_agent.engine.backends.cuda import CudaBackend
from decodefleet_agent.engine.backends.native import KVFormat
from decodefleet_agent.engine.backends.reference import ReferenceBackend
from decodefleet_agent.engine.weights import ModelConfig
from decodefleet_agent.model_files import ModelError

VARIABLE = "DECODEFLEET_BACKEND"
log = logging.getLogger(__name__)


def choose(config: AgentConfig, model: ModelConfig, threads: int) -> Backend:
    """Raises ModelError where the one that DECODEFLEET_BACKEND or the precision asks for cannot serve."""
    forced = os.environ.get(VARIABLE) or "auto"
    precision = config.engine.precision
    if forced not in ("auto", "cpu", "cuda", "reference"):
        raise ModelError(f"{VARIABLE}: there is no backend {forced!r}; set cpu or reference, or cuda where a GPU is, or unset it")
    if (gpu := _cuda(forced, config, model)) is not None:
        return gpu
    why = f"{VARIABLE} says so" if forced == "reference" else _why_not_cpu(str(precision.weights), model)
    if why is None:
        if precision.kv_cache not in ("auto", *KVFormat.__members__):
            raise ModelError(
                f"engine.precision.kvCache: the cpu backend has no {precision.kv_cache}; set {' or '.join(KVFormat.__members__)}"
            )
        kv_format = KVFormat.int8 if precision.kv_cache == "auto" else KVFormat[precision.kv_cache]
        backend = CpuBackend(threads, kv_format, sparsity=config.engine.kv_cache.sparsity)
        log.info("backend cpu: instructions %s, %d threads, KV cache %s", backend.instructions, threads, backend.kv_format)
        return backend
    if forced == "cpu":
        raise ModelError(f"{VARIABLE} is cpu, and that backend cannot serve: {why}; unset it, or set it to reference")
    if config.engine.kv_cache.sparsity.policy == SparsityPolicy.Hierarchical:
        raise ModelError(
            f"engine.kvCache.sparsity.policy: Hierarchical needs the cpu backend, which cannot serve: {why}; set None or SlidingWindow"
        )
    asked_for = forced == "reference" or str(precision.weights) == "fp32"
    log.log(logging.INFO if asked_for else logging.WARNING, "backend reference, which is slow: %s", why)
    return ReferenceBackend(config.engine.kv_cache.sparsity, "fp32" if precision.kv_cache == "auto" else precision.kv_cache)


def _cuda(forced: str, config: AgentConfig, model: ModelConfig) -> Backend | None:
    """None where there is no GPU, or another backend must serve."""
    if forced not in ("auto", "cuda") or (forced == "auto" and not cuda.has_gpu()):
        return None
    precision = config.engine.precision
    sparsity = config.engine.kv_cache.sparsity.policy
    if sparsity != SparsityPolicy.None_:
        why: str | None = f"engine.kvCache.sparsity.policy is {sparsity}"
    else:
        other = precision.kv_cache not in ("auto", "int8")
        why = f"engine.precision.kvCache is {precision.kv_cache}" if other else cuda.refusal(model)
    if why is None:
        backend = CudaBackend(torch.float32 if precision.weights == "fp32" else None)
        log.info("backend cuda: %s, KV cache %s", backend.numerics, backend.kv_format)
        return backend
    if forced == "cuda":
        raise ModelError(f"{VARIABLE} is cuda, and that backend cannot serve: {why}; unset it, or set it to cpu or reference")
    log.warning("the GPU is not used: %s", why)
    return None


def _why_not_cpu(weights: str, model: ModelConfig) -> str | None:
    if weights == "fp32":
        return "engine.precision.weights is fp32"
    try:
        native.library()
    except OSError as error:
        return f"its library is not there ({error}); install the package where a C++ compiler is"
    problem = cpu.refusal(model)
    return f"the model has {problem}" if problem else None
