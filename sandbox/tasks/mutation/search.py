"""Finds mutations that a project's own tests notice, quickly, and the same way every time."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from sandbox.tasks.catalog import Project
from sandbox.tasks.mutation.baseline import Baseline
from sandbox.tasks.mutation.module import Edit, UnsupportedSourceError
from sandbox.tasks.mutation.sites import edits, in_turn, is_mutation
from sandbox.tasks.probe.client import FileRun, Prober, Reason

_LEAST = 2.0  # seconds that any test file may take: the machine may be busy


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which mutants become tasks.

    Seconds are wall time: a test file may take `timeout`, and `slower` times its usual time (a hang is
    no sure failure: such mutants are dropped); all test files that run the mutated lines take at most
    `budget` as a rule. At least one and at most `most_failures` tests fail, and at most `share` of those
    in the failing files.
    """

    seed: int = 0
    timeout: float = 10.0
    slower: float = 10.0
    budget: float = 4.0
    most_failures: int = 30
    share: float = 0.6
    per_function: int = 2


@dataclass(frozen=True, kw_only=True)
class Found:
    """A mutant that tests notice. `failing` and `passing` are node ids of the files in `tests`."""

    path: str
    edit: Edit
    tests: tuple[str, ...]
    failing: tuple[str, ...]
    passing: tuple[str, ...]
    reasons: Mapping[str, Reason]


def candidates(project: Project, tree: Path, rules: Rules) -> Iterator[tuple[str, Edit]]:
    """(path, edit) of all the project's modules, which take turns. The same for the same seed."""
    columns: list[Sequence[tuple[str, Edit]]] = []
    for path in project.code_files(tree):
        try:
            found = edits((tree / path).read_bytes())
        except UnsupportedSourceError:
            continue  # a template or a file of another encoding is no module to mutate
        chosen = in_turn(found, seed=rules.seed, per_function=rules.per_function)
        columns.append([(path, edit) for edit in chosen])
    for row in zip_longest(*columns):
        yield from (each for each in row if each is not None)


async def search(
    prober: Prober, tree: Path, baseline: Baseline, tries: Iterator[tuple[str, Edit]], rules: Rules
) -> AsyncIterator[Found | None]:
    """For each try what was found, or None."""
    for path, edit in tries:
        tests = baseline.covering(path, edit.lines)
        source = (tree / path).read_bytes()
        cost = sum(baseline.seconds[test] for test in tests)
        if not tests or cost > rules.budget or not is_mutation(source, edit):
            yield None
        else:
            changed = {path: edit.apply(source).decode()}
            yield await _examine(prober, baseline, changed, (path, edit), tests, rules)


async def _examine(
    prober: Prober,
    baseline: Baseline,
    changed: Mapping[str, str],
    what: tuple[str, Edit],
    tests: Sequence[str],
    rules: Rules,
) -> Found | None:
    slowest = max(baseline.seconds[test] for test in tests)
    timeout = min(rules.timeout, _LEAST + rules.slower * slowest)
    first = await prober.run(tests, changed, timeout=timeout)
    failing = _failing(first, baseline)
    if failing is None or not _fits(failing, baseline, rules):
        return None
    again = await prober.run(list(failing), changed, timeout=timeout)
    if _failing(again, baseline) != failing:
        return None
    files = tuple(sorted(failing))
    failed = frozenset[str]().union(*failing.values())
    passing = frozenset[str]().union(*(baseline.stable[path] for path in files)) - failed
    reasons = {node: first[path].reasons[node] for path in files for node in failing[path]}
    return Found(
        path=what[0],
        edit=what[1],
        tests=files,
        failing=tuple(sorted(failed)),
        passing=tuple(sorted(passing)),
        reasons=reasons,
    )


def _failing(runs: Mapping[str, FileRun], baseline: Baseline) -> dict[str, frozenset[str]] | None:
    """Stable ids that failed, by file; None if a file hung, could not be collected or lost a test."""
    failing = {}
    for path, run in runs.items():
        expected = baseline.stable[path]
        failed, passed = expected & run.ids("failed"), expected & run.ids("passed")
        if not run.whole or failed | passed != expected or not failed <= run.reasons.keys():
            return None
        if failed:
            failing[path] = failed
    return failing


def _fits(failing: Mapping[str, frozenset[str]], baseline: Baseline, rules: Rules) -> bool:
    count = sum(map(len, failing.values()))
    total = sum(len(baseline.stable[path]) for path in failing)
    return 0 < count <= rules.most_failures and count <= rules.share * total
