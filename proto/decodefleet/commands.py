"""The client's part of the `decodefleet` command."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

    from decodefleet.client import Result

_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")


def generate(parser: argparse.ArgumentParser) -> None:
    """Send a prompt to a fleet and stream its answer to standard output."""
    parser.add_argument("prompt", metavar="PROMPT", help="what to say to the model; - reads it from standard input")
    parser.add_argument("--endpoint", metavar="HOST:PORT", help="a fleet or an agent; default: the fleet that runs on this machine")
    parser.add_argument("--fleet", metavar="NAME", help="which of this machine's fleets")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer; default: 256")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token; default: 0")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens that together reach P")
    parser.add_argument("--min-p", type=float, metavar="P", help="drop tokens less likely than P times the likeliest")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this time")
    parser.add_argument("--stats", action="store_true", help="print tokens, times and seed to standard error at the end")
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    from decodefleet.endpoints import NoEndpoint, local_endpoint

    try:
        endpoint = args.endpoint or local_endpoint(args.fleet)
    except NoEndpoint as error:
        return _complain(str(error))
    if args.raw and args.system:
        return _complain("--system needs the chat template; leave --raw out", code=2)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    messages = [("system", args.system)] if args.system else []
    return _stream(endpoint, prompt if args.raw else [*messages, ("user", prompt)], args)


def _stream(endpoint: str, prompt: str | list[tuple[str, str]], args: argparse.Namespace) -> int:
    import grpc

    from decodefleet.client import Client, Result, build_request

    result = Result()
    with Client(endpoint) as client:
        try:
            request = build_request(prompt, **{name: getattr(args, name) for name in _SAMPLING})
        except (ValueError, TypeError) as error:
            return _complain(f"the request cannot be built: {error}", code=2)
        try:
            for response in client.stream(request, timeout=args.timeout, result=result):
                sys.stdout.write("".join(delta.text for delta in response.deltas))
                sys.stdout.flush()
        except KeyboardInterrupt:
            print()
            return 130
        except grpc.RpcError as error:
            if result.texts:
                print()
            return _complain(_explain(error, endpoint))
        print()
        if args.stats and result.usage is not None:
            print(_stats(result), file=sys.stderr)
    return 0


def _stats(result: Result) -> str:
    usage = result.usage
    assert usage is not None
    rate = (usage.completion_tokens - 1) / usage.decode_time if usage.decode_time > 0 else None
    speed = "" if rate is None else f" ({rate:.1f} tok/s)"
    return (
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_prompt_tokens} cached), answer {usage.completion_tokens}{speed}; "
        f"first token after {usage.time_to_first_token:.2f} s, seed {result.seed}, retries {result.retries}"
    )


def _explain(error: grpc.RpcError, endpoint: str) -> str:
    import grpc

    details = error.details() or ""
    match error.code():
        case grpc.StatusCode.UNAVAILABLE if "failed to connect" in details.lower() or "connection refused" in details.lower():
            return f"nothing answers at {endpoint}; is the fleet running? (`decodefleet get`)"
        case grpc.StatusCode.UNAVAILABLE:
            return f"the fleet at {endpoint} cannot serve now: {details}"
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return f"the fleet is busy: {details}; try again later, or raise maxReplicas"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return "the time given by --timeout passed"
        case grpc.StatusCode.INVALID_ARGUMENT:
            return f"the fleet refuses the request: {details}"
        case grpc.StatusCode.UNIMPLEMENTED:
            return f"{endpoint} is not a decodefleet endpoint, or an older one: {details}"
        case code:
            return f"{code.name}: {details}"


def _complain(message: str, code: int = 1) -> int:
    print(f"decodefleet generate: {message}", file=sys.stderr)
    return code
