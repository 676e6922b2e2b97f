"""OpenVINO GenAI: its continuous-batching pipeline, which reads GGUF files itself."""

from __future__ import annotations

import time

import numpy as np
import openvino
import openvino_genai as genai

from decodefleet_agent.bench.peers.converted import gguf_in
from decodefleet_agent.bench.protocol import Load, Loaded, Timing


class OpenVino:
    """See `Peer`."""

    def load(self, load: Load) -> Loaded:
        path, form, origin = gguf_in(load)
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = load.batch
        scheduler.max_num_batched_tokens = max(2048, load.batch)
        scheduler.enable_prefix_caching = False
        self._pipeline = genai.ContinuousBatchingPipeline(
            str(path), scheduler, "CPU", {"INFERENCE_NUM_THREADS": load.threads, "PERFORMANCE_HINT": "LATENCY"}
        )
        self._requests = 0
        return Loaded(genai.__version__, form, origin)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        settings = genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        begun = time.perf_counter()
        handles = [self._add(prompt, settings) for prompt in prompts]
        counts = [0] * len(handles)
        first, before = 0.0, 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    counts[index] += sum(len(output.generated_ids) for output in handle.read().values())
            if not first and all(counts):
                first, before = time.perf_counter() - begun, sum(counts)
        total = time.perf_counter() - begun
        if set(counts) != {new_tokens}:
            raise RuntimeError(f"{new_tokens} tokens were asked for, and the sequences have {sorted(set(counts))}")
        return Timing(first, total, sum(counts) - before)

    def logprobs(self, windows: list[list[int]]) -> list[list[float]]:
        """Those of an echoed prompt; its first token's is a placeholder."""
        settings = genai.GenerationConfig(max_new_tokens=0, echo=True, logprobs=1, do_sample=False)
        result = []
        for window in windows:
            handle = self._add(window, settings)
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            scores = [score for output in handle.read().values() for score in output.generated_log_probs]
            if len(scores) != len(window):
                raise RuntimeError(f"{len(scores)} log-probabilities came for a prompt of {len(window)} tokens")
            result.append(scores[1:])
        return result

    def _add(self, prompt: list[int], settings: genai.GenerationConfig) -> genai.GenerationHandle:
        self._requests += 1
        return self._pipeline.add_request(self._requests, openvino.Tensor(np.array([prompt], np.int64)), settings)

    def floor(self, rows: int) -> None:
        return None


def create() -> OpenVino:
    return OpenVino()
