"""What code in a grading, or an agent beside it, can reach: neither the grader's secrets nor the host."""

import asyncio
import socket
from collections.abc import Iterator

import pytest
from grading_project import FILES, FIXED, Bench, bench

from sandbox.base import Diff, Limits
from sandbox.tasks.schema import SuiteTests

pytestmark = pytest.mark.sandbox

PROBES = """
import os
import socket
import sys
import time

from shop.sums import total

MARK = "hidden-mark-5081"


def ancestors():
    pid = os.getppid()
    while pid > 1:
        yield pid
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])


def readable(path):
    try:
        with open(path, "rb") as file:
            file.read(1)
        return True
    except OSError:
        return False


def test_total():
    assert total([1, 2]) == 3


def test_driver_and_template_keep_their_memory():
    closed = [pid for pid in ancestors() if not readable(f"/proc/{pid}/mem")]
    assert len(closed) >= 2  # the shell above them knows nothing
    for pid in closed[:2]:
        assert not readable(f"/proc/{pid}/environ") and not readable(f"/proc/{pid}/maps")
        try:
            assert os.listdir(f"/proc/{pid}/fd") is None
        except OSError:
            pass


def test_the_job_is_gone():
    assert not [name for name in os.listdir("/tmp") if readable(f"/tmp/{name}")]


def test_no_host_files():
    assert not readable("/etc/shadow") and not readable("/root/.bashrc") and not os.path.exists("/home")
    assert not any(os.path.exists(f"/proc/1/root{path}") for path in ("/root", "/home", "/work", "/var"))


def test_no_other_processes():
    seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    assert len(seen) <= 6 and max(seen) < 1000


def test_no_network():
    with open("/proc/net/dev") as file:
        assert [line.split(":")[0].strip() for line in file.readlines()[2:]] == ["lo"]
    for address in (("127.0.0.1", PORT), ("10.0.0.1", 80)):
        with socket.socket() as client:
            client.settimeout(1)
            assert client.connect_ex(address) != 0


def test_the_environment_tells_nothing():
    plain = {"PATH", "HOME", "LANG", "TERM", "PWD", "OLDPWD", "SHLVL", "_", "LD_LIBRARY_PATH"}
    names = set(os.environ) - plain
    assert all(name.startswith(("PYTHON", "PYTEST")) for name in names), names


def test_slow_enough_to_be_looked_for():
    time.sleep(0.5)
"""
NAMES = [line.split("(")[0][4:] for line in PROBES.splitlines() if line.startswith("def test_")]
LOOK = """
grep -rslF 'hidden-mark-50''81' /testbed /tmp /dev/shm /opt/env /mnt /srv /var /home /root 2>/dev/null
for each in /proc/[0-9]*; do
    tr '\\0' ' ' < $each/cmdline | grep -F 'hidden-mark-50''81'
    grep -F 'graded:' $each/cmdline
    ls -l $each/fd 2>/dev/null | grep -F /tmp/
done
true
"""


@pytest.fixture(scope="module")
def shop() -> Iterator[Bench]:
    with bench() as made:
        yield made


def test_nothing_is_to_be_found_by_the_tested_or_the_agent(shop: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = PROBES.replace("PORT", str(server.getsockname()[1]))
        hidden = SuiteTests(
            instance_id="shop",
            files={"tests/test_probe.py": source.encode()},
            fail_to_pass=("tests/test_probe.py::test_total",),
            pass_to_pass=tuple(f"tests/test_probe.py::{name}" for name in NAMES if name != "test_total"),
        )

        async def body() -> tuple[str, list[str]]:
            files = {path: text.encode() for path, text in FILES.items()}
            agent = await shop.provider.create(files, Limits(), image=shop.image)
            fix = Diff(files={"shop/sums.py": FIXED.encode()})
            grading = asyncio.ensure_future(shop.grader.grade(shop.task(), hidden, fix))
            found = []
            while not grading.done():
                found.append((await agent.exec(LOOK, 30)).output)
            return str(await grading), found

        verdict, found = shop.runner.run(body())
    assert "resolved" in verdict and "unresolved" not in verdict, verdict
    assert found and set(found) == {""}


def test_the_look_would_find_a_hidden_test(shop: Bench) -> None:
    async def body() -> str:
        files = {"tests/test_probe.py": PROBES.encode()}
        agent = await shop.provider.create(files, Limits(), image=shop.image)
        return (await agent.exec(LOOK, 30)).output

    assert shop.runner.run(body()) == "/testbed/tests/test_probe.py\n"
