"""Checks the grader's two claims about honest projects on source releases that lie in a folder.

    python tools/check_grading.py scan FOLDER
    python tools/check_grading.py falsify FOLDER NAME-VERSION... --environment PACKAGES

`scan`: the change from each release of a project to the next is an honest patch; the static scan must have
no hit in it. `falsify`: every test that passes and can be falsified must fail once it is, while the others
of its file still pass. PACKAGES is a folder of installed packages with pytest in it, which other users can
read. Releases are NAME-VERSION.tar.gz. Exit status 1 if a claim fails.
"""

import argparse
import asyncio
import re
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import SystemRandom
from typing import Any

from sandbox.base import Image
from sandbox.grading.scan import scan
from sandbox.grading.suite import LIMITS
from sandbox.grading.suite_drive import drive, job
from sandbox.grading.suite_judge import Reports, parse
from sandbox.grading.suite_patch import Patch
from sandbox.grading.suite_plan import Run, by_file
from sandbox.grading.variants import falsified, units
from sandbox.namespace import NamespaceProvider
from sandbox.tasks.schema import SuiteTests, TaskSpec

_ARCHIVE = re.compile(r"(.+)-([\d.]+)\.tar\.gz")
_NO_SOURCE = re.compile(
    r"(^|/)(tests?|testing|docs|examples|t|demos)/|(^|/)(test_.*|.*_test|conftest|setup)\.py$"
)
_PASSED = {"setup": "passed", "call": "passed", "teardown": "passed"}
_SECONDS = 600.0


def releases(folder: Path) -> dict[str, list[Path]]:
    """Archives by project, oldest first."""
    found: dict[str, list[tuple[list[int], Path]]] = defaultdict(list)
    for path in folder.iterdir():
        if match := _ARCHIVE.fullmatch(path.name):
            version = [int(part) for part in match[2].split(".")]
            found[match[1].lower().replace("_", "-")].append((version, path))
    return {name: [path for _, path in sorted(each)] for name, each in sorted(found.items())}


def sources(archive: Path) -> dict[str, bytes]:
    """Python files of a release that are not tests."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if member.isfile() and path.endswith(".py") and not _NO_SOURCE.search(path):
                file = tar.extractfile(member)
                found[path] = file.read() if file else b""
    return found


def check_scan(folder: Path) -> bool:
    """Prints every hit. Whether there is none."""
    pairs = files = hits = 0
    for name, archives in releases(folder).items():
        for old, new in pairwise(map(sources, archives)):
            changed = {path for path in {*old, *new} if old.get(path) != new.get(path)}
            pairs, files = pairs + bool(changed), files + len(changed)
            before = {path: old[path] for path in changed if path in old}
            for hit in scan(before, {path: new.get(path) for path in changed}):
                hits += 1
                print(f"{name}: {hit}")
    print(f"{pairs} changes between releases, {files} files, {hits} hits")
    return hits == 0


def observe(path: str, ids: list[str], content: bytes | None = None) -> Run:
    """A run that nothing is expected of."""
    return Run(path=path, nonce="0", content=content, passing=frozenset(), failing=frozenset(ids))


async def node_ids(provider: NamespaceProvider, task: TaskSpec) -> dict[str, list[str]]:
    """Node ids by file, as pytest collects them."""
    sandbox = await provider.create({}, LIMITS, image=task.image)
    said = (await sandbox.exec("python3 -m pytest --collect-only -q -p no:cacheprovider", _SECONDS)).output
    await sandbox.destroy()
    return dict(by_file(line for line in said.splitlines() if re.match(r"[^ :]+\.py::", line)))


async def reports(provider: NamespaceProvider, task: TaskSpec, runs: list[Run]) -> list[Reports]:
    """Outcomes of each run on the project as it is."""
    # Named as hidden, so that each run finds the other test files as they were.
    assert task.image.source is not None
    tests = {run.path: (task.image.source / run.path).read_bytes() for run in runs}
    suite = SuiteTests(instance_id="", files=tests, fail_to_pass=(), pass_to_pass=())
    sandbox = await provider.create({}, LIMITS, image=task.image)
    request = job(task, suite, Patch(files={}, left_out=()), runs)
    message: dict[str, Any] = await drive(sandbox, task, request)
    await sandbox.destroy()
    if len(message.get("results", ())) != len(runs):
        raise SystemExit(f"the suite did not run to its end: {str(message)[-500:]}")
    return [parse(each["records"], run) for run, each in zip(runs, message["results"], strict=True)]


def halves(top: Path, path: str, passing: list[str]) -> Iterator[tuple[Run, set[str]]]:
    """Two runs of a file, each with every other falsifiable test falsified, and the ids of those."""
    content = (top / path).read_bytes()
    found = units(content, passing)
    for part in filter(None, (found[::2], found[1::2])):
        changed = falsified(content, part, SystemRandom())
        yield observe(path, passing, changed), {each for unit in part for each in unit.ids}


async def check_project(provider: NamespaceProvider, top: Path, environment: Path) -> bool:
    """Prints what did not fail, and what else did. Whether there is neither."""
    places = ":".join(["/opt/env", *(f"/testbed/{name}" for name in ("src", "lib") if (top / name).is_dir())])
    image = Image(source=top, layers={"/opt/env": environment}, environment={"PYTHONPATH": places})
    task = TaskSpec(instance_id="", problem_statement="", files={}, image=image, tests_timeout=_SECONDS)
    plain = [observe(path, ids) for path, ids in (await node_ids(provider, task)).items()]
    pairs: list[tuple[Run, set[str]]] = []
    for run, found in zip(plain, await reports(provider, task, plain), strict=True):
        pairs += halves(top, run.path, [each for each in run.ids if found[each] == _PASSED])
    spared, broken, count = 0, 0, 0
    for (run, turned), found in zip(
        pairs, await reports(provider, task, [run for run, _ in pairs]), strict=True
    ):
        wrong = [each for each in turned if found[each] != {**_PASSED, "call": "failed"}]
        others = [each for each in run.ids if each not in turned and found[each] != _PASSED]
        print(
            *(f"  does not fail: {each}" for each in wrong),
            *(f"  fails: {each}" for each in others),
            sep="\n",
        )
        spared, broken, count = spared + len(wrong), broken + len(others), count + len(turned)
    print(f"{top.name}: {count} tests falsified, {spared} did not fail, {broken} others failed", flush=True)
    return not spared and not broken


async def check_falsify(folder: Path, names: list[str], environment: Path) -> bool:
    """Unpacks and checks the named releases."""
    provider, good = NamespaceProvider(), True
    with tempfile.TemporaryDirectory(prefix="check-grading-") as place:
        Path(place).chmod(0o755)
        for name in names:
            with tarfile.open(folder / f"{name}.tar.gz") as tar:
                tar.extractall(place, filter="data")
                top = Path(place, tar.getnames()[0].split("/")[0])
            good &= await check_project(provider, top, environment)
    await provider.close()
    return good


def main() -> None:
    """Entry point."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("scan").add_argument("folder", type=Path)
    falsify = commands.add_parser("falsify")
    falsify.add_argument("folder", type=Path)
    falsify.add_argument("names", nargs="+")
    falsify.add_argument("--environment", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "scan":
        good = check_scan(options.folder)
    else:
        good = asyncio.run(check_falsify(options.folder, options.names, options.environment))
    sys.exit(not good)


if __name__ == "__main__":
    main()
