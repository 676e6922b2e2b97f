"""The load of the end-to-end tests: a plain round_robin gRPC client that prints one JSON line per request; runs as a Job."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from dataclasses import asdict, dataclass, field

import grpc

from decodefleet.v1 import decoding_pb2, decoding_pb2_grpc

PROMPTS = (
    "Once upon a time, in a village by the sea,",
    "The three most important things about rivers are",
    "Dear colleagues, I am writing to tell you that",
    "def fibonacci(n):\n    ",
)
MAX_RETRIES = 5  # more than a request may need; the tests count them


@dataclass
class Result:
    """One request as its caller saw it. Times are Unix seconds; `ttft` is in seconds, of the last attempt."""

    id: str
    prompt: int
    max_tokens: int
    started: float
    outcome: str = "ok"  # or the gRPC status; CUT if the stream broke after its first message
    detail: str = ""
    retries: int = 0
    attempt_started: float = 0.0
    ttft: float | None = None
    finished: float = 0.0
    instance: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    completion_tokens: int | None = None


async def request(stub: decoding_pb2_grpc.DecodingStub, name: str, prompt: int, max_tokens: int, deadline: float | None) -> Result:
    """Sends one request; tries again, as often as MAX_RETRIES, while an agent that leaves turns it away before its first message."""
    result = Result(id=name, prompt=prompt, max_tokens=max_tokens, started=time.time())
    sampling = decoding_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True)
    message = decoding_pb2.GenerateRequest(prompt=PROMPTS[prompt], sampling=sampling, request_id=name)
    while True:
        result.attempt_started, clock = time.time(), time.monotonic()
        try:
            async for response in stub.Generate(message, timeout=deadline, wait_for_ready=True):
                if not result.instance and response.start.instance_id:
                    result.instance = response.start.instance_id
                    print(json.dumps({"begun": name, "instance": result.instance, "max_tokens": max_tokens}), flush=True)
                for delta in response.deltas:
                    if delta.token_ids and result.ttft is None:
                        result.ttft = time.monotonic() - clock
                    result.text += delta.text
                    result.token_ids += delta.token_ids
                if response.HasField("usage"):
                    result.completion_tokens = response.usage.completion_tokens
            break
        except grpc.aio.AioRpcError as error:
            begun = bool(result.instance or result.token_ids)
            if error.code() == grpc.StatusCode.UNAVAILABLE and not begun and result.retries < MAX_RETRIES:
                result.retries += 1
                await asyncio.sleep(0.1 * result.retries)
                continue
            result.outcome = "CUT" if error.code() == grpc.StatusCode.UNAVAILABLE and begun else error.code().name
            result.detail = error.details() or ""
            break
    result.finished = time.time()
    return result


def addresses(target: str) -> set[str]:
    """The addresses of a dns:///host:port target now."""
    host, _, port = target.removeprefix("dns:///").rpartition(":")
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)}
    except socket.gaierror:
        return set()


class Load:
    """Sends the `first` requests together and keeps `concurrency` more open, or sends bursts of that size, until the end is reached."""

    def __init__(self, stub: decoding_pb2_grpc.DecodingStub, args: argparse.Namespace) -> None:
        self.stub, self.args = stub, args
        self.sent = 0
        self.instances: set[str] = set()
        self.began = time.monotonic()

    async def one(self, max_tokens: int) -> None:
        number, self.sent = self.sent, self.sent + 1
        args = self.args
        # Every tenth request of a run with a deadline has it, so that some are late and most are not.
        deadline = args.deadline if args.deadline and number % 10 == 9 else None
        result = await request(self.stub, f"{args.name}-{number}", number % len(PROMPTS), max_tokens, deadline)
        if result.outcome == "ok":
            self.instances.add(result.instance)
        print(json.dumps(asdict(result)), flush=True)

    async def over(self) -> bool:
        args = self.args
        if time.monotonic() - self.began > args.timeout:
            raise TimeoutError(f"{self.sent} requests, answers of {len(self.instances)} agents; the end did not come in {args.timeout} s")
        if args.requests:
            return self.sent >= args.requests
        if args.until_instances:
            return len(self.instances) >= args.until_instances
        return len(await asyncio.to_thread(addresses, args.target)) <= args.until_addresses

    async def worker(self) -> None:
        while not await self.over():
            await self.one(self.args.max_tokens)
            await asyncio.sleep(self.args.pause)

    async def meet(self) -> None:
        """Asks until every replica has answered: round_robin shares out evenly only once all are connected."""
        while len(self.instances) < len(await asyncio.to_thread(addresses, self.args.target)):
            await self.one(self.args.max_tokens)

    async def burst(self) -> None:
        """As many requests at once as `concurrency`; those at the `long` places ask for more tokens."""
        args = self.args
        places = range(min(args.concurrency, args.requests - self.sent))
        start, stop = args.long
        await asyncio.gather(*(self.one(args.long_tokens if start <= place < stop else args.max_tokens) for place in places))

    async def run(self) -> None:
        args = self.args
        if args.first or args.bursts:
            await self.meet()
        if not args.bursts:
            first = [self.one(args.long_tokens) for _ in range(args.first)]
            await asyncio.gather(*first, *(self.worker() for _ in range(args.concurrency)))
            return
        while not await self.over():
            await self.burst()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between an answer and the next request")
    parser.add_argument("--first", type=int, default=0, help="long requests to begin with, together")
    parser.add_argument("--bursts", action="store_true")
    parser.add_argument("--long", type=int, nargs=2, default=(0, 0), metavar=("START", "STOP"), help="places of long requests in a burst")
    parser.add_argument("--long-tokens", type=int, default=16)
    parser.add_argument("--deadline", type=float)
    parser.add_argument("--timeout", type=float, default=300)
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--requests", type=int, help="with --bursts: about so many")
    end.add_argument("--until-instances", type=int)
    end.add_argument("--until-addresses", type=int)
    args = parser.parse_args()
    async with grpc.aio.insecure_channel(args.target, options=[("grpc.lb_policy_name", "round_robin")]) as channel:
        await Load(decoding_pb2_grpc.DecodingStub(channel), args).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
