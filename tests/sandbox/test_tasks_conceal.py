"""What an image holds for the grader is gone from the agent's sandbox, or there is no sandbox."""

from pathlib import Path

import pytest

from sandbox.base import Image, Limits, SandboxError
from sandbox.namespace import NamespaceProvider
from sandbox.tasks.conceal import conceal
from sandbox.tasks.schema import TaskSpec

TASK = TaskSpec(instance_id="t", problem_statement="", files={}, concealed=("r2e_tests", "run_tests.sh"))


@pytest.fixture
def image(tmp_path: Path) -> Image:
    source = tmp_path / "source"
    for path in ("r2e_tests/test_a.py", "pkg/deep er/r2e_tests/x", "pkg/kept.py", "run_tests.sh"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text("secret\n" if "kept" not in path else "kept\n")
    (source / "pkg" / "run_tests.sh").symlink_to("../r2e_tests")
    return Image(source=source)


@pytest.mark.sandbox
async def test_what_is_named_is_gone(image: Image) -> None:
    provider = NamespaceProvider()
    try:
        sandbox = await provider.create({}, Limits(), image=image)
        assert "secret" in (await sandbox.exec("cat r2e_tests/test_a.py", 10)).output
        await conceal(sandbox, TASK)
        assert (
            await sandbox.exec("grep -r secret . ; find . -type f -o -type l", 10)
        ).output == "./pkg/kept.py\n"
    finally:
        await provider.close()


@pytest.mark.sandbox
async def test_what_cannot_be_removed_ends_the_episode(image: Image, tmp_path: Path) -> None:
    (tmp_path / "layer" / "r2e_tests").mkdir(parents=True)
    provider = NamespaceProvider()
    try:
        shown = Image(source=image.source, layers={"/opt/env": tmp_path / "layer"})
        sandbox = await provider.create({}, Limits(), image=shown)
        with pytest.raises(SandboxError, match=r"could reach /opt/env/r2e_tests, which is the grader's"):
            await conceal(sandbox, TASK)
    finally:
        await provider.close()
