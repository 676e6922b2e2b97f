"""From a configuration to an engine that is ready: model files, weights, KV pool, warm-up."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import torch

from decodefleet.config import AgentConfig
from decodefleet_agent.engine import settings
from decodefleet_agent.engine.backends.base import Backend
from decodefleet_agent.engine.backends.choice import choose
from decodefleet_agent.engine.controllers import CONTROLLERS
from decodefleet_agent.engine.engine import Engine
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS, KVPool
from decodefleet_agent.engine.memory import lock_memory
from decodefleet_agent.engine.sparsity import pool_context
from decodefleet_agent.engine.step_cost import StepCost
from decodefleet_agent.engine.threads import thread_count
from decodefleet_agent.engine.warmup import Measured, rehearse, warm_up
from decodefleet_agent.engine.weights import Weights, load
from decodefleet_agent.messages import ModelInfo, Progress, Ready
from decodefleet_agent.model_files import ModelError, resolve


def start(config: AgentConfig, send: Callable[[Progress], None], started: float) -> tuple[Engine, Ready]:
    """The engine and what to tell the server; `started` is the time.monotonic() that loading is counted from. Raises ModelError."""
    if problem := settings.unsupported(config):
        raise ModelError(problem)
    threads = thread_count(config.cpu)
    torch.set_num_threads(threads)
    send(Progress("loading", 0.0, f"finding {config.model_uri}"))
    weights = load(resolve(config.model_uri))
    wanted = settings.context_length(config.engine, weights.config)
    backend = choose(config, weights.config, threads)
    backend.prepare(weights, wanted, lambda done, text: send(Progress("loading", done * 0.95, text)))
    page_bytes = backend.page_bytes(weights.config)
    pages = settings.pool_pages(config, wanted, page_bytes, backend.device_memory)
    limits = settings.limits(config)
    context = pool_context(wanted, pages, limits.window)
    send(Progress("loading", 0.95, f"allocating a KV pool of {pages * page_bytes / 2**20:.0f} MiB"))
    backend.allocate(pages)
    loaded = time.monotonic()
    measured: Measured | None = None

    def engine(cost: StepCost | None) -> Engine:
        controller = CONTROLLERS[config.engine.batching.controller]
        return Engine(backend, limits, KVPool(pages), page_bytes, context, weights.config.vocabulary_size, controller, cost)

    if config.engine.warmup.enabled:
        measured = warm_up(backend, limits, pages, context, lambda done, text: send(Progress("warming_up", done, text)))
        rehearse(engine(measured.cost))
        lock_memory()
    return engine(measured.cost if measured else None), Ready(
        model=_model_info(weights, backend, context, pages),
        load_seconds=loaded - started,
        warm_up_seconds=time.monotonic() - loaded if measured else None,
        prefill_tokens_per_second=measured.prefill_tokens_per_second if measured else None,
        curve=measured.curve if measured else [],
        curve_context=measured.context if measured else 0,
        mixed=measured.mixed if measured else [],
    )


def numerics_profile(weights: Weights, backend: Backend) -> str:
    """Equal profiles give equal tokens: weights, number formats, backend and its revision, and what else its bits depend on."""
    parts = (weights.fingerprint, weights.format, f"kv={backend.kv_format}", backend.name, backend.revision, backend.numerics)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _model_info(weights: Weights, backend: Backend, context: int, pages: int) -> ModelInfo:
    return ModelInfo(
        architecture=weights.config.architecture,
        parameters=weights.parameters,
        context_length=context,
        vocabulary_size=weights.config.vocabulary_size,
        numerics_profile=numerics_profile(weights, backend),
        weights_format=weights.format,
        eos_token_ids=list(weights.config.eos_token_ids),
        kv_page_tokens=PAGE_TOKENS,
        kv_pages=pages,
        backend=backend.name,
        kv_format=backend.kv_format,
        instructions=backend.instructions,
    )
