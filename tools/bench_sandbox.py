"""Times sandboxes of every backend at hand, and looks for what they leave behind.

    python tools/bench_sandbox.py [--starts 100] [--live 256] [--cycles 10000]
        [--docker ADDRESS] [--podman ADDRESS] [--engine-live 16] [--engine-cycles 20] [--json FILE]

For each backend: the median start, one sandbox after the other; seconds and memory of many live at once;
the median command in a held shell; cycles of start and end, whose first and last tenth are compared, with
the processes, descriptors, control groups, mounts and temporary files before and after. Memory is the drop
of what the kernel calls available, and the proportional set size of this process's descendants. Times are
wall-clock: the load average is printed with them. Exit status 1 if a backend leaves anything behind.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.base import HOST, Image, Limits, Sandbox, SandboxError, SandboxProvider
from sandbox.containers.engine import connect
from sandbox.containers.owner import LABEL
from sandbox.docker_backend import DockerProvider
from sandbox.namespace import NamespaceProvider

LIMITS = Limits(memory=256 << 20, pids=32, disk=16 << 20)
FILES = {"a.py": b"x = 1\n"}
WARM_UP = 20  # cycles before the first count
MIB = 2**20


@dataclass(frozen=True)
class Subject:
    """One backend and how hard it is tried."""

    name: str
    make: Callable[[], SandboxProvider]
    image: Image
    starts: int
    live: int
    cycles: int
    engine: str = ""  # address


def descendants() -> list[int]:
    """This process and everything below it."""
    parents = dict[int, int]()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sorted(ours)


def footprint(engine: str = "") -> dict[str, int]:
    """Counts of everything that a sandbox of ours could leave behind."""
    pids = descendants()
    groups = [f"jaxrl-{pid}-" for pid in pids]  # named after the keeper
    return {
        "processes": len(pids),
        "descriptors": sum(_count(Path("/proc", str(pid), "fd")) for pid in pids),
        "cgroups": sum(any(name in at for name in groups) for at, _, _ in os.walk("/sys/fs/cgroup")),
        "mounts": sum(_lines(Path("/proc", str(pid), "mountinfo")) for pid in pids),
        "temporary files": len(list(Path(tempfile.gettempdir()).glob("jaxrl-*"))),
        "containers and volumes": _in_engine(engine) if engine else 0,
    }


def _in_engine(address: str) -> int:
    client, filters = connect(address), {"label": [LABEL]}
    try:
        volumes = client.volumes(filters=filters)["Volumes"] or []
        return len(volumes) + len(client.containers(all=True, filters=filters))
    finally:
        client.close()


def _count(folder: Path) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def _lines(file: Path) -> int:
    try:
        return len(file.read_text().splitlines())
    except OSError:
        return 0


def available() -> int:
    """Bytes that the kernel could give to new programs."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def proportional() -> int:
    """Proportional set size of this process and everything below it, in bytes."""
    total = 0
    for pid in descendants():
        try:
            text = Path("/proc", str(pid), "smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total * 1024


async def timed(work: Awaitable[Any]) -> tuple[float, Any]:
    """Milliseconds and result."""
    begun = time.perf_counter()
    result = await work
    return (time.perf_counter() - begun) * 1000, result


async def starts(provider: SandboxProvider, subject: Subject) -> dict[str, float]:
    """Start and end, one after the other; milliseconds."""
    begins, ends = list[float](), list[float]()
    for _ in range(subject.starts):
        took, sandbox = await timed(provider.create(FILES, LIMITS, image=subject.image))
        begins.append(took)
        ends.append((await timed(sandbox.destroy()))[0])
    return {
        "start_ms": statistics.median(begins),
        "start_p90_ms": statistics.quantiles(begins, n=10)[-1],
        "end_ms": statistics.median(ends),
    }


async def commands(sandbox: Sandbox, count: int = 500) -> float:
    """Milliseconds of a command that does nothing, in a held shell."""
    return statistics.median([(await timed(sandbox.exec(":", 10)))[0] for _ in range(count)])


async def live(provider: SandboxProvider, subject: Subject) -> dict[str, float]:
    """Many at once, all started together."""
    memory, size = available(), proportional()
    making = [provider.create(FILES, LIMITS, image=subject.image) for _ in range(subject.live)]
    took, boxes = await timed(asyncio.gather(*making))
    answered, _ = await timed(asyncio.gather(*(box.exec("echo 1 > n", 60) for box in boxes)))
    result = {
        "live": subject.live,
        "live_s": took / 1000,
        "live_available_mib_each": (memory - available()) / subject.live / MIB,
        "live_pss_mib_each": (proportional() - size) / subject.live / MIB,
        "live_command_s": answered / 1000,
        "command_ms": await commands(boxes[0]),
    }
    result["live_end_s"] = (await timed(asyncio.gather(*(box.destroy() for box in boxes))))[0] / 1000
    return result


async def cycles(provider: SandboxProvider, subject: Subject) -> dict[str, Any]:
    """Start, one command, end, over and over; what is left, and whether it gets slower."""
    times = list[float]()
    before = dict[str, int]()
    for number in range(min(WARM_UP, subject.cycles) + subject.cycles):
        if number == min(WARM_UP, subject.cycles):
            before = footprint(subject.engine)
        times.append((await timed(_cycle(provider, subject.image)))[0])
    after, times = footprint(subject.engine), times[-subject.cycles :]
    tenth = max(subject.cycles // 10, 1)
    return {
        "cycles": subject.cycles,
        "first_tenth_ms": statistics.median(times[:tenth]),
        "last_tenth_ms": statistics.median(times[-tenth:]),
        "left": {key: after[key] - before[key] for key in after},
    }


async def _cycle(provider: SandboxProvider, image: Image) -> None:
    sandbox = await provider.create(FILES, LIMITS, image=image)
    await sandbox.exec(":", 60)
    await sandbox.destroy()


async def measure(subject: Subject) -> dict[str, Any]:
    """Everything about one backend."""
    provider = subject.make()
    try:
        await _cycle(provider, subject.image)  # what is made once is made now
        result: dict[str, Any] = {"backend": subject.name}
        result |= await starts(provider, subject)
        result |= await live(provider, subject)
        result |= await cycles(provider, subject)
    finally:
        await provider.close()
    return result | {"load_average": os.getloadavg()[0]}


def table(results: list[dict[str, Any]]) -> str:
    """One column per backend."""
    rows = []
    for key in results[0]:
        cells = [result[key] for result in results]
        rows.append([key, *(f"{cell:.2f}" if isinstance(cell, float) else _words(cell) for cell in cells)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _words(cell: Any) -> str:
    if isinstance(cell, dict):
        return ", ".join(f"{value:+d} {name}" for name, value in cell.items() if value) or "nothing"
    return str(cell)


def subjects(arguments: argparse.Namespace) -> list[Subject]:
    """The backends that were asked for."""
    found = []
    if not arguments.engines_only:
        found.append(
            Subject("namespace", NamespaceProvider, HOST, arguments.starts, arguments.live, arguments.cycles)
        )
    image = Image(name=arguments.image)
    for name in ("docker", "podman"):
        if address := getattr(arguments, name):
            count = max(min(arguments.starts, arguments.engine_cycles), 2)
            size = (count, arguments.engine_live, arguments.engine_cycles)
            found.append(Subject(name, lambda at=address: DockerProvider(address=at), image, *size, address))
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for option, default in {"starts": 100, "live": 256, "cycles": 10_000}.items():
        parser.add_argument(f"--{option}", type=_positive, default=default)
    parser.add_argument("--docker", default=os.environ.get("DOCKERD_SOCKET"))
    parser.add_argument("--podman", default=os.environ.get("PODMAN_SOCKET"))
    parser.add_argument("--image", default=os.environ.get("ENGINE_IMAGE", "jaxrl-test:latest"))
    parser.add_argument("--engine-live", type=_positive, default=16)
    parser.add_argument("--engine-cycles", type=_positive, default=20)
    parser.add_argument("--engines-only", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not (chosen := subjects(arguments)):
        parser.error("--engines-only: expected --docker or --podman with an address")
    try:
        results = [asyncio.run(measure(subject)) for subject in chosen]
    except SandboxError as error:
        sys.exit(f"bench_sandbox.py: error: {error}")
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any(value > 0 for result in results for value in result["left"].values()))


if __name__ == "__main__":
    main()
