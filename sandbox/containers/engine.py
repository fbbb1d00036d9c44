"""A Docker-compatible engine behind a socket: the SDK's blocking calls, in threads of their own."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sandbox.base import SandboxError
from sandbox.containers.owner import LABEL, is_dead
from sandbox.containers.streams import open_connection

if TYPE_CHECKING:
    from docker import APIClient

API_VERSION = "1.40"  # dockerd since 19.03, podman since 3
DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
_THREADS = 16  # requests at a time; more only queue inside the engine
_TIMEOUT = 120  # seconds for one answer
_CHUNK = 1 << 18


class Engine:
    """One engine's API. Opened by the first use, in a thread; `close` ends the threads."""

    def __init__(self, address: str | None) -> None:
        self.address = address or os.environ.get("DOCKER_HOST") or DEFAULT_ADDRESS
        if not self.address.startswith(("unix://", "tcp://")):
            raise SandboxError(
                f"DOCKER_HOST={self.address}: expected unix://PATH or tcp://HOST:PORT; "
                "forward other connections to such a socket first"
            )
        self._threads: ThreadPoolExecutor | None = None
        self._opening = threading.Lock()
        self._client: APIClient | None = None

    async def run[T](self, work: Callable[["APIClient"], T]) -> T:
        """Does `work` in a thread. Raises `SandboxError` with the engine's words if it refuses.

        The work goes on if the caller is cancelled.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="engine")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._guarded, work)

    def close(self) -> None:
        """Waits for requests that still run and closes every connection."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        if self._client is not None:
            self._client.close()
        self._threads = self._client = None

    def _guarded[T](self, work: Callable[["APIClient"], T]) -> T:
        import requests
        from docker.errors import DockerException

        try:
            return work(self._open())
        except DockerException as error:
            words = getattr(error, "explanation", None) or error
            raise SandboxError(f"the container engine at {self.address} refused: {words}") from error
        except requests.RequestException as error:
            raise SandboxError(
                f"no answer from a container engine at {self.address}: {error}. "
                "Start dockerd or `podman system service`, or set DOCKER_HOST"
            ) from error

    def _open(self) -> "APIClient":
        with self._opening:
            if self._client is None:
                open_connection(self.address).close()  # says more, and leaves less, than the SDK's failure
                self._client = connect(self.address)
            return self._client


def connect(address: str) -> "APIClient":
    """The SDK's client. Raises `SandboxError` where the SDK is not installed."""
    try:
        from docker import APIClient
    except ImportError as error:
        raise SandboxError(
            "the docker backend needs the package `docker`: pip install 'jaxrl[docker]'"
        ) from error
    return APIClient(address, version=API_VERSION, timeout=_TIMEOUT, max_pool_size=_THREADS)


def get_tree(client: "APIClient", container: str, path: str) -> Iterator[bytes] | None:
    """A tar of `path` in chunks, from the engine's side; None if there is no such path."""
    from docker.errors import NotFound

    try:
        return client.get_archive(container, path, chunk_size=_CHUNK)[0]
    except NotFound:
        return None


def remove(client: "APIClient", container: str, *, volume: str = "") -> None:
    """Kills and removes a container, then its volume; no error if they are gone."""
    from docker.errors import NotFound

    for forget, name, options in (
        (client.remove_container, container, {"force": True, "v": True}),
        (client.remove_volume, volume, {"force": True}),
    ):
        try:
            if name:
                forget(name, **options)
        except NotFound:
            pass


def reap(client: "APIClient") -> int:
    """Removes what owners left that are dead by now and had no sentinel; how many containers."""
    filters: dict[str, Any] = {"label": [LABEL]}
    left = [item for item in client.containers(all=True, filters=filters) if is_dead(item["Labels"][LABEL])]
    for item in left:
        remove(client, item["Id"])
    for volume in client.volumes(filters=filters)["Volumes"] or []:
        if is_dead((volume["Labels"] or {}).get(LABEL, "")):
            remove(client, "", volume=volume["Name"])
    return len(left)
