"""The life of the agent: bind, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from pathlib import Path

from decodefleet.config import AgentConfig
from decodefleet.v1 import control_pb2_grpc, decoding_pb2_grpc
from decodefleet_agent import model_files
from decodefleet_agent.messages import Ready
from decodefleet_agent.server import ports
from decodefleet_agent.server.agent import Agent, Phase
from decodefleet_agent.server.control import AgentControl
from decodefleet_agent.server.decoding import Decoding
from decodefleet_agent.server.engine_link import EngineDied, EngineLink
from decodefleet_agent.server.errors import StartupError, unavailable
from decodefleet_agent.server.health import AGENT_CONTROL, DECODING, Health
from decodefleet_agent.server.probes import Probes
from decodefleet_agent.server.requests import ServedModel
from decodefleet_agent.text.errors import TextError
from decodefleet_agent.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

_LAST_WORDS = 2.0  # seconds in which ended streams get their status out
_LINGER = 2.0  # seconds, at most, between the end of admission and GOAWAY
_QUIET = 0.05
_POLL = 0.02


class Failure(Exception):
    """The agent ran and cannot go on; the message is for a person."""


class Service:
    """Owns servers, engine and agent state of one process. `engine` is the engine's command line, which gets its socket's number."""

    def __init__(self, config: AgentConfig, engine: tuple[str, ...]) -> None:
        self.config = config
        self.agent = Agent(config)
        self.health = Health()
        self.probes = Probes(self.agent)
        self.link = EngineLink(
            config, engine, on_progress=self.agent.observe_progress, on_ready=self._on_ready, on_stats=self.agent.observe_stats
        )
        self.serving, self.control = ports.serving_server(), ports.control_server()
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._terminate = asyncio.Event()
        self._cut_at = math.inf  # monotonic seconds from which open streams are cut
        self._drained: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until SIGTERM or SIGINT, then drains. Raises StartupError before anything was served, Failure if the engine died."""
        try:
            http = await self._start()
        except BaseException:
            await asyncio.gather(self.serving.stop(None), self.control.stop(None))
            raise
        engine = asyncio.create_task(self.link.run())
        load = asyncio.create_task(self._load())
        terminate = asyncio.create_task(self._terminate.wait())
        try:
            await self._until_terminated(engine, load, terminate)
            await self.drain(self.agent.drain_timeout)
            assert self._drained is not None
            await asyncio.wait([self._drained, engine], return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                await self._engine_died(engine)
        finally:
            for task in (load, terminate):
                task.cancel()
            await self.serving.stop(_LAST_WORDS)
            await self.link.stop()
            engine.cancel()
            await asyncio.gather(engine, load, terminate, return_exceptions=True)
            http.close()
            await self.control.stop(None)
            self.agent.log.close()

    async def _start(self) -> asyncio.Server:
        config = self.config
        decoding_pb2_grpc.add_DecodingServicer_to_server(Decoding(self.agent, self.link), self.serving)
        ports.add_common_services(self.serving, self.health, [DECODING])
        controlled = self._add_control()
        ports.add_common_services(self.control, self.health, [AGENT_CONTROL] if controlled else [])
        serving = ports.bind(self.serving, config.host, config.serving_port, config.tls, "servingPort")
        control = ports.bind(self.control, config.host, config.control_port, config.control_tls, "controlPort")
        try:
            http = await self.probes.start(config.host, config.http_port)
        except OSError as error:
            raise StartupError(f"httpPort: {config.host}:{config.http_port} cannot be bound: {error.strerror}") from error
        await self.health.start()
        await self.serving.start()
        await self.control.start()
        bound = {"serving": serving, "control": control, "http": http.sockets[0].getsockname()[1]}
        if config.ports_file is not None:
            ports.write_ports(config.ports_file, bound)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        log.info("listening serving=%(serving)d control=%(control)d http=%(http)d", bound)
        return http

    def _add_control(self) -> bool:
        """Whether AgentControl is served: only with a token, or with client certificates."""
        token, tls = self.config.control_token_file, self.config.control_tls
        if token is not None:
            try:
                empty = not Path(token).read_text().strip()
            except OSError as error:
                raise StartupError(f"controlTokenFile: {token} cannot be read: {error.strerror}") from error
            if empty:
                raise StartupError(f"controlTokenFile: {token} is empty; write the fleet's token into it")
        elif tls is None or tls.client_ca_file is None:
            log.warning("AgentControl is not served: set controlTokenFile, or controlTls with clientCaFile")
            return False
        control_pb2_grpc.add_AgentControlServicer_to_server(AgentControl(self.agent, token, self.drain, self.link.keep), self.control)
        return True

    def _on_signal(self) -> None:
        """Drains at the first signal; a second one is somebody who does not want to wait."""
        if self._terminate.is_set():
            self._cut_at = 0.0
        self._terminate.set()

    def _on_ready(self, ready: Ready) -> None:
        self.agent.observe_ready(ready)
        if not self._ready.done():
            self._ready.set_result(ready)

    async def _load(self) -> None:
        """The tokenizer beside the engine's weights; serves once both are there."""
        tokenizer = await asyncio.to_thread(_load_tokenizer, self.config.model_uri)
        ready = await self._ready
        self.agent.model = ServedModel(ready.model, tokenizer)
        self.agent.enter(Phase.SERVING)
        if self.agent.phase is Phase.SERVING:
            await self.health.serving()
            log.info("ready load_seconds=%.1f warm_up_seconds=%s", ready.load_seconds, ready.warm_up_seconds)

    async def _until_terminated(self, engine: asyncio.Task[None], load: asyncio.Task[None], terminate: asyncio.Task[bool]) -> None:
        waiting: set[asyncio.Task] = {engine, load, terminate}
        while not terminate.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if engine in done:
                await self._engine_died(engine)
            if load in done and (error := load.exception()) is not None:
                if isinstance(error, (TextError, model_files.ModelError)):
                    raise Failure(str(error)) from error
                raise error

    async def _engine_died(self, engine: asyncio.Task[None]) -> None:
        """Ends the streams and raises Failure. Their inboxes have been failed already."""
        self.probes.alive = False
        self.agent.told_to_go.set()
        self.agent.enter(Phase.DRAINING)
        await self.health.not_serving()
        await self._wait_until_idle(_LAST_WORDS)
        try:
            await engine
        except EngineDied as death:
            raise Failure(str(death)) from death

    async def drain(self, timeout: float) -> None:
        """Begins the drain: health first, then admission, then GOAWAY. Open streams get `timeout` seconds. Returns at once.

        Calling it again can only shorten the time.
        """
        self._cut_at = min(self._cut_at, time.monotonic() + timeout)
        if self._drained is not None:
            return
        await self.health.not_serving()
        self.agent.enter(Phase.DRAINING)
        if self._drained is None:
            self._drained = asyncio.create_task(self._finish(timeout))

    async def _finish(self, timeout: float) -> None:
        await self._wait_for_quiet()
        closing = asyncio.create_task(self.serving.stop(timeout + _LAST_WORDS))
        await asyncio.sleep(0)  # the stop has begun, and with it GOAWAY is on its way
        self.agent.told_to_go.set()
        while self.agent.in_flight and time.monotonic() < self._cut_at:
            await asyncio.sleep(_POLL)
        if self.agent.in_flight:
            log.warning("drain timed_out=true cut_sequences=%d", self.agent.in_flight)
            self.link.fail_all(unavailable("the agent's drain timeout passed; another replica can resume the stream", "draining"))
            await self._wait_until_idle(_LAST_WORDS)
        # Streams of health and reflection do not end by themselves.
        await self.serving.stop(_LAST_WORDS)
        await closing
        log.info("drained")

    async def _wait_for_quiet(self) -> None:
        """Stopping cancels the calls that gRPC holds and has not handed over yet; so it waits for a moment in which none came.

        Refused calls are kept until then, or their retries would never let it become quiet.
        """
        end = time.monotonic() + _LINGER
        seen = -1
        while seen != self.agent.calls and time.monotonic() < end:
            seen = self.agent.calls
            await asyncio.sleep(_QUIET)

    async def _wait_until_idle(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.agent.in_flight:
                    await asyncio.sleep(_POLL)


def _load_tokenizer(uri: str) -> Tokenizer:
    return load_tokenizer(model_files.resolve(uri))
