"""The reference backend: plain PyTorch in fp32, the oracle of the others.

Its bits do not depend on what else is in the batch: every matrix product runs on tiles of 16 rows, or of another size that was seen
to give the same bits on this machine; attention runs on tiles of query rows of one sequence against fixed partitions of 64 tokens that
are combined in order; keys and values are read only from the pool; all else is elementwise, or a reduction along a row.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch

from decodefleet.config import Sparsity
from decodefleet_agent.engine.backends.attention import AttentionPlan, attend, plan_attention, same_bits
from decodefleet_agent.engine.backends.base import Progress
from decodefleet_agent.engine.backends.kv_formats import DTYPES, allocated, rotated, token_bytes, write
from decodefleet_agent.engine.backends.rotary import rotary_tables
from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS
from decodefleet_agent.engine.sampling import sample_rows
from decodefleet_agent.engine.sparsity import described, window_of
from decodefleet_agent.engine.weights import ModelConfig, Weights
from decodefleet_agent.model_files import ModelError

TILE = 16
_TILES = (4, 64)  # sizes of a tile beside 16: the small one makes small batches cheap, the large one prefill
_QUERY_TILES = (16, 256)


@dataclass(frozen=True)
class _Linear:
    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, tiles: tuple[int, ...]) -> torch.Tensor:
        """[rows, inputs] to [rows, outputs]. Rows are a multiple of the smallest tile; `tiles` go from the largest."""
        result = torch.empty(len(x), len(self.weight))
        start = 0
        while start < len(x):
            size = next(size for size in tiles if size <= len(x) - start)
            torch.mm(x[start : start + size], self.weight.t(), out=result[start : start + size])
            start += size
        return result if self.bias is None else result.add_(self.bias)


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: _Linear
    output: _Linear
    mlp_norm: torch.Tensor
    gate_up: _Linear
    down: _Linear


class ReferenceBackend:
    """See `Backend`. `kv_format`: fp32, int8 or fp8."""

    name = "reference"
    device_memory = None
    revision = 1
    sample = staticmethod(sample_rows)

    def __init__(self, sparsity: Sparsity | None = None, kv_format: str = "fp32") -> None:
        if kv_format not in DTYPES:
            raise ModelError(f"engine.precision.kvCache: the reference backend has no {kv_format}; set {' or '.join(DTYPES)}")
        self.kv_format = kv_format
        self.instructions = torch.backends.cpu.get_cpu_capability()
        self.sparsity = sparsity or Sparsity()
        self.numerics = f"torch {torch.__version__} {self.instructions}" + described(self.sparsity)

    def page_bytes(self, config: ModelConfig) -> int:
        return config.layers * 2 * config.kv_heads * PAGE_TOKENS * token_bytes(self.kv_format, config.head_dim)

    def prepare(self, weights: Weights, context_length: int, progress: Progress) -> None:
        config = self._config = weights.config
        hidden = config.hidden_size
        self._embedding = weights.read("model.embed_tokens.weight", (config.vocabulary_size, hidden))
        head = self._embedding if config.tied_embeddings else weights.read("lm_head.weight", (config.vocabulary_size, hidden))
        self._head = _Linear(head, None)
        self._norm = weights.read("model.norm.weight", (hidden,))
        self._layers = []
        for index in range(config.layers):
            progress((index + 1) / (config.layers + 1), f"layer {index + 1} of {config.layers}")
            self._layers.append(_layer(weights, index))
        first = self._layers[0]
        shapes = [first.qkv, first.output, first.gate_up, first.down, self._head]
        sizes = sorted((TILE, *_TILES), reverse=True)
        self._tiles = tuple(size for size in sizes if all(_same_bits(linear, size) for linear in shapes))
        self._query_tiles = same_bits(_QUERY_TILES, config.head_dim)
        self._cos, self._sin = map(torch.from_numpy, rotary_tables(config, context_length))

    def allocate(self, pages: int) -> None:
        config = self._config
        self._keys, self._values = (
            allocated(self.kv_format, config.layers, config.kv_heads, pages, config.head_dim) for _ in ("keys", "values")
        )

    @torch.inference_mode()
    def step(self, batch: Batch) -> np.ndarray:
        config = self._config
        rows = batch.rows
        plan = plan_attention(batch, config.heads // config.kv_heads, self._query_tiles, window_of(self.sparsity))
        cos, sin = self._cos[plan.positions][:, None], self._sin[plan.positions][:, None]
        x = torch.zeros(self._tiled(rows), config.hidden_size)
        x[:rows] = self._embedding[torch.from_numpy(batch.token_ids)]
        for index, layer in enumerate(self._layers):
            attention = self._attention(index, layer.qkv(self._normed(x, layer.input_norm), self._tiles), rows, cos, sin, plan)
            x += layer.output(attention, self._tiles)
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm), self._tiles).chunk(2, dim=1)
            # silu written out: its fused form rounds the last elements of a thread's share in another way.
            x += layer.down(gate / (1 + torch.exp(-gate)) * up, self._tiles)
        sampled = torch.zeros(self._tiled(len(plan.sampled_rows)), config.hidden_size)
        sampled[: len(plan.sampled_rows)] = x[plan.sampled_rows]
        return self._head(self._normed(sampled, self._norm), self._tiles)[: len(plan.sampled_rows)].numpy()

    def _tiled(self, rows: int) -> int:
        return -(-rows // self._tiles[-1]) * self._tiles[-1]

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(dim=1, keepdim=True) + self._config.rms_norm_eps) * weight

    def _attention(
        self, index: int, qkv: torch.Tensor, rows: int, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """[tiled rows, heads * head_dim]; writes the rows' keys and values to the pool first."""
        config = self._config
        q, k, v = (
            part.unflatten(1, (-1, config.head_dim))
            for part in qkv[:rows].split([heads * config.head_dim for heads in (config.heads, config.kv_heads, config.kv_heads)], dim=1)
        )
        keys, values = self._keys.layer(index), self._values.layer(index)
        write(keys, plan.pages, plan.slots, rotated(_placed(k, cos, sin), self.kv_format))
        write(values, plan.pages, plan.slots, rotated(v, self.kv_format))
        result = torch.zeros(len(qkv), config.heads * config.head_dim)
        attend(rotated(_placed(q, cos, sin), self.kv_format), keys, values, plan, result[:rows])
        return rotated(result.unflatten(1, (-1, config.head_dim)), self.kv_format).flatten(1)


