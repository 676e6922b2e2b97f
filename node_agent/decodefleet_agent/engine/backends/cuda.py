"""The cuda backend: Triton kernels on a GPU, weights in bf16 or fp32, int8 keys and values, and CUDA graphs of decode batches.

Its bits do not depend on what else is in the batch: see `triton_kernels`. What is between the kernels only copies. Matrix products are
Triton's and not cuBLAS's because that chooses a kernel, and with it an order of additions, by the number of rows.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import torch

from decodefleet_agent.engine.backends.base import Progress
from decodefleet_agent.engine.backends.cuda_plan import Plan, Views, padded_decode, plan, views
from decodefleet_agent.engine.backends.packing import rotate
from decodefleet_agent.engine.backends.rotary import rotary_tables
from decodefleet_agent.engine.backends.triton_kernels import DEVICE, INTERPRETED, Pool, tile_rows
from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS, pages_for
from decodefleet_agent.engine.sampling import sample_rows
from decodefleet_agent.engine.weights import ModelConfig, Weights
from decodefleet_agent.model_files import ModelError

HEAD_DIMS = (64, 128)
_ROTATED = 64  # values of a head that are rotated together
_GRAPH_ROWS = 256  # a larger decode batch is launched kernel by kernel, which no longer costs much of its time


def has_gpu() -> bool:
    """Whether PyTorch sees a GPU that kernels are to run on."""
    return not INTERPRETED and torch.cuda.is_available()


def refusal(config: ModelConfig) -> str | None:
    """Why this backend cannot serve such a model here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if not INTERPRETED and not has_gpu():
        return "PyTorch sees no GPU here (a driver, and a PyTorch built for CUDA, are needed)"
    if config.head_dim not in HEAD_DIMS:
        return f"the model has heads of {config.head_dim} (it takes {' or '.join(map(str, HEAD_DIMS))})"
    return None


@dataclass(frozen=True)
class _Linear:
    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None  # [outputs] fp32


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: _Linear
    output: _Linear
    mlp_norm: torch.Tensor
    gate_up: _Linear
    down: _Linear


@dataclass(frozen=True)
class _Graph:
    """A captured step of one number of decoding rows: copy numbers in, replay, read logits."""

    graph: torch.cuda.CUDAGraph
    numbers: torch.Tensor
    logits: torch.Tensor


