"""`make soak-engine`: random traffic on the native backend: arrivals, cancellations, stop tokens, long prompts, a pool that is short.

After every step the pool is checked for lost pages, and in the end each request's tokens against the same backend serving it alone, whole,
in an ample pool. Prints what went through, and fails at the first difference.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from decodefleet_agent.engine.backends.cpu import CpuBackend
from decodefleet_agent.engine.controllers.base import Decision, Limits, Situation
from decodefleet_agent.engine.controllers.static import static
from decodefleet_agent.engine.engine import Engine
from decodefleet_agent.engine.kv_pool import KVPool
from decodefleet_agent.engine.weights import load
from decodefleet_agent.messages import Cancel, Sampling, Submit

COUNTED = {
    "finished": "finished",
    "steps": "steps",
    "tokens": "tokens",
    "preemptions": "preemptions",
    "cached_prompt_tokens": "prompt tokens from the prefix cache",
}
VOCABULARY, CONTEXT = 211, 600
SCARCE, AMPLE = 60, 2 * CONTEXT // 16  # pages
SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2}


@dataclass
class Tally:
    """What went through."""

    steps: int = 0
    finished: int = 0
    preemptions: int = 0
    cached_prompt_tokens: int = 0
    tokens: int = 0
    cancelled: set[int] = field(default_factory=set)
    submits: dict[int, Submit] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)


def backend(folder: Path, threads: int) -> CpuBackend:
    """Of a small model of random weights, as int8."""
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, max_position_embeddings=CONTEXT, initializer_range=0.3, **SHAPE)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    made = CpuBackend(threads)
    made.prepare(load(folder), CONTEXT, lambda done, text: None)
    made.allocate(AMPLE)
    return made


def requests(chance: random.Random) -> Iterator[Submit]:
    """Many begin alike; some are long, some stop early."""
    common = [chance.randrange(VOCABULARY) for _ in range(CONTEXT)]
    number = 0
    while True:
        shared = chance.choice((0, 0, 16, 100, 256))
        own = [chance.randrange(VOCABULARY) for _ in range(chance.choice((1, 5, 40, 300)))]
        sampling = Sampling(
            seed=chance.getrandbits(32),
            temperature=chance.choice((0.0, 0.7, 1.5)),
            top_k=chance.choice((0, 0, 5)),
            top_p=chance.choice((1.0, 0.9)),
            repetition_penalty=chance.choice((1.0, 1.0, 1.2)),
            max_tokens=chance.choice((1, 8, 40)),
            stop_token_ids=tuple(chance.sample(range(VOCABULARY), chance.choice((0, 3)))),
        )
        yield Submit(number, common[:shared] + own, sampling, priority=chance.choice((0, 0, 1)))
        number += 1


def soak(served: CpuBackend, seconds: float, seed: int, batch: int = 6) -> Tally:
    """Traffic for so long, then until all is answered."""
    chance, tally = random.Random(seed), Tally()

    def cut_anywhere(situation: Situation) -> Decision:
        return Decision(situation.limits.most_running, chance.choice((1, 7, 16, 64, 300)))

    limits = Limits(max_batch=batch, max_batch_tokens=256, chunk="Dynamic", batch_size_threshold=4, whole_below=0, reserve_tokens=0)
    engine = Engine(served, limits, KVPool(SCARCE), 1, CONTEXT, VOCABULARY, cut_anywhere)
    arriving, until = requests(chance), time.monotonic() + seconds
    while time.monotonic() < until or engine.busy:
        commands: list[Submit | Cancel] = []
        if time.monotonic() < until and len(engine.sequences) < 2 * batch and chance.random() < 0.3:
            submit = next(arriving)
            tally.submits[submit.sequence_id], tally.outputs[submit.sequence_id] = submit, []
            commands.append(submit)
        if engine.sequences and chance.random() < 0.03:
            commands.append(Cancel(chance.choice(list(engine.sequences))))
            tally.cancelled.add(commands[-1].sequence_id)
        engine.handle(commands)
        for output in engine.step().outputs:
            if output.finish == "error":
                raise SystemExit(f"request {output.sequence_id} failed: {output.error}")
            tally.outputs[output.sequence_id] += output.token_ids
            tally.finished += output.finish is not None
        engine.check_integrity()
        tally.steps += 1
    stats = engine.stats()
    if stats.kv_bytes_used:
        raise SystemExit(f"{stats.kv_bytes_used} pages are held when nothing runs")
    tally.preemptions, tally.cached_prompt_tokens, tally.tokens = stats.preemptions, stats.cached_prompt_tokens, stats.generated_tokens
    return tally


def compare(served: CpuBackend, tally: Tally) -> None:
    """Each request alone; of a cancelled one, as far as it came."""
    limits = Limits(max_batch=1, max_batch_tokens=CONTEXT, chunk=None, batch_size_threshold=8, whole_below=0)
    for number, submit in tally.submits.items():
        engine = Engine(served, limits, KVPool(AMPLE), 1, CONTEXT, VOCABULARY, static)
        engine.handle([submit])
        alone: list[int] = []
        while engine.busy:
            alone += [token for output in engine.step().outputs for token in output.token_ids]
        got = tally.outputs[number]
        if got != alone[: len(got)] or (len(got) < len(alone) and number not in tally.cancelled):
            raise SystemExit(f"request {number} differs: {got}\nalone: {alone}\n{submit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        served = backend(Path(folder), arguments.threads)
    begun = time.monotonic()
    round_seconds = min(30.0, arguments.seconds)
    totals = dict.fromkeys(COUNTED, 0)
    cancelled = 0
    while time.monotonic() - begun < arguments.seconds:
        tally = soak(served, round_seconds, arguments.seed + totals["steps"])
        compare(served, tally)
        totals = {name: count + getattr(tally, name) for name, count in totals.items()}
        cancelled += len(tally.cancelled)
    print(
        f"{served.instructions}: {cancelled} requests cancelled, " + ", ".join(f"{totals[name]} {words}" for name, words in COUNTED.items())
    )
    print("no page was lost, and no token differs")


if __name__ == "__main__":
    main()
