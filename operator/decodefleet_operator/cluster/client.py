"""The raw Kubernetes API over one aiohttp session, with the credentials of the pod or of KUBECONFIG."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import quote

import aiohttp
import kubernetes.client
import kubernetes.config

Object = dict[str, Any]
Counter = Callable[[str, int], None]  # verb, HTTP status

FIELD_MANAGER = "decodefleet-operator"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
METADATA_ONLY_WATCH = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"

_TIMEOUT = 10.0  # seconds for a request that is no watch
_TRIES = 4  # of a request that the server says is too many
_PAGE = 500


class ApiError(Exception):
    """The API server's answer was an error, or what stands for one."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after

    @classmethod
    def of(cls, answer: Object, status: int | None = None, retry_after: float | None = None) -> ApiError:
        """From a Status object."""
        return cls(status or int(answer.get("code", 500)), answer.get("reason", ""), answer.get("message", ""), retry_after)


# What an outage looks like to a caller; it passes.
OUTAGE = (ApiError, aiohttp.ClientError, TimeoutError, ConnectionError)


class NotLeading(Exception):
    """This process lost the lease, so it must not write."""


def load_configuration() -> kubernetes.client.Configuration:
    """The pod's service account, else KUBECONFIG or ~/.kube/config. Raises kubernetes.config.ConfigException where there is neither."""
    configuration = kubernetes.client.Configuration()
    try:
        kubernetes.config.load_incluster_config(client_configuration=configuration)
    except kubernetes.config.ConfigException:
        kubernetes.config.load_kube_config(client_configuration=configuration)
    return configuration


def authorization(configuration: kubernetes.client.Configuration) -> str | None:
    """The header `Authorization`, of a token that is renewed where it has expired. Its key depends on the version of the package."""
    token: str | None = configuration.get_api_key_with_prefix("BearerToken") or configuration.get_api_key_with_prefix("authorization")
    return token


class ApiClient:
    """Requests to one API server. Use as `async with`."""

    def __init__(
        self,
        configuration: kubernetes.client.Configuration,
        may_write: Callable[[], bool] = lambda: True,
        count: Counter = lambda verb, status: None,
        timeout: float = _TIMEOUT,
    ) -> None:
        self.configuration = configuration
        self._may_write = may_write
        self._count = count
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ApiClient:
        connector = aiohttp.TCPConnector(ssl=_tls(self.configuration), limit=64)
        self._session = aiohttp.ClientSession(self.configuration.host.rstrip("/"), connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, **params: str) -> Object:
        """One object. Raises ApiError."""
        return await self._send("GET", path, params)

    async def create(self, path: str, body: Object) -> Object:
        """POST. Raises ApiError; status 409 means that the name is taken."""
        return await self._send("POST", path, {"fieldManager": FIELD_MANAGER}, body, "application/json")

    async def replace(self, path: str, body: Object) -> Object:
        """PUT; the body's resourceVersion must be the newest. Raises ApiError, status 409 where it is not."""
        return await self._send("PUT", path, {"fieldManager": FIELD_MANAGER}, body, "application/json")

    async def merge(self, path: str, body: Object) -> Object:
        """A merge patch; with a resourceVersion in it, 409 means that the object changed. Raises ApiError."""
        return await self._send("PATCH", path, {"fieldManager": FIELD_MANAGER}, body, MERGE)

    async def apply(self, path: str, body: Object) -> Object:
        """Server-side apply: makes or changes the object, and takes the fields that the body names. Raises ApiError."""
        return await self._send("PATCH", path, {"fieldManager": FIELD_MANAGER, "force": "true"}, body, APPLY)

    async def delete(self, path: str, uid: str, resource_version: str) -> Object:
        """Deletes that object only, as it was seen. Raises ApiError, status 409 where it is another one or has changed."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid, "resourceVersion": resource_version}}
        return await self._send("DELETE", path, {}, body, "application/json")

    async def pages(self, path: str, metadata_only: bool = False, **params: str) -> AsyncIterator[Object]:
        """LIST, page by page, each a List object. Raises ApiError, status 410 where the pages took too long."""
        query = {"limit": str(_PAGE), **params}
        headers = {"Accept": METADATA_ONLY} if metadata_only else {}
        while True:
            page = await self._send("GET", path, query, headers=headers, verb="LIST")
            page["items"] = page.get("items") or []  # null where there are none
            yield page
            token = page["metadata"].get("continue")
            if not token:
                return
            query["continue"] = token

    async def watch(
        self, path: str, resource_version: str, idle: float, metadata_only: bool = False, **params: str
    ) -> AsyncIterator[Object]:
        """Events after the version, bookmarks among them, until the server ends the stream. Raises ApiError, or TimeoutError after
        `idle` seconds of silence."""
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": resource_version, **params}
        query["timeoutSeconds"] = str(random.randint(240, 360))  # so that many watches do not reconnect together
        headers = self._headers() | ({"Accept": METADATA_ONLY_WATCH} if metadata_only else {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=idle)
        async with self._open().get(path, params=query, headers=headers, timeout=timeout) as response:
            self._count("WATCH", response.status)
            if response.status >= 400:
                raise await _error(response)
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError.of(event["object"])
                    yield event

    async def _send(
        self,
        method: str,
        path: str,
        params: dict[str, str],
        body: Object | None = None,
        content_type: str | None = None,
        headers: dict[str, str] | None = None,
        verb: str | None = None,
    ) -> Object:
        for attempt in range(1, _TRIES + 1):
            if method != "GET" and not self._may_write():
                raise NotLeading(f"{method} {path}")
            all_headers = self._headers() | (headers or {}) | ({"Content-Type": content_type} if content_type else {})
            data = json.dumps(body).encode() if body is not None else None
            timeout = aiohttp.ClientTimeout(total=self._timeout)
            async with self._open().request(method, path, params=params, data=data, headers=all_headers, timeout=timeout) as response:
                self._count(verb or method, response.status)
                if response.status < 400:
                    answer: Object = json.loads(await response.read())
                    return answer
                error = await _error(response)
            if error.status != 429 or attempt == _TRIES:
                raise error
            await asyncio.sleep(min(error.retry_after or 1.0, 5.0))
        raise AssertionError("unreachable")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("ApiClient is used outside of `async with`")
        return self._session

    def _headers(self) -> dict[str, str]:
        token = authorization(self.configuration)
        headers = {"Accept": "application/json", "User-Agent": FIELD_MANAGER}
        return headers | ({"Authorization": token} if token else {})


def _tls(configuration: kubernetes.client.Configuration) -> ssl.SSLContext | bool:
    if not configuration.host.startswith("https"):
        return False
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


async def _error(response: aiohttp.ClientResponse) -> ApiError:
    text = await response.text()
    after = response.headers.get("Retry-After", "")
    retry_after = float(after) if after.isdigit() else None
    try:
        answer = json.loads(text)
    except ValueError:
        answer = {}
    if not isinstance(answer, dict) or answer.get("kind") != "Status":
        answer = {"reason": response.reason or "", "message": text[:500]}
    return ApiError.of(answer, response.status, retry_after)


def object_path(api_version: str, plural: str, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
    """The URL path of a collection (of all namespaces where `namespace` is None), an object or its subresource."""
    parts = ["api" if "/" not in api_version else "apis", *api_version.split("/")]
    parts += ["namespaces", namespace] if namespace else []
    parts += [plural, *(part for part in (name, subresource) if part)]
    return "/" + "/".join(quote(part, safe="") for part in parts)