class CudaBackend:
    """See `Backend`. `dtype`: of weights and of what meets them; bf16 by default, fp32 in the interpreter."""

    name = "cuda"
    sample = staticmethod(sample_rows)
    revision = 1
    kv_format = "int8"

    def __init__(self, dtype: torch.dtype | None = None, graphs: bool = True) -> None:
        import triton

        self._dtype = dtype or (torch.float32 if INTERPRETED else torch.bfloat16)
        self._use_graphs = graphs and not INTERPRETED
        self.instructions = "interpreter" if INTERPRETED else "sm_{}{}".format(*torch.cuda.get_device_capability())
        self.numerics = f"triton {triton.__version__} {self.instructions} {self._dtype}"

    @property
    def device_memory(self) -> int | None:
        """Bytes that the GPU has free; None where tensors are on the host."""
        return None if INTERPRETED else torch.cuda.mem_get_info()[0]

    def page_bytes(self, config: ModelConfig) -> int:
        return config.layers * config.kv_heads * PAGE_TOKENS * (2 * config.head_dim + 8)

    def prepare(self, weights: Weights, context_length: int, progress: Progress) -> None:
        config = self._config = weights.config
        if why := refusal(config):
            raise ModelError(f"the cuda backend cannot serve: {why}; unset DECODEFLEET_BACKEND")
        hidden, vocabulary = config.hidden_size, config.vocabulary_size
        embedding = self._matrix(weights, "model.embed_tokens", vocabulary, hidden)
        self._embedding = embedding.weight
        self._head = embedding if config.tied_embeddings else self._matrix(weights, "lm_head", vocabulary, hidden)
        self._norm = self._vector(weights, "model.norm.weight", hidden)
        self._layers = []
        for index in range(config.layers):
            progress((index + 1) / (config.layers + 1), f"layer {index + 1} of {config.layers}")
            self._layers.append(self._layer(weights, index))
        cosine, sine = (torch.from_numpy(table).to(DEVICE) for table in rotary_tables(config, context_length))
        self._tables = (cosine, sine)
        self._rotation = rotate(torch.eye(config.head_dim), _ROTATED).to(DEVICE)
        group = config.heads // config.kv_heads
        self._tile_tokens = tile_rows(group) // group
        self._context_pages = pages_for(context_length)

    def allocate(self, pages: int) -> None:
        config = self._config
        self._scratch_page = pages  # one more, for the rows that fill up a batch
        shape = (config.layers, config.kv_heads, (pages + 1) * PAGE_TOKENS)
        keys, values = (torch.zeros(*shape, config.head_dim, dtype=torch.int8, device=DEVICE) for _ in range(2))
        key_scales, value_scales = (torch.zeros(shape, dtype=torch.float32, device=DEVICE) for _ in range(2))
        self.pool = [Pool(*layer) for layer in zip(keys, values, key_scales, value_scales, strict=True)]
        self._host = torch.empty(0, config.vocabulary_size)
        self._graphs: dict[int, _Graph] = {}
        self._seen: set[int] = set()

    def step(self, batch: Batch) -> np.ndarray:
        logits = self.logits(batch)
        if INTERPRETED:
            return logits.numpy()
        if len(logits) > len(self._host):
            self._host = torch.empty(logits.shape, pin_memory=True)
        return self._host[: len(logits)].copy_(logits).numpy()

    @torch.inference_mode()
    def logits(self, batch: Batch) -> torch.Tensor:
        """What `step` returns, on the device; valid until the next step."""
        decode = padded_decode(batch, self._scratch_page) if self._use_graphs else None
        if decode is not None and decode.rows <= _GRAPH_ROWS:
            return self._replayed(plan(decode, self._tile_tokens, self._context_pages), decode.rows)[: batch.rows]
        planned = plan(batch, self._tile_tokens)
        return self._forward(views(torch.from_numpy(planned.numbers).to(DEVICE), planned.shapes), planned.partitions)

    def _replayed(self, planned: Plan, rows: int) -> torch.Tensor:
        """A batch size's first step compiles its kernels, the second is captured, both within warm-up."""
        numbers = torch.from_numpy(planned.numbers)
        if rows not in self._seen:
            self._seen.add(rows)
            return self._forward(views(numbers.to(DEVICE), planned.shapes), planned.partitions)
        if rows not in self._graphs:
            static = numbers.to(DEVICE)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self._forward(views(static, planned.shapes), planned.partitions)
            self._graphs[rows] = _Graph(graph, static, logits)
        captured = self._graphs[rows]
        captured.numbers.copy_(numbers)
        captured.graph.replay()
        return captured.logits

    def _forward(self, batch: Views, partitions: int) -> torch.Tensor:
        from decodefleet_agent.engine.backends.triton_kernels.attention import attend
        from decodefleet_agent.engine.backends.triton_kernels.elementwise import rms_norm, swiglu
        from decodefleet_agent.engine.backends.triton_kernels.linear import linear
        from decodefleet_agent.engine.backends.triton_kernels.pool import write

        epsilon, dtype = self._config.rms_norm_eps, self._dtype
        x = self._embedding.index_select(0, batch.token_ids).float()
        for layer, pool in zip(self._layers, self.pool, strict=True):
            qkv = linear(rms_norm(x, layer.input_norm, epsilon, dtype), layer.qkv.weight, layer.qkv.bias)
            queries = write(qkv, batch.positions, batch.slots, self._tables, self._rotation, pool)
            attention = attend(queries, pool, batch.tiles, batch.page_table, partitions, self._rotation, dtype)
            linear(attention, layer.output.weight, layer.output.bias, out=x)
            gate_up = linear(rms_norm(x, layer.mlp_norm, epsilon, dtype), layer.gate_up.weight, layer.gate_up.bias)
            linear(swiglu(gate_up, dtype), layer.down.weight, layer.down.bias, out=x)
        return linear(rms_norm(x, self._norm, epsilon, dtype, batch.sampled), self._head.weight)

    def _vector(self, weights: Weights, name: str, size: int) -> torch.Tensor:
        return weights.read(name, (size,)).to(DEVICE, torch.float32)

    def _matrix(self, weights: Weights, name: str, outputs: int, inputs: int) -> _Linear:
        weight = weights.read(f"{name}.weight", (outputs, inputs)).to(DEVICE, self._dtype)
        return _Linear(weight, self._vector(weights, f"{name}.bias", outputs) if f"{name}.bias" in weights else None)

    def _joined(self, weights: Weights, inputs: int, outputs: dict[str, int]) -> _Linear:
        """Several projections of one input as one."""
        parts = [self._matrix(weights, name, size, inputs) for name, size in outputs.items()]
        bias = None
        if any(part.bias is not None for part in parts):
            bias = torch.cat([torch.zeros(len(part.weight), device=DEVICE) if part.bias is None else part.bias for part in parts])
        return _Linear(torch.cat([part.weight for part in parts]), bias)

    def _layer(self, weights: Weights, index: int) -> _Layer:
        config = weights.config
        hidden, mlp = config.hidden_size, config.intermediate_size
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        prefix = f"model.layers.{index}."
        attention, feed = f"{prefix}self_attn.", f"{prefix}mlp."
        return _Layer(
            input_norm=self._vector(weights, prefix + "input_layernorm.weight", hidden),
            qkv=self._joined(weights, hidden, {attention + "q_proj": queries, attention + "k_proj": keys, attention + "v_proj": keys}),
            output=self._matrix(weights, attention + "o_proj", hidden, queries),
            mlp_norm=self._vector(weights, prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._joined(weights, hidden, {feed + "gate_proj": mlp, feed + "up_proj": mlp}),
            down=self._matrix(weights, feed + "down_proj", hidden, mlp),
        )
