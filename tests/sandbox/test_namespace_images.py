"""Images of the namespace backend: layers, sources, whole roots."""

import asyncio
import random
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandbox.base import Diff, Image, Limits, RejectedDiff, SandboxError
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
    assert tmp_path.parent.stat().st_mode & 0o077 == 0  # only its owner can reach it
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
        workdir="/srv/repo",
        python="/opt/env/bin/python",
        environment={"WHO": "me"},
    )

    async def body(sandbox: NamespaceSandbox) -> None:
        assert await say(sandbox, "pwd; cat a.py pkg/b.py; tool") == "/srv/repo\nx = 9\ny = 2\ntool me\n"
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
            program = ["/bin/cat", "pkg/c.py", "new", "-"]
            launched = await backend.launch(
                program, LIMITS, scratch=False, image=image, files={"new": b"given\n"}
            )
            said = b""
            while not said.endswith(b"given\n"):
                said += await launched.pipes.read()
            assert said == b"z = 3\ngiven\n"
            assert (await launched.request("get", path="/testbed/a.py", limit=100))[1] == b"x = 1\n"
            await launched.destroy()
            launched.pipes.close()
        finally:
            await backend.close()

    asyncio.run(session())


OPERATIONS = (
    "echo {n} > {a}",
    "rm -rf {a}",
    "rm -rf {a}; mkdir {a}; echo {n} > {a}/x",
    "mkdir -p {a}",
    "mv {a} {b}",
    "cp -r {a} {b}",
    "rm -rf {a}; cp -r {b} {a}",
    "echo more >> {a}",
    "rm -rf {a}/*",
)


@pytest.mark.parametrize("seed", range(6))
def test_diff_of_random_edits_leads_from_the_source_to_the_tree(source: Path, seed: int) -> None:
    rng = random.Random(seed)
    (source / "pkg/deep/er").mkdir(parents=True)
    (source / "pkg/deep/er/d.py").write_text("d\n")
    (source / "pkg/deep/e.py").write_text("e\n")
    (source / "link").symlink_to("a.py")
    (source / "run").write_text("#!/bin/sh\n")
    (source / "run").chmod(0o755)
    names = ["a.py", "pkg", "pkg/b.py", "pkg/deep", "pkg/deep/er", "n", "n/m", "pkg/new", "given"]
    before = {str(p.relative_to(source)): p.read_bytes() for p in source.rglob("*") if p.is_file()}
    before |= {"given": b"g\n", "a.py": b"given\n"}
    del before["link"]

    async def body(sandbox: NamespaceSandbox) -> None:
        for n in range(12):
            operation = rng.choice(OPERATIONS)
            await sandbox.exec(operation.format(n=n, a=rng.choice(names), b=rng.choice(names)), 10)
            if rng.random() < 0.2:
                await sandbox.exec("exit", 10)  # rebuilt around the same tree
        after = {}
        for path in (await say(sandbox, "find . -type f")).split():
            after[path[2:]] = await sandbox.read(path)
        diff = await sandbox.diff()
        assert type(diff) is Diff, diff
        patched = {**before, **diff.files}
        assert {path: data for path, data in patched.items() if data is not None} == after
        assert all(before.get(path) != data for path, data in diff.files.items())
        assert "-rwx" in await say(sandbox, "ls -l run")

    within(Image(source=source), body, {"given": b"g\n", "a.py": b"given\n"})


def test_new_links_and_special_files_reject_the_diff(source: Path) -> None:
    (source / "link").symlink_to("a.py")

    async def body(sandbox: NamespaceSandbox) -> None:
        await say(sandbox, "rm link; ln -s a.py link")
        assert (await sandbox.diff()).empty
        for make, undo in {
            "ln -sf pkg link": "ln -sfn a.py link",
            "ln -s a.py m": "rm m",
            "mkfifo f": "rm f",
            "ln a.py hard": "rm hard; cat a.py > c; mv c a.py",
            "chmod 000 pkg": "chmod 755 pkg",
            "echo 1 > q; chmod 000 q": "rm -f q",
        }.items():
            await say(sandbox, make)
            assert isinstance(await sandbox.diff(), RejectedDiff), make
            await say(sandbox, undo)
            assert (await sandbox.diff()).empty, undo
        await say(sandbox, "rm link")
        assert (await sandbox.diff()).files == {"link": None}

    within(Image(source=source), body)


def test_disk_limit_holds_in_a_source(source: Path) -> None:
    async def body(sandbox: NamespaceSandbox) -> None:
        filler = await sandbox.exec("cat /dev/zero > big; cat /dev/zero > big2", 20)
        assert "No space left" in filler.output
        assert await sandbox.exec("i=0; while [ $i -lt 20000 ]; do : > e$i || exit 7; i=$((i+1)); done", 60)
        assert (await sandbox.exec("cat /dev/zero > /tmp/big", 20)).exit_code != 0
        assert await say(sandbox, "rm -f big* e*; echo fine") == "fine\n"
        assert (await sandbox.diff()).empty

    within(Image(source=source), body)


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
