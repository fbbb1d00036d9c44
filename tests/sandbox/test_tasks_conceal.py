"""What an image holds for the grader is gone from the agent's sandbox, or there is no sandbox."""

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.base import Image, SandboxError
from sandbox.namespace import NamespaceProvider
from sandbox.pool import SandboxPool
from sandbox.tasks.conceal import Concealer, Covers
from sandbox.tasks.schema import TaskSpec
from sandbox.view import check

TASK = TaskSpec(instance_id="t", problem_statement="", files={}, concealed=("r2e_tests", "run_tests.sh"))


@pytest.fixture
def image(tmp_path: Path) -> Image:
    source = tmp_path / "source"
    for path in ("r2e_tests/test_a.py", "pkg/deep er/r2e_tests/x", "pkg/kept.py", "run_tests.sh"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text("secret\n" if "kept" not in path else "kept\n")
    (source / "pkg" / "run_tests.sh").symlink_to("../r2e_tests")
    return Image(source=source)


@pytest.fixture
async def pool() -> AsyncIterator[SandboxPool]:
    made = SandboxPool(NamespaceProvider(), size=2)
    yield made
    await made.close()


def root_with_tests(folder: Path) -> Path:
    """A whole root file system of this machine's programs, with hidden tests where no agent can write."""
    root = folder / "root"
    for name in ("usr", "opt/tests_elsewhere", "r2e_tests/deep", "opt/closed", "opt/empty/r2e_tests", "etc"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(os.readlink(f"/{name}"))
    for path in ("r2e_tests/test_a.py", "r2e_tests/deep/test_b.py", "opt/tests_elsewhere/test_c.py"):
        (root / path).write_text("secret\n")
    (root / "etc/run_tests.sh").write_text("secret\n")
    (root / "etc/kept").write_text("kept\n")
    (root / "opt/r2e_tests").symlink_to("tests_elsewhere")
    (root / "opt/closed/r2e_tests").symlink_to("/no/such/place")
    return root


@pytest.mark.sandbox
async def test_what_is_named_is_gone(image: Image, pool: SandboxPool) -> None:
    async with pool.lease({}, image=image) as sandbox:
        assert "secret" in (await sandbox.exec("cat r2e_tests/test_a.py", 10)).output
    async with Concealer().lease(pool, replace(TASK, image=image, files={"a.py": "mine\n"})) as sandbox:
        assert (await sandbox.exec("grep -r secret . ; find . -type f -o -type l | sort", 10)).output == (
            "./a.py\n./pkg/kept.py\n"
        )
    assert pool.health.started == 2


@pytest.mark.sandbox
async def test_what_cannot_be_removed_is_covered(image: Image, pool: SandboxPool, tmp_path: Path) -> None:
    root = root_with_tests(tmp_path)
    shown = Image(root=root, layers={"/usr": Path("/usr")}, source=image.source)
    task, concealer = replace(TASK, image=shown), Concealer()
    search = "grep -rl secret /r2e_tests /opt /etc /testbed; cat /opt/r2e_tests/test_c.py; ls -A /r2e_tests; "
    async with pool.lease({}, image=shown) as sandbox:
        assert len((await sandbox.exec(search, 10)).output.splitlines()) > 5
    for started in (3, 4):  # the first one found out, the next begins with what it found
        async with concealer.lease(pool, task) as sandbox:
            found = await sandbox.exec(search + "touch /r2e_tests/x; cat /etc/kept pkg/kept.py", 10)
            lines = [line for line in found.output.splitlines() if "No such file" not in line]
            assert lines == ["touch: cannot touch '/r2e_tests/x': Read-only file system", "kept", "kept"]
        assert pool.health.started == started


@pytest.mark.sandbox
async def test_what_stays_within_reach_ends_the_episode(
    image: Image, pool: SandboxPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Image(root=root_with_tests(tmp_path), layers={"/usr": Path("/usr")}, source=image.source)
    lease = Concealer().lease(pool, replace(TASK, image=shown))
    monkeypatch.setattr(Covers, "over", lambda self, image: image)
    with pytest.raises(SandboxError, match="could reach /etc/run_tests.sh, which is the grader's"):
        async with lease:
            pass
    (tmp_path / "root/etc/run_tests.sh").unlink()
    (tmp_path / "root/etc/run_tests.sh").symlink_to("/testbed/pkg")
    lease = Concealer().lease(pool, replace(TASK, image=shown))
    with pytest.raises(SandboxError, match="could reach /testbed/pkg, which is the grader's"):
        async with lease:
            pass


@pytest.mark.sandbox
async def test_an_image_that_cannot_be_searched_is_refused(image: Image, pool: SandboxPool) -> None:
    broken = replace(image, environment={"PATH": "/nowhere"})
    with pytest.raises(SandboxError, match="could not be searched for r2e_tests"):
        async with Concealer().lease(pool, replace(TASK, image=broken)):
            pass


def test_covers_overlap_no_working_directory() -> None:
    for place in ("/testbed", "/testbed/tests", "/"):
        with pytest.raises(SandboxError, match="expected"):
            check(Image(covered_folders=(place,)))
