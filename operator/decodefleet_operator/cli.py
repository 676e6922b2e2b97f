"""The `decodefleet` command. Its subcommands are entry points, so that each package brings its own and none is loaded in vain."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version

GROUP = "decodefleet.commands"
ORDER = ("up", "down", "generate", "get", "describe", "scale", "bench", "operator", "crd")

_ABOUT = "Runs managed decoding fleets: on this machine with `decodefleet up`, on Kubernetes with `decodefleet operator`."


def commands() -> dict[str, EntryPoint]:
    """The installed subcommands by name, the everyday ones first."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    rank = {name: i for i, name in enumerate(ORDER)}
    return {name: found[name] for name in sorted(found, key=lambda name: (rank.get(name, len(rank)), name))}


def parser(points: dict[str, EntryPoint], chosen: str | None) -> argparse.ArgumentParser:
    """The command line. With `chosen` only that subcommand is loaded."""
    top = argparse.ArgumentParser(prog="decodefleet", description=_ABOUT, epilog="`decodefleet COMMAND --help` tells more of each.")
    top.add_argument("--version", action="version", version=f"decodefleet {version('decodefleet')}")
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    for name, point in points.items():
        if chosen not in (None, name):
            continue
        try:
            add: Callable[[argparse.ArgumentParser], None] = point.load()
        except ImportError as error:
            if chosen == name:
                raise
            subparsers.add_parser(name, help=f"not available: {error}", add_help=False)
            continue
        about = inspect.cleandoc(add.__doc__ or "")
        summary = about.splitlines()[0].rstrip(".") if about else ""
        add(subparsers.add_parser(name, help=summary, description=about, formatter_class=argparse.RawDescriptionHelpFormatter))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit status. 2 is a wrong command line, 1 a failure that was reported."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    points = commands()
    first = arguments[0] if arguments else None
    if first is None:
        parser(points, None).print_help()
        return 2
    if first not in points and not first.startswith("-"):
        close = difflib.get_close_matches(first, points, n=1)
        hint = f"; did you mean `decodefleet {close[0]}`?" if close else ""
        print(f"decodefleet: there is no command {first!r}{hint}\ncommands: {', '.join(points)}", file=sys.stderr)
        return 2
    try:
        parsed = parser(points, first if first in points else None).parse_args(arguments)
        return parsed.run(parsed)
    except ImportError as error:
        print(f"decodefleet {first}: {error}; install what it needs with `pip install 'decodefleet[operator,agent]'`", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not try to flush it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
