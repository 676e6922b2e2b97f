"""The agent's command line: reads its configuration, runs the server process, and turns failures into exit codes."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from pydantic import ValidationError

from decodefleet.config import AgentConfig

_TERMINATION_LOG = Path("/dev/termination-log")
_REQUEST_LOG = "DECODEFLEET_REQUEST_LOG"  # for pods, whose configuration is the operator's
_BAD_CONFIG, _FAILED = 2, 1


def main(argv: list[str] | None = None, engine: tuple[str, ...] | None = None) -> int:
    """0 after a drain, 1 if the agent failed, 2 if it cannot start as it is configured. `engine` is another engine's command line."""
    parser = argparse.ArgumentParser(prog="decodefleet-agent", description="Serves one model over gRPC.")
    parser.add_argument("--config", metavar="FILE", help="JSON of AgentConfig; without it the variable DECODEFLEET_CONFIG holds the JSON")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        config = read_config(arguments.config)
    except ValueError as error:
        return _complain(str(error), _BAD_CONFIG)

    from decodefleet_agent.server.engine_link import ENGINE
    from decodefleet_agent.server.errors import StartupError
    from decodefleet_agent.server.service import Failure, Service

    async def run() -> None:
        await Service(config, engine or ENGINE).run()

    try:
        asyncio.run(run())
    except StartupError as error:
        return _complain(str(error), _BAD_CONFIG)
    except Failure as error:
        return _complain(str(error), _FAILED)
    return 0


def read_config(path: str | None) -> AgentConfig:
    """From the file, or from DECODEFLEET_CONFIG. Raises ValueError whose message names the field."""
    where = path or "DECODEFLEET_CONFIG"
    if path is not None:
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    else:
        text = os.environ.get("DECODEFLEET_CONFIG", "")
        if not text:
            raise ValueError("there is no configuration: pass --config FILE, or set DECODEFLEET_CONFIG to its JSON")
    try:
        config = AgentConfig.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'the text'}: {item['msg']}" for item in error.errors())
        raise ValueError(f"{where} is not a valid configuration: {problems}") from error
    log = config.request_log or os.environ.get(_REQUEST_LOG)
    return config.model_copy(update={"request_log": log})


def _complain(message: str, code: int) -> int:
    """To a person at stderr, and to the pod's status where there is one."""
    print(f"decodefleet-agent: {message}", file=sys.stderr)
    if os.access(_TERMINATION_LOG, os.W_OK):
        _TERMINATION_LOG.write_text(message)
    return code


if __name__ == "__main__":
    sys.exit(main())
