"""llama.cpp through llama-cpp-python's low-level calls, which decode several sequences at once."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence

import llama_cpp
import numpy as np

from decodefleet_agent.bench.peers.converted import gguf_in
from decodefleet_agent.bench.protocol import Load, Loaded, Timing

_CHUNK = 512  # tokens of a prompt per call, llama.cpp's own default


class LlamaCpp:
    """See `Peer`."""

    def load(self, load: Load) -> Loaded:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path, form, origin = gguf_in(load)
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = load.batch * -(-load.context // 256) * 256
        settings.n_seq_max = load.batch
        settings.n_batch = settings.n_ubatch = max(_CHUNK, load.batch)
        settings.n_threads = settings.n_threads_batch = load.threads
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot hold {load.batch} sequences of {load.context} tokens")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(settings.n_batch, 0, 1)
        self._clear()
        return Loaded(llama_cpp.__version__, form, f"{origin}, KV fp16")

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        self._clear()
        begun = time.perf_counter()
        last = []
        for sequence, prompt in enumerate(prompts):
            for start in range(0, len(prompt), _CHUNK):
                part = prompt[start : start + _CHUNK]
                ends = start + len(part) == len(prompt)
                self._decode([(token, start + i, sequence, ends and i == len(part) - 1) for i, token in enumerate(part)])
            last.append(self._likeliest([-1])[0])
        first = time.perf_counter() - begun
        for step in range(new_tokens - 1):
            self._decode([(token, len(prompts[sequence]) + step, sequence, True) for sequence, token in enumerate(last)])
            last = self._likeliest(range(len(last)))
        return Timing(first, time.perf_counter() - begun, len(prompts) * (new_tokens - 1))

    def logprobs(self, windows: list[list[int]]) -> list[list[float]]:
        result = []
        for window in windows:
            self._clear()
            scores: list[float] = []
            for start in range(0, len(window), _CHUNK):
                part = window[start : start + _CHUNK]
                self._decode([(token, start + i, 0, True) for i, token in enumerate(part)])
                targets = window[start + 1 : start + 1 + len(part)]
                scores += [_logprob(self._logits(i), target) for i, target in enumerate(targets)]
            result.append(scores)
        return result

    def floor(self, rows: int) -> None:
        return None

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {status}")

    def _likeliest(self, indices: Sequence[int]) -> list[int]:
        return [int(self._logits(index).argmax()) for index in indices]

    def _logits(self, index: int) -> np.ndarray:
        """[vocabulary] fp32 of the row in the last call; -1 is the last that wanted them. Valid until the next call."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, index), shape=(self._vocabulary,))

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)


def _logprob(logits: np.ndarray, token: int) -> float:
    highest = float(logits.max())
    return float(logits[token]) - highest - math.log(float(np.exp(logits - highest).sum(dtype=np.float64)))


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    """llama.cpp tells its whole configuration at every start."""


def create() -> LlamaCpp:
    return LlamaCpp()
