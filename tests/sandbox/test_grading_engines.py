"""A task of a real project is graded in containers as in namespaces. Needs the package index, and engines."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from attacks.inside import REPORTS
from conformance.backends import BACKENDS
from grading_project import FIXED, bench, layer, shop_suite

from sandbox.base import Diff, Limits, SandboxProvider
from sandbox.docker_backend import DockerProvider
from sandbox.grading import suite_trial
from sandbox.grading.suite import SuiteGrader
from sandbox.namespace_sandbox import NamespaceSandbox
from sandbox.tasks.build import load_task_set
from sandbox.tasks.schema import SuiteTests, TaskSpec

COMMITTED = Path(__file__).resolve().parents[2] / "configs" / "tasks"
TASK = "sqlparse-0.5.3__0dca2d3c90"
ATTACK = REPORTS["every report becomes passed"]
ENGINES = {"docker": "DOCKERD_SOCKET", "podman": "PODMAN_SOCKET"}

pytestmark = [pytest.mark.slow, pytest.mark.sandbox]


def task_for(engine: str) -> tuple[TaskSpec, SuiteTests]:
    """The task over the image of an engine, which has Python; pytest is a layer."""
    tasks = load_task_set(COMMITTED, ids=[TASK])
    (task,) = tasks.specs
    suite = tasks.hidden(TASK)
    assert isinstance(suite, SuiteTests)
    image = dataclasses.replace(
        BACKENDS[engine].image,
        layers={"/opt/env": layer()},
        source=task.image.source,
        environment={"PYTHONPATH": "/opt/env"},
    )
    return dataclasses.replace(task, image=image), suite


async def diff_of(provider: SandboxProvider, task: TaskSpec, files: Mapping[str, bytes]) -> Diff:
    """What an agent leaves that writes `files`."""
    sandbox = await provider.create({}, Limits(disk=64 << 20), image=task.image)
    try:
        for path, content in files.items():
            await sandbox.write(path, content)
        return await sandbox.diff()
    finally:
        await sandbox.destroy()


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_real_task_in_containers(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if ENGINES[engine] not in os.environ:
        pytest.skip(f"{ENGINES[engine]} is not set: run `make test-engines`, which starts {engine}")
    task, suite = task_for(engine)
    provider = DockerProvider(address=os.environ[ENGINES[engine]])
    grader = SuiteGrader(provider)
    try:
        assert task.image.source is not None
        fix = {path: content for path, content in suite.reference.items() if content is not None}
        attack = {path: ATTACK.encode() + (task.image.source / path).read_bytes() for path in fix}
        honest = await diff_of(provider, task, fix)
        assert honest.files == fix
        verdict = await grader.grade(task, suite, honest)
        assert verdict.status == "resolved", verdict
        assert (await grader.grade(task, suite, Diff())).status == "unresolved"
        assert (await grader.check_unchanged(task, suite)).status == "unresolved"
        verdict = await grader.grade(task, suite, await diff_of(provider, task, attack))
        assert verdict.status == "tampering", verdict
        monkeypatch.setattr(suite_trial, "screen", lambda patch, originals: (patch, []))
        unscanned = SuiteGrader(provider)
        verdict = await unscanned.grade(task, suite, await diff_of(provider, task, attack))
        assert verdict.status == "tampering" and "must fail" in verdict.detail, verdict
    finally:
        await grader.close()
        await provider.close()


def test_the_grader_writes_into_the_working_directory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends whose sandboxes are a folder of the host can write nowhere else."""
    written: list[str] = []
    write = NamespaceSandbox.write

    async def noted(self: NamespaceSandbox, path: str, content: bytes) -> None:
        written.append(path)
        await write(self, path, content)

    monkeypatch.setattr(NamespaceSandbox, "write", noted)
    with bench() as shop:
        assert shop.grade({"shop/sums.py": FIXED}, shop_suite()).status == "resolved"
    assert written and all(path.startswith("/testbed/") for path in written), written
