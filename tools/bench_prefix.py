"""`make bench-prefix`: decoding steps of sequences that share a prefix and its pages, against the same with a copy of the prefix for each.

Fails if a step with shared pages is less than 1.3 times as fast, or if its logits differ in a bit. The two take turns; the ratio is the
median of those of each round.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from statistics import median

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as the engine's own process has it

import numpy as np
from local_agent import MODEL

from decodefleet.config import AgentConfig, Batching, Engine
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS, pages_for
from decodefleet_agent.engine.startup import start

LIMIT = 1.3
_CHUNK = 512  # tokens of a prompt's step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=1024, help=f"tokens that all share, whole pages of {PAGE_TOKENS}")
    parser.add_argument("--own", type=int, default=64, help="tokens after the prefix that each sequence has of its own")
    parser.add_argument("--steps", type=int, default=20, help="of each kind in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--slack", type=float, default=1.0, help="divides the limit: for machines that are shared")
    arguments = parser.parse_args()
    if arguments.prefix % PAGE_TOKENS:
        parser.error(f"--prefix: a multiple of {PAGE_TOKENS}")
    batch, context = arguments.batch, arguments.prefix + arguments.own

    engine = Engine(batching=Batching(max_batch=batch), max_context=context + PAGE_TOKENS)
    config = AgentConfig(model_uri=arguments.model, cpu=arguments.threads, engine=engine)
    backend = start(config, lambda progress: None, time.monotonic())[0].backend
    each, shared_pages = pages_for(context + 1), arguments.prefix // PAGE_TOKENS
    random = np.random.default_rng(5)
    prefix = random.integers(100, 40_000, arguments.prefix)
    copies = [tuple(range(number * each, (number + 1) * each)) for number in range(batch)]
    for number, pages in enumerate(copies):
        prompt = np.concatenate([prefix, random.integers(100, 40_000, arguments.own)])
        for begin in range(0, context, _CHUNK):
            ids = prompt[begin : begin + _CHUNK]
            backend.step(Batch(ids, (Span(number, pages, begin, len(ids), samples=False),)))
    shared = [copies[0][:shared_pages] + pages[shared_pages:] for pages in copies]
    ids = random.integers(100, 40_000, batch)

    def step(tables: list[tuple[int, ...]]) -> np.ndarray:
        return backend.step(Batch(ids, tuple(Span(number, pages, context, 1, samples=True) for number, pages in enumerate(tables))))

    def seconds(tables: list[tuple[int, ...]]) -> float:
        begun = time.perf_counter()
        for _ in range(arguments.steps):
            step(tables)
        return (time.perf_counter() - begun) / arguments.steps

    with_copies = step(copies).copy()  # the next step writes its logits where these are
    same = np.array_equal(with_copies.view(np.uint32), step(shared).view(np.uint32))
    ratios = []
    for _ in range(arguments.rounds):
        copied, together = seconds(copies), seconds(shared)
        ratios.append(copied / together)
        print(f"copies {copied * 1000:.2f} ms a step, shared pages {together * 1000:.2f} ms, ratio {ratios[-1]:.3f}")
    ratio, limit = median(ratios), LIMIT / arguments.slack
    failed = ratio < limit or not same
    print(f"batch {batch}, prefix {arguments.prefix} and {arguments.own} tokens on {backend.name}, {arguments.threads} threads:")
    print(f"shared pages are {ratio:.3f} times as fast, limit {limit:.3f} {'FAILED' if ratio < limit else 'ok'}")
    print(f"logits: {'the same bit for bit' if same else 'other bits FAILED'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
