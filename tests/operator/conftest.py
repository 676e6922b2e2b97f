"""A control plane for the session, a namespace for each test."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# The helpers beside this file. A package here would shadow the standard library's `operator`.
sys.path.insert(0, str(Path(__file__).parent))

from control_plane import ControlPlane, missing
from harness import configuration
from kube import Kube, eventually
from proxy import Proxy, proxy

from decodefleet_operator.cluster.client import ApiClient, ApiError, object_path
from decodefleet_operator.cluster.resources import installed
from decodefleet_operator.crd import crd

SETUP = "go install sigs.k8s.io/controller-runtime/tools/setup-envtest@latest && export KUBEBUILDER_ASSETS=$(setup-envtest use -p path)"


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    if absent := missing():
        pytest.skip(f"no {', '.join(absent)} in KUBEBUILDER_ASSETS or on PATH; get them with: {SETUP}")
    plane = ControlPlane(tmp_path_factory.mktemp("control-plane"))
    try:
        plane.start()
        asyncio.run(_install(plane))
        plane.start_controller_manager()  # after the CRD, so that the garbage collector knows it at once
        yield plane
    finally:
        plane.stop()


async def _install(plane: ControlPlane) -> None:
    async with ApiClient(configuration(plane.url, plane.token)) as api:
        await api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd())
        await asyncio.wait_for(installed(api), 60)


@pytest.fixture
def controller_manager(control_plane: ControlPlane) -> ControlPlane:
    """For tests of what Kubernetes does with what belongs to a deleted object."""
    if not control_plane.has_controller_manager:
        pytest.skip(f"no kube-controller-manager in KUBEBUILDER_ASSETS or on PATH, which collects what a deleted object owned; {SETUP}")
    return control_plane


@pytest.fixture
async def kube(control_plane: ControlPlane) -> AsyncIterator[Kube]:
    """A namespace of its own, as an administrator."""
    name = f"t-{secrets.token_hex(4)}"
    async with ApiClient(configuration(control_plane.url, control_plane.token)) as api:
        await api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

        async def served() -> bool:  # a schema that was just installed takes a moment
            await api.get(object_path("decodefleet.dev/v1alpha1", "decoderdeployments", name))
            return True

        await eventually(served, "the resource is served")
        yield Kube(api, name)
        with suppress(ApiError):
            await api._send("DELETE", f"/api/v1/namespaces/{name}", {}, None, None)


@pytest.fixture
async def api_proxy(control_plane: ControlPlane) -> AsyncIterator[Proxy]:
    async with proxy(control_plane.url, control_plane.token) as made:
        yield made
