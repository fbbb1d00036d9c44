"""The compact harness's tools, and the pool."""

import asyncio
from collections.abc import Mapping

import pytest

from sandbox.agent_tools.base import Observation, run_tool
from sandbox.agent_tools.compact import ExecuteBash, View, compact_tools
from sandbox.base import Limits, Sandbox, SandboxError
from sandbox.namespace import NamespaceProvider
from sandbox.pool import SandboxPool

FILES = {"m.py": b"def f(x):\n    return x\n", "bin": b"\xff\xfe", "pkg/n.py": b""}


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def sandbox(runner):
    provider = NamespaceProvider()
    yield runner.run(provider.create(FILES, Limits()))
    runner.run(provider.close())


def use(runner, sandbox: Sandbox, name: str, arguments: Mapping[str, str]) -> Observation:
    return runner.run(run_tool(compact_tools(), name, sandbox=sandbox, arguments=arguments))


def test_view_edit_view_finish(runner, sandbox: Sandbox) -> None:
    assert use(runner, sandbox, "view", {"path": "m.py"}).text == FILES["m.py"].decode()
    edit = {"path": "/testbed/m.py", "old_str": "return x", "new_str": "return x + 1"}
    assert use(runner, sandbox, "str_replace", edit) == Observation("ok")
    assert use(runner, sandbox, "view", {"path": "m.py"}).text == "def f(x):\n    return x + 1\n"
    assert use(runner, sandbox, "finish", {}) == Observation("", finished=True)
    numbered = runner.run(View(numbered=True).run(sandbox, {"path": "m.py"}))
    assert numbered.text == "     1\tdef f(x):\n     2\t    return x + 1\n"


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("view", {"path": "none.py"}, "error: no such file"),
        ("view", {"path": "pkg"}, "error: is a directory"),
        ("view", {"path": "bin"}, "error: not a text file"),
        ("view", {"path": "a\0b"}, "error: no such file"),
        ("view", {"path": "\ud800"}, "error: cannot read"),
        ("view", {"path": "x" * 5000}, "error: cannot read"),
        ("view", {}, "error: missing argument path"),
        ("view", {"path": "m.py", "line": "1"}, "error: unexpected argument line; allowed: path"),
        ("str_replace", {"path": "m.py", "old_str": "zzz", "new_str": ""}, "error: 0 matches"),
        ("str_replace", {"path": "m.py", "old_str": "x", "new_str": ""}, "error: 2 matches"),
        ("str_replace", {"path": "m.py", "old_str": "", "new_str": ""}, "error: old_str is empty"),
        ("str_replace", {"path": "m.py"}, "error: missing argument old_str, new_str"),
        ("str_replace", {"path": "m.py", "old_str": "def", "new_str": "\ud800"}, "error: cannot write"),
        ("finish", {"message": "done"}, "error: unexpected argument message; allowed: none"),
        ("rm", {}, "error: unknown tool rm; tools: view, str_replace, finish"),
    ],
)
def test_mistakes_are_observations(
    runner, sandbox: Sandbox, name: str, arguments: dict[str, str], text: str
) -> None:
    assert use(runner, sandbox, name, arguments) == Observation(text, error=True)


def test_execute_bash(runner, sandbox: Sandbox) -> None:
    bash = ExecuteBash(timeout=0.5)
    assert runner.run(bash.run(sandbox, {"command": "echo hi"})) == Observation("hi\n")
    assert runner.run(bash.run(sandbox, {"command": "echo no; false"})).text == "no\n\nexit code 1"
    late = runner.run(bash.run(sandbox, {"command": "sleep 9"}))
    assert late.error and "timed out" in late.text
    assert runner.run(bash.run(sandbox, {"command": " "})).error
    long = runner.run(bash.run(sandbox, {"command": "seq 100000"})).text
    assert len(long) < 17_000 and long.endswith("100000\n")


@pytest.mark.parametrize("warm", [0, 2])
def test_pool_bounds_and_cleans(runner, warm: int) -> None:
    async def body() -> None:
        pool = SandboxPool(NamespaceProvider(), size=3, warm=warm)
        await pool.start()
        used, most = 0, 0

        async def episode(number: int) -> None:
            nonlocal used, most
            async with pool.lease({"n": str(number).encode()}) as sandbox:
                used += 1
                most = max(most, used)
                assert (await sandbox.exec("cat n", 10)).output == str(number)
                assert (await sandbox.diff()).empty
                await asyncio.sleep(0.1)
                used -= 1

        await asyncio.gather(*(episode(number) for number in range(8)))
        assert most == 3
        await pool.close()
        with pytest.raises(SandboxError):
            await episode(9)

    runner.run(body())


def test_pool_destroys_when_the_block_fails(runner) -> None:
    async def body() -> None:
        pool = SandboxPool(NamespaceProvider(), size=1)
        with pytest.raises(KeyError):
            async with pool.lease({}) as sandbox:
                raise KeyError
        with pytest.raises(SandboxError):
            await sandbox.read("x")
        await pool.close()

    runner.run(body())


def test_pool_rejects_impossible_sizes() -> None:
    for size, warm in ((0, 0), (2, 3), (1, -1)):
        with pytest.raises(ValueError, match="expected size"):
            SandboxPool(NamespaceProvider(), size=size, warm=warm)
