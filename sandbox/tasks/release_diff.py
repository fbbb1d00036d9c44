"""Tasks from two releases of a project: the change of its code is the fix, that of its tests is hidden."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandbox.images.environment import environment_image
from sandbox.namespace import NamespaceProvider
from sandbox.tasks.catalog import Project
from sandbox.tasks.issue import doc_lines, harmless, write_issue
from sandbox.tasks.probe.client import FileRun, Prober, Reason
from sandbox.tasks.recipes import ReleaseRecipe
from sandbox.tasks.support import support_files

_TIMEOUT = 20.0  # seconds, one test file
_RUNS = 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is too large for one repair task: changed files and changed lines of code."""

    files: int = 20
    lines: int = 800


@dataclass(frozen=True, kw_only=True)
class _Pair:
    old: Path
    new: Path
    code: tuple[str, ...]
    tests: tuple[str, ...]
    support: tuple[str, ...]


async def compare_releases(
    provider: NamespaceProvider,
    before: Project,
    after: Project,
    environment: Path,
    *,
    sizes: Sizes = Sizes(),
    tell: Callable[[str], None],
) -> ReleaseRecipe | None:
    """The recipe of a pair of releases; None, with the reason told, if it gives no task."""
    pair = _pair(before, after)
    name = f"{before.key} to {after.version}"
    if problem := _too_large(pair, sizes):
        tell(f"{name}: {problem}")
        return None
    broken, fixed = await _both(Prober(provider, environment_image(environment, source=pair.old)), pair)
    failing, passing, reasons = _verdicts(pair, broken, fixed)
    changes = [(path, _bytes(pair.old / path), _bytes(pair.new / path)) for path in pair.code]
    told = harmless(reasons, changes)
    if not failing or not told:
        tell(f"{name}: {len(failing)} tests fail before and pass after, {len(told)} of them tell no cause")
        return None
    tell(f"{name}: {len(failing)} fail to pass, {len(passing)} pass to pass")
    problem = write_issue(before.name, told, doc_lines(pair.old, before.code_files(pair.old)))
    tests = [path for path in pair.tests if any(node.startswith(f"{path}::") for node in failing)]
    return ReleaseRecipe(
        instance_id=f"{before.key}__{hashlib.sha256(name.encode()).hexdigest()[:10]}",
        project=before.key,
        fixed=after.key,
        code=list(pair.code),
        tests=tests,
        fail_to_pass=sorted(failing),
        pass_to_pass=sorted(node for node in passing if node.split("::")[0] in tests),
        problem=problem,
        seconds=round(sum(fixed[0][path].seconds for path in tests), 2),
    )


def _pair(before: Project, after: Project) -> _Pair:
    old, new = before.tree(), after.tree()
    tests = after.test_files(new)
    code = {*before.code_files(old), *after.code_files(new)}
    changed = lambda path: _bytes(old / path) != _bytes(new / path)  # noqa: E731
    return _Pair(
        old=old,
        new=new,
        code=tuple(sorted(filter(changed, code))),
        tests=tuple(filter(changed, tests)),
        support=tuple(filter(changed, support_files(new, tests, without=tests))),
    )


def _too_large(pair: _Pair, sizes: Sizes) -> str | None:
    if not pair.code or not pair.tests:
        return f"{len(pair.code)} changed code files and {len(pair.tests)} changed test files"
    lines = sum(_changed_lines(pair.old / path, pair.new / path) for path in pair.code)
    if len(pair.code) > sizes.files or lines > sizes.lines:
        return f"{lines} changed lines in {len(pair.code)} files"
    return None


async def _both(prober: Prober, pair: _Pair) -> tuple[list[dict[str, FileRun]], list[dict[str, FileRun]]]:
    """Runs of the new tests on the old code and on the new; closes `prober`."""
    tests = {path: _text(pair.new / path) for path in (*pair.tests, *pair.support)}
    code = {path: _text(pair.new / path) for path in pair.code}
    try:
        broken = [await prober.run(pair.tests, tests, timeout=_TIMEOUT) for _ in range(_RUNS)]
        fixed = [await prober.run(pair.tests, tests | code, timeout=_TIMEOUT) for _ in range(_RUNS)]
    finally:
        await prober.close()
    return broken, fixed


def _verdicts(
    pair: _Pair, broken: list[dict[str, FileRun]], fixed: list[dict[str, FileRun]]
) -> tuple[set[str], set[str], dict[str, Reason]]:
    """Ids that fail before and pass after, ids that pass in every run, and why the first fail."""
    failing: set[str] = set()
    passing: set[str] = set()
    reasons: dict[str, Reason] = {}
    for path in pair.tests:
        if not all(run[path].whole for run in (*broken, *fixed)):
            continue  # a file that cannot be collected before says nothing of behaviour
        passed = frozenset.intersection(*(run[path].ids("passed") for run in fixed))
        failed = frozenset.intersection(*(run[path].ids("failed") for run in broken))
        failing |= passed & failed
        passing |= passed & frozenset.intersection(*(run[path].ids("passed") for run in broken))
        known: Mapping[str, Reason] = broken[0][path].reasons
        reasons |= {node: known[node] for node in sorted(passed & failed) if node in known}
    return failing, passing, reasons


def _changed_lines(old: Path, new: Path) -> int:
    before, after = ((_bytes(path) or b"").splitlines() for path in (old, new))
    return len({*before}.symmetric_difference(after))


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _text(path: Path) -> str | None:
    data = _bytes(path)
    return None if data is None else data.decode()
