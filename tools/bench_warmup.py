"""`make bench-warmup`: the time to first token of the first request after SERVING, against that of the requests that follow.

Starts an agent several times, and fails if the median of first / steady exceeds 1.1. The client's connection is up before.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import numpy as np
from local_agent import MODEL, running_agent

from decodefleet.client import Client, build_request

LIMIT = 1.1


def measure(model: str, requests: int, prompt: int, seed: int) -> tuple[float, float]:
    """Seconds of the first request of an agent, and the median of those after it, one at a time."""
    with (
        running_agent(model, {"batching": {"maxBatch": 16}, "maxContext": 2048}) as ports,
        Client(f"127.0.0.1:{ports['serving']}") as client,
    ):
        client.model()
        random = np.random.default_rng(seed)
        times = [_first_token(client, random.integers(100, 40_000, prompt).tolist()) for _ in range(requests)]
    return times[0], median(times[1:])


def _first_token(client: Client, prompt: list[int]) -> float:
    started = time.monotonic()
    for response in client.stream(build_request(prompt, max_tokens=4, ignore_eos=True)):
        if any(delta.token_ids for delta in response.deltas):
            first = time.monotonic()
            break
    else:
        raise SystemExit("the stream ended without a token")
    return first - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--requests", type=int, default=12, help="of each start")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each request's prompt")
    parser.add_argument("--slack", type=float, default=1.0, help="multiplies the limit: for machines that are shared")
    arguments = parser.parse_args()
    ratios = []
    for seed in range(arguments.starts):
        first, steady = measure(arguments.model, arguments.requests, arguments.prompt, seed)
        ratios.append(first / steady)
        print(f"first {first * 1000:.1f} ms, steady {steady * 1000:.1f} ms, ratio {ratios[-1]:.3f}")
    ratio, limit = median(ratios), LIMIT * arguments.slack
    print(f"first request's time to first token: {ratio:.3f} of the steady one, limit {limit:.3f} {'FAILED' if ratio > limit else 'ok'}")
    return int(ratio > limit)


if __name__ == "__main__":
    sys.exit(main())
