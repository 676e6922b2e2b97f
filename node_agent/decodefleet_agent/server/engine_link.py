"""The engine's process as the server sees it: commands out, and each step's outputs to the inboxes of their sequences."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
from collections.abc import Callable

from decodefleet.config import AgentConfig
from decodefleet_agent import channel
from decodefleet_agent.messages import Cancel, Commands, Failed, Output, Progress, Ready, Stats, StepResult, Stop, Submit, Targets

log = logging.getLogger(__name__)

ENGINE = (sys.executable, "-m", "decodefleet_agent.engine")
_STOP_PATIENCE = 2.0  # seconds that an engine without work gets to end by itself
_EXIT_PATIENCE = 10.0  # seconds from the end of its channel to its exit code


class EngineDied(Exception):
    """The engine's process ended, or said that it cannot start; the message is for a person."""


class Inbox:
    """Outputs of one request's sequences, in order, until it is closed or failed. One task takes them.

    `interval`: seconds after one `take` for which the next waits, unless a sequence ends.
    """

    def __init__(self, interval: float = 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._interval = interval
        self._due = 0.0  # on the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._outputs: list[Output] = []
        self._error: Exception | None = None
        self._ready = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        self._outputs.append(output)
        if not self._interval or output.finish:
            self._wake()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due, self._wake)

    def fail(self, error: Exception) -> None:
        """The request ends with the error once what came before is taken."""
        self._error = self._error or error
        self._wake()

    async def take(self) -> list[Output]:
        """All that is there, at least one output. Raises what `fail` was given."""
        if not self._ready:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._ready = self._error is not None
        if self._interval:
            self._due = self._loop.time() + self._interval
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        outputs, self._outputs = self._outputs, []
        if self._error is not None and not outputs:
            raise self._error
        return outputs

    def _wake(self) -> None:
        self._ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineLink:
    """Owns the engine's process. The callbacks run in the event loop, in the order of the engine's messages."""

    def __init__(
        self,
        config: AgentConfig,
        command: tuple[str, ...],
        *,
        on_progress: Callable[[Progress], None],
        on_ready: Callable[[Ready], None],
        on_stats: Callable[[Stats], None],
    ) -> None:
        self._config, self._command = config, command
        self._on_progress, self._on_ready, self._on_stats = on_progress, on_ready, on_stats
        self._inboxes: dict[int, Inbox] = {}
        self._ids = itertools.count(1)
        self._pending: list[Submit | Cancel | Targets | Stop] = []
        self._wanted = asyncio.Event()
        self._ready = False
        self._channel: channel.AsyncChannel | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Starts the engine and serves it until it ends; always raises EngineDied."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, str(theirs.fileno()), pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._channel = await channel.AsyncChannel.open(ours)
        sender = asyncio.create_task(self._send_commands(self._channel))
        reason: Exception
        try:
            await self._receive(self._channel)
        except EngineDied as error:
            reason = error
        except channel.ChannelClosed:
            reason = EngineDied(f"the engine's process ended with {_describe(await self._wait(_EXIT_PATIENCE))}")
        finally:
            sender.cancel()
        for inbox in self._inboxes.values():
            inbox.fail(reason)
        raise reason

    async def _receive(self, link: channel.AsyncChannel) -> None:
        while True:
            message = channel.decode_engine_message(await link.receive_one())
            match message:
                case StepResult():
                    for output in message.outputs:
                        self._deliver(output)
                    self._on_stats(message.stats)
                case Ready():
                    self._ready = True
                    self._on_ready(message)
                case Progress():
                    self._on_progress(message)
                case Failed():
                    raise EngineDied(message.message)

    def _deliver(self, output: Output) -> None:
        inbox = self._inboxes.get(output.sequence_id)
        if inbox is None:  # cancelled while the step ran
            return
        if output.finish is not None:
            del self._inboxes[output.sequence_id]
        inbox.put(output)

    def next_id(self) -> int:
        return next(self._ids)

    def submit(self, submit: Submit, inbox: Inbox) -> None:
        self._inboxes[submit.sequence_id] = inbox
        self._send(submit)

    def cancel(self, sequence_id: int) -> None:
        """No more of the sequence is delivered. Without effect once it ended."""
        if self._inboxes.pop(sequence_id, None) is not None:
            self._send(Cancel(sequence_id))

    def keep(self, targets: Targets) -> None:
        """Latencies that the engine keeps from now on; also before it is ready."""
        self._send(targets)

    def fail_all(self, error: Exception) -> None:
        """Ends every open request with the error and frees its sequences."""
        for sequence_id, inbox in list(self._inboxes.items()):
            inbox.fail(error)
            self.cancel(sequence_id)

    async def stop(self) -> None:
        """Ends the engine's process, by force if it does not listen."""
        if self._process is None:
            return
        if self._channel is not None:
            with contextlib.suppress(channel.ChannelClosed):  # it ended by itself
                await self._channel.send(channel.encode(Commands([Stop()])))
            await self._channel.close()
        await self._wait(_STOP_PATIENCE if self._ready else 0.0)

    async def _wait(self, patience: float) -> int:
        assert self._process is not None
        try:
            return await asyncio.wait_for(self._process.wait(), patience)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                self._process.kill()
            return await self._process.wait()

    def _send(self, command: Submit | Cancel | Targets) -> None:
        self._pending.append(command)
        self._wanted.set()

    async def _send_commands(self, link: channel.AsyncChannel) -> None:
        """Commands of one turn of the loop go out as one message, and reach the engine before one step."""
        try:
            await link.send(self._config.model_dump_json(by_alias=True).encode())
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                commands, self._pending = self._pending, []
                await link.send(channel.encode(Commands(commands)))
        except channel.ChannelClosed:
            return  # the receiving side notices too, and tells why


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
