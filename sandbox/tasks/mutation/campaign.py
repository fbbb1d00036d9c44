"""Recipes of mutation tasks of one project."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandbox.images.environment import environment_image
from sandbox.namespace import NamespaceProvider
from sandbox.tasks.catalog import Project
from sandbox.tasks.issue import doc_lines, harmless, write_issue
from sandbox.tasks.mutation.baseline import Baseline, measure
from sandbox.tasks.mutation.search import Found, Rules, candidates, search
from sandbox.tasks.probe.client import Prober
from sandbox.tasks.recipes import MutationRecipe, sha256

_MOST_PER_FILE = 0.5  # share of a project's tasks whose hidden tests may be one and the same file


@dataclass(frozen=True, kw_only=True)
class Harvest:
    """What a project gave: recipes, the stable ids of the test files they use, mutants tried."""

    recipes: list[MutationRecipe]
    suite: dict[str, list[str]]
    tried: int


async def harvest(
    provider: NamespaceProvider,
    project: Project,
    environment: Path,
    *,
    count: int,
    tries: int,
    rules: Rules,
    tell: Callable[[str], None],
) -> Harvest:
    """Up to `count` recipes from at most `tries` mutants. Raises `SandboxError`, `SourceError`."""
    tree = project.tree()
    prober = Prober(provider, environment_image(environment, source=tree))
    try:
        baseline = await measure(
            prober, project.test_files(tree), project.code_files(tree), timeout=rules.timeout
        )
        tell(f"{project.key}: {len(baseline.stable)} test files, {sum(baseline.seconds.values()):.1f} s")
        return await _collect(prober, project, tree, baseline, count, tries, rules, tell)
    finally:
        await prober.close()


async def _collect(
    prober: Prober,
    project: Project,
    tree: Path,
    baseline: Baseline,
    count: int,
    tries: int,
    rules: Rules,
    tell: Callable[[str], None],
) -> Harvest:
    purposes = doc_lines(tree, project.code_files(tree))
    recipes: list[MutationRecipe] = []
    tried, uses = 0, Counter[str]()
    async for found in search(prober, tree, baseline, candidates(project, tree, rules), rules):
        tried += 1
        if found is not None and all(uses[path] < max(count * _MOST_PER_FILE, 3) for path in found.tests):
            recipe = _recipe(project, tree, found, baseline, purposes)
            if recipe is not None:
                recipes.append(recipe)
                uses.update(found.tests)
                tell(f"{project.key}: {len(recipes)} of {tried}: {recipe.path} {recipe.operator}")
        if len(recipes) == count or tried == tries:
            break
    used = sorted({path for recipe in recipes for path in recipe.tests})
    return Harvest(recipes=recipes, suite={path: sorted(baseline.stable[path]) for path in used}, tried=tried)


def _recipe(
    project: Project, tree: Path, found: Found, baseline: Baseline, purposes: Mapping[str, str]
) -> MutationRecipe | None:
    """None if every failure tells the cause."""
    before = (tree / found.path).read_bytes()
    after = found.edit.apply(before)
    reasons = harmless(found.reasons, [(found.path, before, after), (found.path, after, before)])
    if not reasons:
        return None
    edit = found.edit
    mark = f"{project.key}\0{found.path}\0{edit.start}\0{edit.end}\0{edit.replacement}"
    return MutationRecipe(
        instance_id=f"{project.key}__{hashlib.sha256(mark.encode()).hexdigest()[:10]}",
        project=project.key,
        tests=list(found.tests),
        fail_to_pass=list(found.failing),
        problem=write_issue(project.name, reasons, purposes),
        seconds=round(sum(baseline.seconds[path] for path in found.tests), 2),
        path=found.path,
        operator=edit.operator,
        start=edit.start,
        end=edit.end,
        replacement=edit.replacement,
        before=sha256(before),
        after=sha256(after),
    )
