"""The operator inside the test's own event loop, and as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import kubernetes.client

from decodefleet_operator.agents import AgentClient, Sampler
from decodefleet_operator.cluster.backend import KubernetesBackend
from decodefleet_operator.cluster.client import ApiClient
from decodefleet_operator.controller import Controller

IMAGE = "localhost/agent:1"


def configuration(server: str, token: str | None = None) -> kubernetes.client.Configuration:
    made = kubernetes.client.Configuration()
    made.host = server
    made.verify_ssl = False
    if token is not None:
        # One of these is the key of the installed version.
        made.api_key = {"BearerToken": f"Bearer {token}", "authorization": f"Bearer {token}"}
    return made


class Operator:
    """Without lease and signals: what controls one namespace."""

    def __init__(self, api: ApiClient, namespace: str, **options: Any) -> None:
        self.backend = KubernetesBackend(api, namespace, options.pop("image", IMAGE), **options)
        self.client = AgentClient()
        self.controller = Controller(self.backend, self.client, Sampler(self.backend, self.client, interval=0.2))
        self.task = asyncio.create_task(self.controller.run())

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await self.client.close()


@asynccontextmanager
async def operator(server: str, namespace: str, token: str | None = None, timeout: float = 10.0, **options: Any) -> AsyncIterator[Operator]:
    async with ApiClient(configuration(server, token), timeout=timeout) as api:
        running = Operator(api, namespace, **options)
        try:
            yield running
            if running.task.done():
                running.task.result()
        finally:
            await running.stop()


@contextmanager
def process(kubeconfig: Path, namespace: str, log: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """`decodefleet operator`, ended by SIGKILL if it still runs."""
    command = [sys.executable, "-m", "decodefleet_operator.cli", "operator", "--namespace", namespace, "--agent-image", IMAGE]
    with log.open("ab") as output:
        made = subprocess.Popen(
            [*command, "--http-port", "0", *more], env={**os.environ, "KUBECONFIG": str(kubeconfig)}, stdout=output, stderr=output
        )
    try:
        yield made
    finally:
        if made.poll() is None:
            made.send_signal(signal.SIGKILL)
        made.wait()
