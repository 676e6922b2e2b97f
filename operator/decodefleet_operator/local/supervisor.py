"""The process behind `decodefleet up`: operator, gateway and the agents' parent, until it is told to stop.

`python -m decodefleet_operator.local.supervisor FOLDER HOST PORT LOCK` where LOCK is the descriptor of the fleet's lock. It exits with 0
once everything is gone, the folder included, and with 1 after a failure that fleet.json and its log tell of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

from decodefleet.endpoints import host_port
from decodefleet_operator.agents import AgentClient, Sampler
from decodefleet_operator.conditions import timestamp
from decodefleet_operator.controller import Controller
from decodefleet_operator.gateway import CannotListen, Gateway
from decodefleet_operator.local import home
from decodefleet_operator.local.backend import LocalBackend
from decodefleet_operator.local.home import Fleet, Json
from decodefleet_operator.local.process import AgentProcess
from decodefleet_operator.logs import set_up
from decodefleet_operator.observation import Key, Load, PodView

log = logging.getLogger(__name__)

SAMPLE_EVERY = 0.5  # seconds; a machine has few agents
PUBLISH_EVERY = 0.2
KILL_AFTER = 5.0  # seconds beyond the grace that agents were given


class Supervisor:
    """Runs one fleet from the lock to the removal of its folder."""

    def __init__(self, fleet: Fleet, host: str, port: int) -> None:
        self._fleet = fleet
        self._host, self._port = host, port
        self._backend = LocalBackend(fleet)
        self._gateway = Gateway(self._backend.serving)
        self._client = AgentClient()
        self._sampler = Sampler(self._backend, self._client, interval=SAMPLE_EVERY)
        self._controller = Controller(self._backend, self._client, self._sampler)
        self._stop = asyncio.Event()
        self._info: Json = {"name": fleet.name, "pid": os.getpid(), "startedAt": home.now()}
        self._published: Json = {}

    async def run(self) -> None:
        """Returns when the fleet was stopped and nothing is left of it. Raises CannotListen."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        home.write(self._fleet.info, self._info)
        port = await self._gateway.start(self._host, self._port)
        self._backend.endpoint = host_port(self._host, port)
        self._info["endpoint"] = self._backend.endpoint
        home.write(self._fleet.info, self._info)
        self._sampler.observers += [self._backend.observe, self._observe]
        tasks = [asyncio.create_task(self._controller.run()), asyncio.create_task(self._publish())]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            await self._shut_down()
        finally:
            for task in (*tasks, stopped):
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.close()
        for result in results:
            if isinstance(result, Exception):
                raise result
        home.remove(self._fleet)

    async def _shut_down(self) -> None:
        """Nothing new is let in, open streams may end within the grace, and no process is left."""
        self._stop.clear()
        asked = home.read(self._fleet.stop) or {}
        known = self._backend.known(self._backend.key)
        grace = float(asked.get("timeout", known.resource.spec.drain_timeout if known else 0.0))
        log.info("stopping", extra={"grace": grace, "streams": self._gateway.in_flight()})
        self._info["stopping"] = True
        with contextlib.suppress(FileNotFoundError):
            home.write(self._fleet.info, self._info)
        closing = asyncio.gather(self._gateway.stop(grace), self._backend.close(grace + KILL_AFTER))
        again = asyncio.create_task(self._hurry())
        await closing
        again.cancel()

    async def _hurry(self) -> None:
        """A second signal ends the wait for open streams."""
        await self._stop.wait()
        log.info("stopping at once")
        await asyncio.gather(self._gateway.stop(0.0), self._backend.close(0.0))

    def _observe(self, key: Key, pod: PodView, load: Load | None) -> None:
        if load is not None and pod.address:
            self._gateway.observe(host_port(pod.address, pod.serving_port), load.running + load.waiting)

    async def _publish(self) -> None:
        """Keeps agents.json and the gateway in line with what runs. A fleet whose folder was removed stops."""
        while True:
            await self._gateway.refresh()
            state = self._state()
            if state != self._published:
                try:
                    home.write(self._fleet.agents, state)
                    self._published = state
                except FileNotFoundError:
                    log.error("the fleet's folder was removed", extra={"folder": str(self._fleet.path)})
                    self._stop.set()
                    return
                except OSError:
                    log.exception("the state cannot be written")
            await asyncio.sleep(PUBLISH_EVERY)

    def _state(self) -> Json:
        loads = self._sampler.loads(self._backend.key)
        processes = self._backend.processes()
        return {
            "agents": [_agent(pod, processes[pod.name], loads.get(pod.name)) for pod in self._backend.pods()],
            "gateway": {"open": self._gateway.in_flight(), "requests": self._gateway.requests, "retries": self._gateway.retries},
            "reconcile": {"overdue": round(self._controller.oldest_due()), "failures": self._controller.failures},
        }


def _agent(pod: PodView, process: AgentProcess, load: Load | None) -> Json:
    """What a person wants to know of an agent."""
    fresh = load if load is not None and time.time() - load.at < 10 and process.started_at and load.at > process.started_at else None
    return {
        "name": pod.name,
        "phase": _phase(pod, process, fresh),
        "pid": process.pid,
        "revision": pod.revision,
        "createdAt": pod.created_at,
        "startedAt": process.started_at,
        "readyAt": process.ready_at,
        "retryAt": process.retry_at,
        "restarts": process.restarts,
        "problem": _problem(process),
        "address": pod.address,
        "ports": [process.ports.serving, process.ports.control, process.ports.http] if process.ports else None,
        "running": fresh.running if fresh else None,
        "waiting": fresh.waiting if fresh else None,
        "generated": fresh.generated_tokens if fresh else None,
    }


def _problem(process: AgentProcess) -> str | None:
    if process.silent_since is not None:
        return f"it runs, but has not answered since {timestamp(process.silent_since)}"
    return process.problem


def _phase(pod: PodView, process: AgentProcess, load: Load | None) -> str:
    if process.exit_code is not None:
        return "Ended"
    if process.retry_at is not None:
        return "Restarting"
    if pod.deleted_at is not None or process.stopping:
        return "Stopping"
    if pod.draining_since is not None:
        return "Draining"
    if process.silent_since is not None:
        return "Silent"
    if load is None:
        return "Starting"
    serving = "Serving" if pod.serving else "Ready"
    return {"LOADING": "Loading", "WARMING_UP": "WarmingUp", "SERVING": serving, "DRAINING": "Draining"}.get(load.state, "Starting")


def main(arguments: list[str]) -> int:
    folder, host, port, lock = arguments
    os.set_inheritable(int(lock), False)  # agents must not keep the fleet's lock
    fleet = Fleet(Path(folder))
    set_up(json_lines=False)
    try:
        asyncio.run(_run(fleet, host, int(port)))
        return 0
    except CannotListen as error:
        _fail(fleet, str(error))
    except Exception as error:
        log.exception("the supervisor failed")
        _fail(fleet, f"the supervisor failed: {error!r}; its log is {fleet.log}")
    return 1


async def _run(fleet: Fleet, host: str, port: int) -> None:
    await Supervisor(fleet, host, port).run()


def _fail(fleet: Fleet, message: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        home.write(fleet.info, {**(home.read(fleet.info) or {}), "error": message})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
