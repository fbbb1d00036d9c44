"""The conformance suite over real container engines; `make test-engines` starts them."""

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from conformance.backends import BACKENDS
from conformance.core import CASES, ROOT, cases_for, play

from sandbox.base import Image, Limits
from sandbox.containers.archive import TreeWriter
from sandbox.docker_backend import DockerProvider
from sandbox.pool import SandboxPool
from sandbox.tasks.conceal import Concealer
from sandbox.tasks.schema import TaskSpec

if TYPE_CHECKING:
    from docker import APIClient

ENGINES = {"docker": "DOCKERD_SOCKET", "podman": "PODMAN_SOCKET"}
PAIRS = [(engine, item.name) for engine in ENGINES for item in cases_for(BACKENDS[engine])]

pytestmark = [pytest.mark.slow, pytest.mark.sandbox]


@pytest.mark.parametrize(("engine", "name"), PAIRS)
def test_engine(engine: str, name: str) -> None:
    if ENGINES[engine] not in os.environ:
        pytest.skip(f"{ENGINES[engine]} is not set: run `make test-engines`, which starts {engine}")
    play(CASES[name], BACKENDS[engine])


DOOMED = """
import asyncio, os, signal, sys
from sandbox.base import Image, Limits
from sandbox.docker_backend import DockerProvider

async def main():
    provider = DockerProvider(address=sys.argv[1])
    await provider.create({}, Limits(), image=Image(name=sys.argv[2]))
    os.kill(provider._sentinel._process.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("engine", ENGINES)
async def test_what_a_killed_owner_without_a_sentinel_left_is_reaped(engine: str) -> None:
    if ENGINES[engine] not in os.environ:
        pytest.skip(f"{ENGINES[engine]} is not set: run `make test-engines`, which starts {engine}")
    backend = BACKENDS[engine]
    provider = DockerProvider(address=os.environ[ENGINES[engine]])
    command = [sys.executable, "-c", DOOMED, os.environ[ENGINES[engine]], str(backend.image.name)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    living = await provider.create({}, Limits(), image=backend.image)
    assert len(backend.traces()) == 4  # two containers and their volumes
    assert await provider.reap() == 1
    assert len(backend.traces()) == 2 and (await living.exec("echo alive", 10)).output == "alive\n"
    await provider.close()
    assert not backend.traces()


def image_with_tests(client: "APIClient", base: str) -> str:
    """An image like the benchmark's: hidden tests at its root, and a link to them in the working copy."""
    writer = TreeWriter(0)
    writer.file("r2e_tests/deep/test_a.py", b"secret\n")
    writer.file("etc/run_tests.sh", b"secret\n")
    writer.link("testbed/r2e_tests", "/r2e_tests")
    made = client.create_container(base, ["true"])["Id"]
    try:
        client.put_archive(made, "/", writer.content())
        client.commit(made, "jaxrl-hidden", "latest")
    finally:
        client.remove_container(made, force=True)
    return "jaxrl-hidden:latest"


@pytest.mark.parametrize("engine", ENGINES)
async def test_hidden_tests_of_an_image_are_covered(engine: str) -> None:
    if ENGINES[engine] not in os.environ:
        pytest.skip(f"{ENGINES[engine]} is not set: run `make test-engines`, which starts {engine}")
    provider = DockerProvider(address=os.environ[ENGINES[engine]])
    name = await provider.ask(lambda client: image_with_tests(client, str(BACKENDS[engine].image.name)))
    names = ("r2e_tests", "run_tests.sh")
    image = Image(name=name)
    task = TaskSpec(instance_id="t", problem_statement="", files={}, image=image, concealed=names)
    pool, concealer = SandboxPool(provider, size=1), Concealer()
    search = "cat /etc/run_tests.sh; ls /r2e_tests"
    try:
        async with pool.lease({}, image=image) as sandbox:
            assert (await sandbox.exec(search, 10)).output == "secret\ndeep\n"
            assert (await sandbox.exec("ls /testbed/r2e_tests", 10)).output == "deep\n"
        for started in (3, 4):
            async with concealer.lease(pool, task) as sandbox:
                assert (await sandbox.exec(f"{search}; ls -A; touch /r2e_tests/x", 10)).exit_code == 1
                assert (await sandbox.exec(f"{search}; ls -A", 10)).output == ""
            assert pool.health.started == started
    finally:
        await pool.close()