def _placed(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [rows, heads, head_dim], the halves of a head rotated together."""
    low, high = x.chunk(2, dim=2)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=2)


def _same_bits(linear: _Linear, size: int) -> bool:
    """Whether tiles of this size give, row for row, the bits of tiles of 16 on this machine, with one thread and with several."""
    rows = max(size, TILE)
    x = torch.randn(rows, linear.weight.shape[1], generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = linear(x, (TILE,))
        same = torch.equal(linear(x, (size,)), wanted)
        torch.set_num_threads(max(2, before, os.cpu_count() or 1))  # libraries share some shapes out, and then add in another order
        return same and torch.equal(linear(x, (size,)), wanted)
    finally:
        torch.set_num_threads(before)


def _layer(weights: Weights, index: int) -> _Layer:
    config = weights.config
    prefix = f"model.layers.{index}."
    hidden, mlp = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def linear(inputs: int, **outputs: int) -> _Linear:
        """Several projections of one input as one."""
        weight = torch.empty(sum(outputs.values()), inputs)
        bias = torch.zeros(len(weight)) if any(f"{prefix}{_MODULES[name]}.bias" in weights for name in outputs) else None
        start = 0
        for name, size in outputs.items():
            weight[start : start + size] = weights.read(f"{prefix}{_MODULES[name]}.weight", (size, inputs))
            if bias is not None and f"{prefix}{_MODULES[name]}.bias" in weights:
                bias[start : start + size] = weights.read(f"{prefix}{_MODULES[name]}.bias", (size,))
            start += size
        return _Linear(weight, bias)

    return _Layer(
        input_norm=weights.read(prefix + "input_layernorm.weight", (hidden,)),
        qkv=linear(hidden, q=queries, k=keys, v=keys),
        output=linear(queries, o=hidden),
        mlp_norm=weights.read(prefix + "post_attention_layernorm.weight", (hidden,)),
        gate_up=linear(hidden, gate=mlp, up=mlp),
        down=linear(mlp, down=hidden),
    )


_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
