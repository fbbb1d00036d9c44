"""One whole episode of the `openhands` harness, in a sandbox of the default backend."""

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from jaxrl.contracts import Outcome, Trajectory
from jaxrl.rollout.agent import World, run_episode
from jaxrl.rollout.calls import render_call
from jaxrl.rollout.harness import OPENHANDS
from jaxrl.rollout.renderer import Renderer
from sandbox.agent_tools.openhands import openhands_tools
from sandbox.base import Image, Limits
from sandbox.namespace import NamespaceProvider
from tests.rollout.rollout_fakes import (
    ATTEMPT,
    END,
    INSTANCE,
    TOKENIZER,
    FakeGenerator,
    FakeGrader,
    FakeProvider,
)

TASK = replace(INSTANCE.spec, command_timeout=20.0, agent_timeout=120.0)


def call(name: str, **arguments: str) -> str:
    return render_call(name, arguments) + END


class Namespaces:
    """Leases real sandboxes of the default backend."""

    def __init__(self, limits: Limits) -> None:
        self.provider, self.limits = NamespaceProvider(), limits

    @asynccontextmanager
    async def lease(self, files: Mapping[str, bytes], *, image: Image | None = None):
        sandbox = await self.provider.create(files, self.limits)
        try:
            yield sandbox
        finally:
            await sandbox.destroy()


WRONG, RIGHT = INSTANCE.repair.wrong, INSTANCE.repair.right
PLAN = json.dumps([{"title": "fix", "status": "in_progress"}])
EPISODE = (
    call("task_tracker", command="plan", task_list=PLAN),
    call("execute_bash", command="ls; cd /tmp"),
    call("str_replace_editor", command="view", path="/testbed/app.py"),
    call("think", thought="The line is wrong."),
    call("str_replace_editor", command="str_replace", path="/testbed/app.py", old_str=WRONG, new_str=RIGHT),
    call("execute_bash", command="pwd && cat /testbed/app.py"),
    call("execute_bash", command="python3 -m py_compile /testbed/app.py; echo status $?", timeout="15"),
    call("finish", message="done"),
)


async def played(
    turns: tuple[str, ...],
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> tuple[Trajectory, FakeGrader]:
    sandboxes, grader = Namespaces(limits), FakeGrader(FakeProvider())
    world = World(
        generator=FakeGenerator(turns, context=20_000),
        sandboxes=sandboxes,
        grader=grader,
        tools=openhands_tools(),
        renderer=Renderer(TOKENIZER, OPENHANDS),
    )
    try:
        return await run_episode(TASK, INSTANCE.hidden, attempt=ATTEMPT, world=world), grader
    finally:
        await sandboxes.provider.close()


def responses(made: Trajectory) -> list[str]:
    text = TOKENIZER.decode(made.tokens.tolist())
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)


@pytest.mark.sandbox
def test_an_episode_with_all_tools_in_a_real_sandbox() -> None:
    made, grader = asyncio.run(played(EPISODE))
    seen = responses(made)
    assert (made.outcome, made.reward) == (Outcome.RESOLVED, 1.0), seen
    assert grader.diffs[0].files == {"app.py": INSTANCE.repair.fixed.encode()}
    assert seen[0] == "[the list now has 1 task]\n1. [~] fix (in_progress)"
    assert seen[1].startswith("app.py\n[ended]\n[directory: /tmp]\n[python: ")
    assert f"     1\t{INSTANCE.repair.source.splitlines()[0]}" in seen[2]
    assert seen[5].startswith(f"/tmp\n{INSTANCE.repair.fixed}") and seen[6].startswith("status 0")


HOG = "python3 -c 'x = bytes([1]) * (50 << 20); import time; time.sleep(3)'"


@pytest.mark.sandbox
def test_an_agent_that_uses_up_its_memory_ends_its_episode() -> None:
    hogs = call("execute_bash", command=f"({HOG} & {HOG} & {HOG} & wait)")
    made, grader = asyncio.run(
        played((hogs, call("finish", message="done")), Limits(memory=64 << 20, disk=8 << 20))
    )
    assert (made.outcome, made.reward) == (Outcome.SANDBOX_OOM, 0.0) and not grader.diffs


RESTLESS = (
    call("execute_bash", command="ls -l; sleep 0.01 & wait; time true"),
    call("execute_bash", command='cd $(mktemp -d) && pwd && python3 -c \'print(object(), {"a", "b", "c"})\''),
    call("execute_bash", command="python3 -c 'import unittest as u; u.main(argv=[str(), \"-v\"], module=u)'"),
    call("execute_bash", command="python3 -c 'import tempfile; print(tempfile.mkdtemp(), hash(\"x\"))'"),
    call("execute_bash", command="exit 3"),
    call("finish", message="done"),
)


@pytest.mark.sandbox
def test_equal_runs_show_the_policy_equal_tokens() -> None:
    one, other = (asyncio.run(played(RESTLESS))[0] for _ in range(2))
    assert responses(one) == responses(other)
    assert one.tokens.tolist() == other.tokens.tolist() and len(responses(one)) == 5
    assert "/tmp/tmp.0000000001" in responses(one)[1] and " at 0x7f0000000001>" in responses(one)[1]
    assert "Ran 0 tests in 0.000s" in responses(one)[2]
