"""What of an agent's configuration the engine can do, and the sizes that follow from it."""

from __future__ import annotations

import os

from decodefleet.cgroups import cgroup_memory
from decodefleet.config import AgentConfig, SparsityPolicy
from decodefleet.config import Engine as EngineConfig
from decodefleet.units import parse_quantity
from decodefleet_agent.engine.chunks import Chunk
from decodefleet_agent.engine.controllers import CONTROLLERS
from decodefleet_agent.engine.controllers.base import Limits
from decodefleet_agent.engine.kv_pool import pages_for
from decodefleet_agent.engine.sparsity import window_of
from decodefleet_agent.engine.threads import thread_count
from decodefleet_agent.engine.weights import ModelConfig
from decodefleet_agent.model_files import ModelError


def unsupported(config: AgentConfig) -> str | None:
    """Names the first field that asks for what is not built, and says what to set instead; None if all is supported."""
    engine = config.engine
    supported: list[tuple[str, object, tuple[str, ...]]] = [
        ("precision.weights", engine.precision.weights, ("auto", "fp32")),
        ("precision.attention", engine.precision.attention, ("auto", "fp32")),
        ("precision.kvCache", engine.precision.kv_cache, ("auto", "int8", "fp8", "fp32")),
        ("precision.schedule", engine.precision.schedule, ("Static",)),
        ("kvCache.sparsity.policy", engine.kv_cache.sparsity.policy, tuple(SparsityPolicy)),
        ("batching.controller", engine.batching.controller, tuple(CONTROLLERS)),
        ("prediction.method", engine.prediction.method, ("None",)),
    ]
    for field, value, values in supported:
        if str(value) not in values:
            return f"engine.{field}: {value} is not supported yet; set {' or '.join(values)}"
    if config.tensor_parallel != 1:
        return f"parallelism.tensor: {config.tensor_parallel} is not supported yet; set 1"
    return None


def limits(config: AgentConfig) -> Limits:
    """What one step may hold."""
    batching = config.engine.batching
    return Limits(
        max_batch=batching.max_batch,
        max_batch_tokens=batching.max_batch_tokens,
        chunk=chunk(batching.chunk),
        batch_size_threshold=batching.batch_size_threshold,
        cores=thread_count(config.cpu),
        window=window_of(config.engine.kv_cache.sparsity),
    )


def chunk(text: str) -> Chunk:
    """What `engine.batching.chunk` says."""
    match text:
        case "None":
            return None
        case "Dynamic" | "Formula":
            return text
        case _:
            return int(text)


def pool_pages(config: AgentConfig, context_length: int, page_bytes: int, device_memory: int | None = None) -> int:
    """Pages of the KV pool: what `engine.kvCache.memory` holds, else what maxBatch whole contexts need (or windows, and a step's
    prompts), at most a quarter of the memory.

    `device_memory`: bytes free on a device, if it is not the host's memory; the pool may have three quarters, as the weights are there.
    Raises ModelError where that is less than one page.
    """
    if config.engine.kv_cache.memory is not None:
        memory = config.engine.kv_cache.memory
        pages = int(parse_quantity(memory) // page_bytes)
        if pages < 1:
            raise ModelError(f"engine.kvCache.memory: {memory} is less than one page of this model; set at least {page_bytes} bytes")
        return pages
    wanted = config.engine.batching.max_batch * pages_for(context_length)
    if window := window_of(config.engine.kv_cache.sparsity):
        batching = config.engine.batching
        wanted = min(wanted, batching.max_batch * window.pages + pages_for(batching.max_batch_tokens))
    most = available_memory(config) / 4 if device_memory is None else device_memory * 0.75
    return max(1, min(wanted, int(most // page_bytes)))


def available_memory(config: AgentConfig) -> float:
    """Bytes that this agent may use: its limit if it has one, else what the machine has left."""
    if config.memory is not None:
        return parse_quantity(config.memory)
    if (limit := cgroup_memory()) is not None and limit < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return float(limit)
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def context_length(engine: EngineConfig, model: ModelConfig) -> int:
    """Longest prompt and output together before the pool's size is known. Raises ModelError if it exceeds the model's."""
    if engine.max_context is None:
        return model.context_length
    if engine.max_context > model.context_length:
        raise ModelError(f"engine.maxContext: {engine.max_context} is more than the model's {model.context_length}; set at most that")
    return engine.max_context
