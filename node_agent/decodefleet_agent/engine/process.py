"""The engine process: load, warm up, then take commands and make steps until the server closes the channel."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

from decodefleet.config import AgentConfig
from decodefleet_agent.channel import Channel, ChannelClosed, decode_commands, encode
from decodefleet_agent.engine.engine import Engine, Step
from decodefleet_agent.engine.startup import start
from decodefleet_agent.messages import Failed, Output, StepResult, Stop
from decodefleet_agent.model_files import ModelError

log = logging.getLogger(__name__)

_SWITCH = 0.0002  # seconds for which the helper may keep Python from the loop, which has the next step to start


def main(fd: int) -> int:
    """Serves the server process at the other end of the socket `fd`. Returns the exit status."""
    # The server decides when the engine ends; a signal to the whole group must not cut streams that the server still drains.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH)
    channel = Channel(socket.socket(fileno=fd))
    try:
        _serve(channel)
    except ChannelClosed:
        log.info("the server closed the channel")
    finally:
        channel.close()
    return 0


def _serve(channel: Channel) -> None:
    started = time.monotonic()
    config = AgentConfig.model_validate_json(channel.receive_one())
    try:
        engine, ready = start(config, lambda message: channel.send(encode(message)), started)
    except ModelError as error:
        channel.send(encode(Failed(str(error))))
        return
    channel.send(encode(ready))
    channel.send(encode(StepResult([], engine.stats())))  # so that an agent without requests knows the sizes
    _steps(channel, engine)


def _steps(channel: Channel, engine: Engine) -> None:
    """Until the server says stop. Each step is told while the next one runs; the last one before the engine rests, at once."""
    tell: Callable[[], object] = _nothing
    while True:
        if not engine.busy:
            tell()
            tell = _nothing
        commands = [item for frame in channel.receive(wait=not engine.busy) for item in decode_commands(frame).items]
        if any(isinstance(item, Stop) for item in commands):
            return
        if commands:  # told before they change what it tells of
            tell()
            tell = _nothing
        outputs = engine.handle(item for item in commands if not isinstance(item, Stop))
        if engine.busy:
            tell = partial(_tell, channel, engine, engine.advance(tell), outputs)
        else:
            channel.send(encode(StepResult(outputs, engine.stats())))


def _nothing() -> None: ...


def _tell(channel: Channel, engine: Engine, step: Step, outputs: list[Output]) -> None:
    """`outputs`: of sequences that ended before the step."""
    result = engine.report(step)
    channel.send(encode(StepResult(outputs + result.outputs, result.stats)))
