"""`make bench-streaming`: decode throughput that clients see over gRPC, against that of the engine alone, all on the same two cores.

Fails if it is more than 15 % lower with a message for each token or more than 10 % lower with tokens that share messages; if the loop
keeps the backend from more than 5 % of the time; or if two agents with a thread each bring less than 80 % of one with both cores.
Rounds take turns; figures are medians, ratios those of each round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from local_agent import MODEL, running_agent

from decodefleet.client import AsyncClient, build_request
from decodefleet_agent.bench.peers.ours import Decodefleet
from decodefleet_agent.bench.protocol import Load

_PROMPT = 64  # tokens
_INTERVAL = 0.05  # seconds between messages where tokens share them


async def streamed(port: int, prompts: list[list[int]], new_tokens: int, interval: float) -> tuple[float, float, float]:
    """Tokens per second of all streams after the last of them had its first; seconds to the median first token, and to the last of all."""
    arrivals: list[tuple[float, int]] = []
    firsts: list[float] = []

    async def one(client: AsyncClient, prompt: list[int]) -> None:
        request = build_request(prompt, max_tokens=new_tokens, ignore_eos=True, message_interval=interval)
        seen = False
        async for response in client.stream(request):
            if count := sum(len(delta.token_ids) for delta in response.deltas):
                arrivals.append((time.perf_counter(), count))
                if not seen:
                    seen = True
                    firsts.append(arrivals[-1][0])
        if not seen:
            raise SystemExit("a stream ended without a token")

    async with AsyncClient(f"127.0.0.1:{port}") as client:
        await client.model()
        begun = time.perf_counter()
        await asyncio.gather(*(one(client, prompt) for prompt in prompts))
    if sum(count for _, count in arrivals) != len(prompts) * new_tokens:
        raise SystemExit("tokens were lost")
    start = max(firsts)
    return sum(count for at, count in arrivals if at > start) / (max(arrivals)[0] - start), median(firsts) - begun, max(arrivals)[0] - begun


def backend_seconds(port: int) -> float:
    """Of the agent's engine, since its start."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("decodefleet_backend_seconds_total ")))


class Bench:
    """An engine in this process, an agent with all cores, and two agents that share them."""

    def __init__(self, stack: ExitStack, arguments: argparse.Namespace, cores: int) -> None:
        self.tokens, self.batch = arguments.tokens, arguments.batch
        self._random = np.random.default_rng(3)
        context = _PROMPT + self.tokens + 16
        engine = {"batching": {"maxBatch": self.batch, "batchSizeThreshold": 1}, "maxContext": context}
        self.alone = Decodefleet()
        self.alone.load(Load(arguments.model, "", "", "", threads=cores, batch=self.batch, context=context))
        self.agent = stack.enter_context(running_agent(arguments.model, engine, cpu=str(cores)))
        self.pair = [stack.enter_context(running_agent(arguments.model, engine, cpu=str(cores // 2))) for _ in range(2)]

    def prompts(self, count: int) -> list[list[int]]:
        return [self._random.integers(100, 40_000, _PROMPT).tolist() for _ in range(count)]

    def engine(self) -> float:
        """Tokens per second without a server."""
        timing = self.alone.generate(self.prompts(self.batch), self.tokens)
        return timing.rest / (timing.total - timing.first)

    def stream(self, interval: float) -> tuple[float, float, float]:
        """Tokens per second, time to first token, and the backend's share of the time."""
        before = backend_seconds(self.agent["http"])
        rate, first, elapsed = asyncio.run(streamed(self.agent["serving"], self.prompts(self.batch), self.tokens, interval))
        return rate, first, (backend_seconds(self.agent["http"]) - before) / elapsed

    def together(self) -> float:
        """Tokens per second of two agents, each with a full batch."""

        async def both() -> list[tuple[float, float, float]]:
            return await asyncio.gather(*(streamed(p["serving"], self.prompts(self.batch), self.tokens, _INTERVAL) for p in self.pair))

        return sum(rate for rate, _, _ in asyncio.run(both()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slack", type=float, default=1.0, help="multiplies what may be lost: for machines that are shared")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    with ExitStack() as stack:
        bench = Bench(stack, arguments, len(cores))
        steps: dict[str, Callable[[], tuple[float, ...]]] = {
            "engine alone": lambda: (bench.engine(),),
            "a message for each token": lambda: bench.stream(0.0),
            f"a message each {_INTERVAL * 1000:.0f} ms": lambda: bench.stream(_INTERVAL),
            "two agents": lambda: (bench.together(),),
        }
        rounds: dict[str, list[tuple[float, ...]]] = {name: [] for name in steps}
        for number in range(-1, arguments.rounds):
            for name in list(steps)[:: 1 if number % 2 else -1]:
                figures = steps[name]()
                if number >= 0:  # the first round is not counted
                    rounds[name].append(figures)
                    print(f"{name}: {figures[0]:.1f} tokens/s " + " ".join(f"{figure:.3f}" for figure in figures[1:]), flush=True)
    return judge(rounds, arguments.slack)


def judge(rounds: dict[str, list[tuple[float, ...]]], slack: float) -> int:
    alone, each, shared, pair = ([figures[0] for figures in made] for made in rounds.values())
    paced, first = ([figures[2] for figures in made] for made in list(rounds.values())[1:3])
    figures = [
        ("a message for each token, of the engine alone", 0.15, [b / a for a, b in zip(alone, each, strict=True)]),
        ("tokens that share messages, of the engine alone", 0.10, [b / a for a, b in zip(alone, shared, strict=True)]),
        ("the backend's share of the time, a message for each token", 0.05, paced),
        ("the backend's share of the time, shared messages", 0.05, first),
        ("two agents, of one", 0.20, [b / a for a, b in zip(shared, pair, strict=True)]),
    ]
    failed = False
    for name, lost, values in figures:
        ratio, limit = median(values), 1 - lost * slack
        failed |= ratio < limit
        print(f"{name}: {ratio:.3f}, at least {limit:.3f} {'FAILED' if ratio < limit else 'ok'} ({min(values):.3f} to {max(values):.3f})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
