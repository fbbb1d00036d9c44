"""The docker backend without an engine: archives, owners, the sentinel, and what it says then."""

import asyncio
import http.server
import json
import os
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.base import HOST, Image, Limits, RejectedDiff, SandboxError
from sandbox.containers.archive import TreeWriter, base_of, entries
from sandbox.containers.owner import Sentinel, is_dead, new_owner
from sandbox.containers.streams import FramedStream
from sandbox.diffs import compare
from sandbox.docker_backend import DockerProvider
from sandbox.snapshots import Snapshot, changes

NAMES = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "ü", "sp ace", "x" * 120, "__pycache__/a"])
TREES = st.dictionaries(NAMES, st.binary(max_size=40))


def tree(files: dict[str, bytes], links: dict[str, str] | None = None) -> list[bytes]:
    """What an engine sends for a working directory, in small chunks."""
    writer = TreeWriter(0)
    for path, content in files.items():
        writer.file("top/" + path, content)
    for path, target in (links or {}).items():
        writer.link("top/" + path, target)
    content = writer.content()
    return [content[start : start + 700] for start in range(0, len(content), 700)]


@given(TREES, TREES)
def test_changes_equal_a_comparison_of_both_trees(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    known = Snapshot()
    known.add(before)
    assert changes(entries(tree(after)), known, 1 << 20) == compare(before, after)


@given(TREES)
def test_a_base_is_the_image_overlaid_by_the_source(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "b").write_bytes(b"from the source")
        Path(folder, "link").symlink_to("b")
        content, known = base_of(tree({**files, "kept": b"image"}), Path(folder), 1)
    assert known.links == {"link": "b"} and {"kept", "b"} <= known.files.keys()
    moved = tree({**files, "kept": b"image", "b": b"from the source"}, {"link": "b"})
    assert changes(entries(moved), known, 1 << 20).empty
    assert content
    assert changes(entries(tree(files)), known, 1 << 20).files["link"] is None


def test_what_is_no_patch_is_rejected() -> None:
    known = Snapshot(links={"old": "target"})
    assert changes(entries(tree({}, {"old": "target"})), known, 100).empty
    for links in ({"old": "other"}, {"new": "target"}):
        assert isinstance(changes(entries(tree({}, links)), known, 100), RejectedDiff)
    assert isinstance(changes(entries(tree({"a": bytes(101)})), known, 100), RejectedDiff)
    assert isinstance(changes(entries(tree({"/".join("d" * 70): b""})), known, 100), RejectedDiff)
    assert isinstance(changes(entries([b"no tar" * 200]), known, 100), RejectedDiff)
    cut = tree({"a": bytes(5000)})[:3]
    assert isinstance(changes(entries(cut), known, 10_000), RejectedDiff)


@pytest.mark.parametrize("path", ["/a", "../a", "a/../../b", "", ".", "a\0b"])
def test_paths_that_lead_out_are_refused(path: str) -> None:
    with pytest.raises(OSError, match="inside the working directory"):
        TreeWriter(0).file(path, b"")


def test_owners_are_told_apart() -> None:
    owner = new_owner()
    place, pid, started, token = owner.rsplit(":", 3)
    assert not is_dead(owner)
    assert is_dead(f"{place}:{pid}:{int(started) + 1}:{token}")  # its number was used again
    assert not is_dead(f"elsewhere:{pid}:1:{token}") and not is_dead("unreadable")
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert is_dead(f"{place}:{ended.pid}:77:{token}")


class FakeEngine(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Lists two containers and a volume until they are deleted."""

    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(path, Answers)
        self.containers, self.volumes, self.asked = {"c1", "c2"}, {"v1"}, list[str]()


class Answers(http.server.BaseHTTPRequestHandler):
    """The few requests that the sentinel makes."""

    server: FakeEngine

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        self.server.asked.append(self.requestline)

    def address_string(self) -> str:
        return "unix"

    def do_GET(self) -> None:
        if "/containers/" in self.path:
            return self._say([{"Id": name} for name in sorted(self.server.containers)])
        return self._say({"Volumes": [{"Name": name} for name in sorted(self.server.volumes)]})

    def do_DELETE(self) -> None:
        name = self.path.partition("?")[0].rpartition("/")[2]
        self.server.containers.discard(name)
        self.server.volumes.discard(name)
        self._say(None)

    def _say(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[FakeEngine, str]]:
    with FakeEngine(str(tmp_path / "s")) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server, f"unix://{tmp_path}/s"
        server.shutdown()
        thread.join()


OWNER = """
import sys, time
from sandbox.containers.owner import Sentinel
Sentinel(*sys.argv[1:])
time.sleep(60)
"""


def test_the_sentinel_removes_what_a_killed_owner_left(engine: tuple[FakeEngine, str]) -> None:
    server, address = engine
    owner = subprocess.Popen([sys.executable, "-c", OWNER, address, "me"], cwd=Path(__file__).parents[2])
    time.sleep(0.5)
    assert server.containers and not server.asked
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 5
    while (server.containers or server.volumes) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server.containers and not server.volumes
    assert all("jaxrl.sandbox.owner%3Dme" in line for line in server.asked if line.startswith("GET"))


def test_a_dismissed_sentinel_removes_nothing(engine: tuple[FakeEngine, str]) -> None:
    server, address = engine
    Sentinel(address, "me").dismiss()
    assert server.containers and server.volumes and not server.asked


def test_frames_are_joined_whatever_the_chunks() -> None:
    async def body(frames: list[bytes], cuts: int) -> bytes:
        wire = b"".join(bytes([1, 0, 0, 0]) + len(data).to_bytes(4, "big") + data for data in frames)
        ours, theirs = socket.socketpair()
        with ours:
            stream = FramedStream(ours)

        def send() -> None:
            with theirs:
                for start in range(0, len(wire), cuts):
                    theirs.send(wire[start : start + cuts])

        sending = asyncio.create_task(asyncio.to_thread(send))
        got = b""
        while chunk := await stream.read():
            got += chunk
        stream.close()
        await sending
        return got

    frames = [b"", b"hello", b"\0" * 300, b"x"]
    for cuts in (1, 3, 8, 1000):
        assert asyncio.run(body(frames, cuts)) == b"".join(frames)


@pytest.mark.parametrize(
    ("address", "image", "words"),
    [
        ("unix:///nowhere/at.sock", Image(name="x"), "DOCKER_HOST"),
        ("unix:///nowhere/at.sock", HOST, "Image.name"),
        ("unix:///nowhere/at.sock", Image(name="x", root=Path("/")), "docker import"),
    ],
)
def test_what_cannot_work_says_what_to_do(address: str, image: Image, words: str) -> None:
    async def body() -> None:
        provider = DockerProvider(address=address)
        opened = len(os.listdir("/proc/self/fd"))
        with pytest.raises(SandboxError, match=words):
            await provider.create({}, Limits(), image=image)
        await provider.close()
        assert len(os.listdir("/proc/self/fd")) <= opened + 1

    asyncio.run(body())


def test_other_kinds_of_address_are_refused() -> None:
    with pytest.raises(SandboxError, match="unix://PATH or tcp://HOST:PORT"):
        DockerProvider(address="ssh://host")
