"""The engine process: load, warm up, then take commands and make steps until the server closes the channel."""

from __future__ import annotations

import logging
import signal
import socket
import time

from decodefleet.config import AgentConfig
from decodefleet_agent.channel import Channel, ChannelClosed, decode_commands, encode
from decodefleet_agent.engine.startup import start
from decodefleet_agent.messages import Failed, Output, StepResult, Stop
from decodefleet_agent.model_files import ModelError

log = logging.getLogger(__name__)


def main(fd: int) -> int:
    """Serves the server process at the other end of the socket `fd`. Returns the exit status."""
    # The server decides when the engine ends; a signal to the whole group must not cut streams that the server still drains.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
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
    while True:
        commands = [item for frame in channel.receive(wait=not engine.busy) for item in decode_commands(frame).items]
        if any(isinstance(item, Stop) for item in commands):
            return
        outputs: list[Output] = engine.handle(item for item in commands if not isinstance(item, Stop))
        if engine.busy:
            result = engine.step()
            channel.send(encode(StepResult(outputs + result.outputs, result.stats)))
        elif commands:
            channel.send(encode(StepResult(outputs, engine.stats())))
