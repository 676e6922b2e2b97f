"""The command line of local fleets. What the commands need is imported when one runs."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

Parser = argparse.ArgumentParser


def up(parser: Parser) -> None:
    """Start a fleet on this machine, or bring a running one in line with its file.

    Starts the agents of a DecoderDeployment as processes, waits until they are warm, and serves them at one address.
    Without --detach it stays in the foreground; Ctrl-C lets open streams end and leaves nothing behind.
    """
    parser.add_argument("-f", "--file", required=True, metavar="FILE", help="the DecoderDeployment, in YAML or JSON")
    parser.add_argument("-d", "--detach", action="store_true", help="return once the fleet is ready, and leave it running")
    parser.add_argument("--port", type=_port, default=50051, help="the fleet's port; 0 takes a free one (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    parser.add_argument("--timeout", type=_seconds, metavar="DURATION", help="give up when the fleet is not ready by then, such as 5m")
    parser.set_defaults(run=lambda args: _run("up", args))


def down(parser: Parser) -> None:
    """Stop a fleet of this machine, after its open streams have ended."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the fleet; may be left out if there is one")
    parser.add_argument("--timeout", type=_seconds, metavar="DURATION", help="how long open streams may go on; else drainTimeout")
    parser.set_defaults(run=lambda args: _run("down", args))


def get(parser: Parser) -> None:
    """List the fleets of this machine."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="one fleet; otherwise all")
    parser.add_argument("-o", "--output", choices=("wide", "json", "yaml"), help="more columns, or the resource itself")
    parser.set_defaults(run=lambda args: _run("get", args))


def describe(parser: Parser) -> None:
    """Show one fleet in full: conditions, service level, scaling decision, agents, events."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the fleet; may be left out if there is one")
    parser.set_defaults(run=lambda args: _run("describe", args))


def scale(parser: Parser) -> None:
    """Set the number of replicas of a fleet."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the fleet; may be left out if there is one")
    parser.add_argument("--replicas", type=_count, required=True, metavar="N", help="how many agents it shall have")
    parser.set_defaults(run=lambda args: _run("scale", args))


def _run(command: str, args: argparse.Namespace) -> int:
    from decodefleet_operator.local.home import FleetError

    try:
        return import_module(f"decodefleet_operator.local.{command}").run(args)
    except FleetError as error:
        message = str(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    print(f"decodefleet {command}: {message}", file=sys.stderr)
    return 1


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; write a number from 0 to 65535")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) > 10000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of replicas; write one from 0 to 10000")
    return int(text)


def _seconds(text: str) -> float:
    from decodefleet.units import parse_duration

    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
