"""Outlives the owner of containers and removes what it left. Run as a script; standard library only.

    python sentinel.py ADDRESS LABEL

Standard input is a pipe that the owner holds. Its end means that the owner died: everything with LABEL is
removed, for some seconds also what the engine was still creating. One byte means that all is well.
"""

import http.client
import json
import socket
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

_WATCH = 10.0  # seconds for which late arrivals are still removed


class Engine:
    """The few requests that are needed, each over a connection of its own."""

    def __init__(self, address: str, label: str) -> None:
        self._address = urllib.parse.urlsplit(address)
        self._filter = urllib.parse.quote(json.dumps({"label": [label]}))

    def containers(self) -> list[str]:
        """Ids of the owner's containers, running or not."""
        found = json.loads(self._ask("GET", f"/containers/json?all=1&filters={self._filter}") or b"[]")
        return [item["Id"] for item in found]

    def volumes(self) -> list[str]:
        """Names of the owner's volumes."""
        found = json.loads(self._ask("GET", f"/volumes?filters={self._filter}") or b"{}")
        return [item["Name"] for item in found.get("Volumes") or []]

    def remove_container(self, identity: str) -> None:
        """Kills and removes; no error if it is gone."""
        self._ask("DELETE", f"/containers/{identity}?force=1&v=1")

    def remove_volume(self, name: str) -> None:
        """Removes; no error if it is gone or still in use."""
        self._ask("DELETE", f"/volumes/{name}?force=1")

    def _ask(self, method: str, path: str) -> bytes:
        connection = http.client.HTTPConnection(self._address.hostname or "localhost", timeout=30)
        if self._address.scheme == "unix":
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(self._address.path)
        else:
            connection = http.client.HTTPConnection(self._address.netloc, timeout=30)
        try:
            connection.request(method, "/v1.40" + path)
            answer = connection.getresponse()
            body = answer.read()
            return body if answer.status < 300 else b""
        finally:
            connection.close()


def remove_all(engine: Engine) -> int:
    """Removes everything with the label; returns how much there was."""
    containers = engine.containers()
    with ThreadPoolExecutor(max_workers=16) as pool:
        list(pool.map(engine.remove_container, containers))
        volumes = engine.volumes()
        list(pool.map(engine.remove_volume, volumes))
    return len(containers) + len(volumes)


def main() -> None:
    """Waits for the owner's end."""
    if sys.stdin.buffer.read(1):
        return
    engine, deadline = Engine(sys.argv[1], sys.argv[2]), time.monotonic() + _WATCH
    while time.monotonic() < deadline:
        try:
            if remove_all(engine):
                continue
        except (OSError, ValueError, http.client.HTTPException):
            pass  # a busy engine is asked again
        time.sleep(0.2)


if __name__ == "__main__":
    main()
