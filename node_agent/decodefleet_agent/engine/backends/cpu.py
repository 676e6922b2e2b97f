"""The cpu backend: one native call per step, int8 activations against weights in the blocks of their file.

Its bits do not depend on what else is in the batch, nor on the number of threads or the instruction-set tier: each row is quantised by
itself, a block's products are whole numbers, blocks are added in ascending order, and attention's partitions are combined in order.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from itertools import chain

import numpy as np

from decodefleet.config import Sparsity, SparsityPolicy
from decodefleet_agent.engine.backends import native
from decodefleet_agent.engine.backends.base import Progress
from decodefleet_agent.engine.backends.native import KVFormat
from decodefleet_agent.engine.backends.native_sampling import Draws
from decodefleet_agent.engine.backends.packing import BLOCK, Arena, Packed, pack_blocks, pack_rotated
from decodefleet_agent.engine.backends.rotary import rotary_tables
from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS
from decodefleet_agent.engine.sampling import NOT_FINITE, Draw
from decodefleet_agent.engine.sparsity import described
from decodefleet_agent.engine.weights import ModelConfig, Weights
from decodefleet_agent.model_files import ModelError

HEAD_DIMS = (64, 128)
_ATTENTION = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
_MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj"}


def refusal(config: ModelConfig) -> str | None:
    """Why this backend cannot run such a model, or None."""
    if config.head_dim not in HEAD_DIMS:
        return f"heads of {config.head_dim} (it takes {' or '.join(map(str, HEAD_DIMS))})"
    for name, size in (("hidden", config.hidden_size), ("intermediate", config.intermediate_size)):
        if size % BLOCK:
            return f"a {name} size of {size} (it takes multiples of {BLOCK})"
    return None


class CpuBackend:
    """See `Backend`. `tier`: of instructions, the best by default. `sparsity`: which tokens a row attends to."""

    name = "cpu"
    revision = 4

    def __init__(
        self, threads: int, kv_format: KVFormat = KVFormat.int8, tier: str | None = None, sparsity: Sparsity | None = None
    ) -> None:
        self._native = native.library()
        found = native.tier(tier)
        if found is None:
            name = tier or os.environ.get(native.TIER_VARIABLE)
            raise ModelError(f"{native.TIER_VARIABLE}: this processor has no tier {name!r}; set amx, avx512, avx2 or portable, or unset it")
        self.instructions = found
        self.kv_format = kv_format.name
        self.sparsity = sparsity or Sparsity()
        self.numerics = "int8 blocks of 32" + described(self.sparsity)  # all tiers give the same bits
        if self.sparsity.policy == SparsityPolicy.Hierarchical and kv_format != KVFormat.int8:
            raise ModelError(
                "engine.kvCache.sparsity.policy: Hierarchical needs int8 keys and values; set engine.precision.kvCache to int8 or auto"
            )
        self._kv, self._threads = kv_format, threads
        self._engine: int | None = None
        self.device_memory: int | None = None
        self._logits = np.empty((0, 0), np.float32)

    def __del__(self) -> None:
        self._close()

    def page_bytes(self, config: ModelConfig) -> int:
        token = 2 * config.head_dim * 4 if self._kv == KVFormat.fp32 else 2 * config.head_dim + 8
        summaries = 2 * config.head_dim + PAGE_TOKENS + 8 if self.sparsity.policy == SparsityPolicy.Hierarchical else 0
        return config.layers * config.kv_heads * (PAGE_TOKENS * token + summaries)

    def prepare(self, weights: Weights, context_length: int, progress: Progress) -> None:
        config = self._config = weights.config
        if why := refusal(config):
            raise ModelError(f"the cpu backend cannot run this model: it has {why}; set DECODEFLEET_BACKEND=reference")
        loader = _Loader(weights)
        self._keep: list[object] = [loader.arena]
        layers = self._layers = (native.Layer * config.layers)()
        for index in range(config.layers):
            progress((index + 1) / (config.layers + 1), f"layer {index + 1} of {config.layers}")
            loader.layer(index, layers[index])
        hidden = config.hidden_size
        embedding = loader.matrices({"embedding": "model.embed_tokens"}, hidden, config.vocabulary_size)["embedding"]
        head = embedding if config.tied_embeddings else loader.matrices({"head": "lm_head"}, hidden, config.vocabulary_size)["head"]
        norm = loader.vector("model.norm.weight", hidden)
        cosine, sine = rotary_tables(config, context_length)
        self._keep += [loader.kept, cosine, sine]
        self._model = native.Model(
            layer=layers,
            norm=native.address(norm),
            cosine=native.address(cosine),
            sine=native.address(sine),
            embedding=embedding.linear,
            head=head.linear,
            layers=config.layers,
            hidden=hidden,
            intermediate=config.intermediate_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            kv_format=self._kv,
            epsilon=config.rms_norm_eps,
            sparsity=native.SparsityPolicy[self.sparsity.policy.name],
            sinks=self.sparsity.sinks,
            window=self.sparsity.window,
            budget=self.sparsity.budget_tokens,
        )
        self._close()
        self._engine = self._native.df_create(ctypes.byref(self._model), self.instructions.encode(), self._threads)

    def allocate(self, pages: int) -> None:
        self.pool = Arena().take(pages * self.page_bytes(self._config))
        self.pool.fill(0)
        self._native.df_set_pool(self._engine, native.address(self.pool), pages)

    def step(self, batch: Batch) -> np.ndarray:
        spans = batch.spans
        token_ids = batch.token_ids.astype(np.int32)
        starts = np.array([span.start for span in spans], np.int32)
        lengths = np.array([span.length for span in spans], np.int32)
        offsets = np.cumsum([0, *(len(span.pages) for span in spans)], dtype=np.int32)
        pages = np.fromiter(chain.from_iterable(span.pages for span in spans), np.int32, int(offsets[-1]))
        sampled = (np.cumsum(lengths, dtype=np.int32) - 1)[[span.samples for span in spans]] if spans else lengths
        if len(sampled) > len(self._logits):
            self._logits = np.empty((len(sampled), self._config.vocabulary_size), np.float32)
        arrays = (token_ids, starts, lengths, offsets, pages, sampled, self._logits)
        described = native.Batch(*map(native.address, arrays), batch.rows, len(spans), len(sampled))
        self._native.df_step(self._engine, ctypes.byref(described))
        return self._logits[: len(sampled)]

    def sample(self, logits: np.ndarray, draws: Sequence[Draw]) -> list[int | str]:
        described, tokens = Draws(draws), np.empty(len(draws), np.int32)
        rows, vocabulary = logits.shape
        self._native.df_sample(self._engine, native.address(logits), rows, vocabulary, described.address, native.address(tokens))
        return [token if token >= 0 else NOT_FINITE for token in tokens.tolist()]

    def bytes_read(self) -> int:
        """That attention read from the pool since `prepare`: keys, values, scales and summaries."""
        return int(self._native.df_bytes_read(self._engine))

    def products(self, rows: int) -> None:
        """Runs the matrix products of a step of so many sampling rows, and nothing else."""
        self._native.df_products(self._engine, rows, rows)

    def _close(self) -> None:
        if engine := getattr(self, "_engine", None):
            self._native.df_destroy(engine)
            self._engine = None


class _Loader:
    """Reads tensors into the kernels' layout. What is in `kept` must outlive the addresses that were given out."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.arena = Arena()
        self.kept: list[object] = []

    def vector(self, name: str, size: int) -> np.ndarray:
        values = np.ascontiguousarray(self.weights.read(name, (size,)).numpy())
        self.kept.append(values)
        return values

    def matrices(self, names: dict[str, str], inputs: int, outputs: int | dict[str, int]) -> dict[str, Packed]:
        """Matrices of the same inputs, which are quantised once for them: all in their file's blocks, or all rotated."""
        weights = self.weights
        native_blocks = all(f"{name}.weight" in weights.block_readers for name in names.values())
        packed = {}
        for key, name in names.items():
            rows = outputs if isinstance(outputs, int) else outputs[key]
            bias = self.vector(f"{name}.bias", rows) if f"{name}.bias" in weights else None
            if native_blocks:
                packed[key] = pack_blocks(weights.read_blocks(f"{name}.weight", (rows, inputs)), bias, self.arena)
            else:
                packed[key] = pack_rotated(weights.read(f"{name}.weight", (rows, inputs)), bias, self.arena)
        self.kept.append(packed)
        return packed

    def layer(self, index: int, layer: native.Layer) -> None:
        config = self.weights.config
        hidden, queries, keys = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
        prefix = f"model.layers.{index}."
        groups = (
            (_ATTENTION, hidden, {"q": queries, "k": keys, "v": keys}),
            ({"output": "self_attn.o_proj"}, queries, hidden),
            (_MLP, hidden, config.intermediate_size),
            ({"down": "mlp.down_proj"}, config.intermediate_size, hidden),
        )
        for names, inputs, outputs in groups:
            named = {key: prefix + name for key, name in names.items()}
            for key, packed in self.matrices(named, inputs, outputs).items():  # type: ignore[arg-type]
                setattr(layer, key, packed.linear)
        layer.input_norm = native.address(self.vector(prefix + "input_layernorm.weight", hidden))
        layer.mlp_norm = native.address(self.vector(prefix + "post_attention_layernorm.weight", hidden))
