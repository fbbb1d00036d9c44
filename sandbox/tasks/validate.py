"""Proof that tasks are tasks: the known fix resolves each, the unchanged tree does not, twice."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sandbox.base import Diff, SandboxProvider
from sandbox.grading.suite import SuiteGrader
from sandbox.grading.verdict import Verdict
from sandbox.tasks.build import Definitions
from sandbox.tasks.catalog import CatalogError
from sandbox.tasks.recipes import Recipe, sha256
from sandbox.tasks.schema import SuiteTests, TaskSpec

ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One line of the report. Seconds are wall time, one a round; `problem` is empty if all held.

    `recipe` is the hash of the definition that was proven.
    """

    instance_id: str
    recipe: str
    problem: str
    reference_seconds: list[float]
    unchanged_seconds: list[float]

    @property
    def holds(self) -> bool:
        return not self.problem


def load_report(path: Path) -> dict[str, Proof]:
    """Proofs by instance id, the last of each; empty without a file. Raises `CatalogError`."""
    if not path.exists():
        return {}
    proofs: dict[str, Proof] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            proof = Proof(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise CatalogError(
                f"{path}, line {number}: expected a proof as `validate` writes it; delete the line"
            ) from error
        proofs[proof.instance_id] = proof
    return proofs


async def validate(
    provider: SandboxProvider,
    definitions: Definitions,
    recipes: Sequence[Recipe],
    *,
    report: Path,
    jobs: int,
    tell: Callable[[str], None],
) -> list[Proof]:
    """Proves the recipes that `report` does not prove yet, `jobs` at a time; appends to it.

    Returns a proof of each recipe, in order. Raises `CatalogError` (also for a report that cannot be
    written), `SourceError`, `ImageBuildError`.
    """
    known = load_report(report)
    proofs = {r.instance_id: known[r.instance_id] for r in recipes if _proven(r, known)}
    _writable(report)
    left = [recipe for recipe in recipes if recipe.instance_id not in proofs]
    async for proof in _prove_all(provider, definitions, left, jobs):
        proofs[proof.instance_id] = proof
        with report.open("a") as file:
            file.write(json.dumps(asdict(proof)) + "\n")
        tell(f"{len(proofs)} of {len(recipes)}: {proof.instance_id}: {proof.problem or 'holds'}")
    return [proofs[recipe.instance_id] for recipe in recipes]


def _writable(report: Path) -> None:
    """Tried before the work whose result it shall hold."""
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.open("a").close()
    except OSError as error:
        raise CatalogError(
            f"{report}: expected a file that can be written, got {error.strerror}; choose another --report"
        ) from error


def mark(recipe: Recipe) -> str:
    """Hash of a definition, but for its issue text: that is no part of what is proven."""
    return sha256(recipe.model_dump_json(exclude={"problem"}).encode())


def _proven(recipe: Recipe, known: dict[str, Proof]) -> bool:
    proof = known.get(recipe.instance_id)
    return proof is not None and proof.holds and proof.recipe == mark(recipe)


async def _prove_all(
    provider: SandboxProvider, definitions: Definitions, recipes: Sequence[Recipe], jobs: int
) -> AsyncIterator[Proof]:
    room = asyncio.Semaphore(jobs)

    async def one(recipe: Recipe) -> Proof:
        async with room:
            task, suite = await asyncio.to_thread(definitions.task, recipe)
            return await _prove(provider, recipe, task, suite)

    running = [asyncio.ensure_future(one(recipe)) for recipe in recipes]
    try:
        for done in asyncio.as_completed(running):
            yield await done
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _prove(provider: SandboxProvider, recipe: Recipe, task: TaskSpec, suite: SuiteTests) -> Proof:
    problems: list[str] = []
    reference: list[float] = []
    unchanged: list[float] = []
    for _ in range(ROUNDS):
        grader = SuiteGrader(provider, at_once=1)  # a fresh one: no verdict from a cache
        try:
            for wanted, times, verdict in (
                ("resolved", reference, await _timed(grader.grade(task, suite, Diff(files=suite.reference)))),
                ("unresolved", unchanged, await _timed(grader.check_unchanged(task, suite))),
            ):
                times.append(verdict[1])
                problems += _problem(wanted, verdict[0])
        finally:
            await grader.close()
    return Proof(
        instance_id=recipe.instance_id,
        recipe=mark(recipe),
        problem="; ".join(dict.fromkeys(problems)),
        reference_seconds=reference,
        unchanged_seconds=unchanged,
    )


async def _timed(grading: Awaitable[Verdict]) -> tuple[Verdict, float]:
    started = time.monotonic()
    return await grading, round(time.monotonic() - started, 2)


def _problem(wanted: str, verdict: Verdict) -> list[str]:
    if verdict.status == wanted:
        return []
    what = "reference" if wanted == "resolved" else "unchanged tree"
    return [f"{what}: expected {wanted}, got {verdict.status} ({verdict.detail[:300]})"]
