"""Images of the namespace backend: layers, sources, whole roots."""

import asyncio
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandbox.base import Image, Limits, SandboxError
from sandbox.namespace import NamespaceProvider, NamespaceSandbox

LIMITS = Limits(memory=256 << 20, pids=24, disk=8 << 20, output=4096)
Body = Callable[[NamespaceSandbox], Awaitable[None]]


def within(image: Image, body: Body, files: dict[str, bytes] | None = None) -> None:
    async def session() -> None:
        backend = NamespaceProvider()
        try:
            await body(await backend.create(files or {}, LIMITS, image=image))
        finally:
            await backend.close()

    asyncio.run(session())


async def say(sandbox: NamespaceSandbox, command: str) -> str:
    return (await sandbox.exec(command, 10)).output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    top = tmp_path / "source"
    for path, text in {"a.py": "x = 1\n", "pkg/b.py": "y = 2\n", "pkg/c.py": "z = 3\n"}.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(text)
    return top


def test_source_layers_and_environment(source: Path, tmp_path: Path) -> None:
    layer = tmp_path / "env"
    (layer / "bin").mkdir(parents=True)
    (layer / "bin" / "tool").write_text("#!/bin/sh\necho tool $WHO\n")
    (layer / "bin" / "tool").chmod(0o755)
    image = Image(
        layers={"/opt/env": layer},
        source=source,
        workdir="/work/repo",
        python="/opt/env/bin/python",
        environment={"WHO": "me"},
    )

    async def body(sandbox: NamespaceSandbox) -> None:
        assert await say(sandbox, "pwd; cat a.py pkg/b.py; tool") == "/work/repo\nx = 9\ny = 2\ntool me\n"
        assert (await sandbox.diff()).empty
        assert (await sandbox.exec("echo > /opt/env/bin/tool", 10)).exit_code != 0
        await say(sandbox, "echo new > pkg/b.py; rm pkg/c.py; mkdir n; mv a.py n/a.py")
        expected = {"pkg/b.py": b"new\n", "pkg/c.py": None, "a.py": None, "n/a.py": b"x = 9\n"}
        assert (await sandbox.diff()).files == expected
        assert (await sandbox.exec("sleep 60", 0.3)).timed_out
        assert (await sandbox.diff()).files == expected

    within(image, body, {"a.py": b"x = 9\n"})
    assert (source / "a.py").read_text() == "x = 1\n"


def test_launch_shows_the_source(source: Path) -> None:
    async def session() -> None:
        backend = NamespaceProvider()
        try:
            image = Image(source=source)
            launched = await backend.launch(["/bin/cat"], LIMITS, scratch=False, image=image)
            answer = await launched.request("get", path="/testbed/pkg/c.py", limit=100)
            assert answer[1] == b"z = 3\n"
            await launched.destroy()
            launched.pipes.close()
        finally:
            await backend.close()

    asyncio.run(session())


@pytest.fixture
def root(tmp_path: Path, source: Path) -> Path:
    """A tiny root file system: the host's shell and what it links to."""
    top = tmp_path / "root"
    for name in ("usr/bin", "etc", "opt", "proc", "dev"):
        (top / name).mkdir(parents=True)
    (top / "bin").symlink_to("usr/bin")
    (top / "etc/release").write_text("tiny\n")
    for tool in ("dash", "cat", "ls"):
        shutil.copy(Path("/bin", tool).resolve(), top / "usr/bin" / tool)
    (top / "usr/bin/sh").symlink_to("dash")
    for folder in ("lib", "lib64"):
        (top / "usr" / folder).mkdir()
        (top / folder).symlink_to(f"usr/{folder}")
    for library in _libraries():
        target = top / str(library).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    shutil.copytree(source, top / "testbed")
    return top


def _libraries() -> list[Path]:
    text = subprocess.run(["ldd", "/bin/ls"], capture_output=True, text=True, check=True).stdout
    return [Path(word) for word in text.split() if word.startswith("/")]


def test_root_with_a_working_directory_of_its_own(root: Path, tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "f").write_text("layer\n")

    async def body(sandbox: NamespaceSandbox) -> None:
        assert await say(sandbox, "cat /etc/release a.py /opt/new/f") == "tiny\nx = 1\nlayer\n"
        assert (await sandbox.exec("echo > /etc/release", 10)).exit_code != 0
        await say(sandbox, "echo 2 > a.py; echo > /tmp/x")
        assert (await sandbox.diff()).files == {"a.py": b"2\n"}

    within(Image(root=root, layers={"/opt/new": layer}), body)


@pytest.mark.parametrize(
    "image",
    [Image(workdir="rel"), Image(source=Path("/no/such")), Image(layers={"/opt/../x": Path("/usr")})],
    ids=["relative", "missing", "dots"],
)
def test_bad_images_are_explained(image: Image) -> None:
    async def body(_: NamespaceSandbox) -> None:
        raise AssertionError

    with pytest.raises(SandboxError, match="expected"):
        within(image, body)
