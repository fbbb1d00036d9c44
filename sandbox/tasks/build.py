"""From recipes to tasks: what the agent sees, and the hidden suite, each from the same hashes."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from sandbox.images.cache import built, cache_directory
from sandbox.images.environment import build_environment, environment_image
from sandbox.tasks.catalog import CatalogError, Project, load_catalog
from sandbox.tasks.recipes import MutationRecipe, Recipe, ReleaseRecipe, load_recipes, load_suites, sha256
from sandbox.tasks.repository import make_repository
from sandbox.tasks.schema import SuiteTests, TaskSpec
from sandbox.tasks.support import support_files
from sandbox.tasks.taskset import TaskSet

_FORMAT = "2"  # of repositories: part of their address
_SLOWER = 20.0  # times what the hidden tests took when they were chosen


@dataclass(frozen=True)
class Definitions:
    """A folder of definitions: projects.yaml, environment.txt, suites.jsonl and recipes (*.jsonl)."""

    folder: Path

    @cached_property
    def projects(self) -> Mapping[str, Project]:
        """By key. Raises `CatalogError`."""
        return load_catalog(self.folder / "projects.yaml")

    @cached_property
    def suites(self) -> Mapping[str, Mapping[str, list[str]]]:
        """Stable node ids by project and test file. Raises `CatalogError`."""
        return load_suites(self.folder / "suites.jsonl")

    @cached_property
    def environment(self) -> Path:
        """The locked environment, built if need be. Raises `ImageBuildError`."""
        return build_environment(self.folder / "environment.txt")

    def recipes(self) -> list[Recipe]:
        """All recipes, files in the order of their names. Raises `CatalogError`."""
        names = ("mutation.jsonl", "release_diff.jsonl")
        found = [path for path in (self.folder / name for name in names) if path.exists()]
        if not found:
            raise CatalogError(f"{self.folder}: expected {' or '.join(names)}; there is neither")
        return [recipe for path in found for recipe in load_recipes(path)]

    def project(self, key: str) -> Project:
        """Raises `CatalogError` for a key that the catalogue lacks."""
        if key not in self.projects:
            raise CatalogError(
                f"{self.folder / 'projects.yaml'}: expected a project {key!r}; add it or its release"
            )
        return self.projects[key]

    def task(self, recipe: Recipe) -> tuple[TaskSpec, SuiteTests]:
        """One task, its repository built if need be. Raises `CatalogError`, `SourceError`."""
        project = self.project(recipe.project)
        tree = project.tree()
        if isinstance(recipe, MutationRecipe):
            broken, suite = _mutation(recipe, tree, self.suites, _hidden_files(recipe, project, tree))
            tags = {"family": recipe.kind, "project": project.name, "operator": recipe.operator}
        else:
            fixed = self.project(recipe.fixed)
            new = fixed.tree()
            broken, suite = {}, _release(recipe, tree, new, _hidden_files(recipe, fixed, new))
            tags = {"family": recipe.kind, "project": project.name}
        source = _repository(recipe, tree, broken)
        return _spec(recipe, self.environment, source, tags), suite


def load_task_set(
    folder: Path, *, ids: Iterable[str] | None = None, tell: Callable[[str], None] = lambda _: None
) -> TaskSet:
    """The tasks of a folder of definitions in order, or those with `ids`; builds what is missing.

    `tell` hears what is looked at or built next: the first time takes a minute or more.
    Raises `CatalogError`, `SourceError`, `ImageBuildError`.
    """
    definitions = Definitions(folder)
    wanted = None if ids is None else set(ids)
    recipes = [recipe for recipe in definitions.recipes() if wanted is None or recipe.instance_id in wanted]
    if wanted is not None and (unknown := wanted - {recipe.instance_id for recipe in recipes}):
        raise CatalogError(f"{folder}: expected ids of its recipes, got {', '.join(sorted(unknown))}")
    pairs: list[tuple[TaskSpec, SuiteTests]] = []
    for number, recipe in enumerate(recipes, 1):
        if number == 1:
            tell("the environment that the tests of all projects run in")
            _ = definitions.environment
        tell(f"task {number} of {len(recipes)}: {recipe.instance_id}")
        pairs.append(definitions.task(recipe))
    return TaskSet([spec for spec, _ in pairs], [suite for _, suite in pairs])


def _spec(recipe: Recipe, environment: Path, source: Path, tags: Mapping[str, str]) -> TaskSpec:
    return TaskSpec(
        instance_id=recipe.instance_id,
        problem_statement=recipe.problem,
        files={},
        image=environment_image(environment, source=source),
        command_timeout=60.0,
        agent_timeout=1800.0,
        tests_timeout=max(60.0, _SLOWER * recipe.seconds),
        tags=tags,
    )


def _mutation(
    recipe: MutationRecipe,
    tree: Path,
    suites: Mapping[str, Mapping[str, Sequence[str]]],
    hidden: Mapping[str, bytes],
) -> tuple[dict[str, bytes | None], SuiteTests]:
    good = _read(tree, recipe.path, recipe)
    bad = good[: recipe.start] + recipe.replacement.encode() + good[recipe.end :]
    for expected, data in ((recipe.before, good), (recipe.after, bad)):
        if sha256(data) != expected:
            raise CatalogError(
                f"{recipe.instance_id}: {recipe.path}: expected sha256 {expected}, got {sha256(data)}: "
                "the recipe belongs to another release"
            )
    stable = suites.get(recipe.project, {})
    if missing := [path for path in recipe.tests if path not in stable]:
        raise CatalogError(
            f"suites.jsonl: {recipe.project}: expected the ids of {missing[0]}; find them again"
        )
    failing = set(recipe.fail_to_pass)
    passing = [node for path in recipe.tests for node in stable[path] if node not in failing]
    suite = SuiteTests(
        instance_id=recipe.instance_id,
        files=hidden,
        fail_to_pass=tuple(recipe.fail_to_pass),
        pass_to_pass=tuple(passing),
        reference={recipe.path: good},
    )
    return {recipe.path: bad}, suite


def _release(recipe: ReleaseRecipe, old: Path, new: Path, hidden: Mapping[str, bytes]) -> SuiteTests:
    fix = {path: (new / path).read_bytes() if (new / path).is_file() else None for path in recipe.code}
    return SuiteTests(
        instance_id=recipe.instance_id,
        files=hidden,
        fail_to_pass=tuple(recipe.fail_to_pass),
        pass_to_pass=tuple(recipe.pass_to_pass),
        reference={path: data for path, data in fix.items() if data is not None or (old / path).is_file()},
    )


def _hidden_files(recipe: Recipe, project: Project, tree: Path) -> dict[str, bytes]:
    support = support_files(tree, recipe.tests, without=project.test_files(tree))
    return {path: _read(tree, path, recipe) for path in (*recipe.tests, *support)}


def _repository(recipe: Recipe, tree: Path, broken: Mapping[str, bytes | None]) -> Path:
    """The agent's tree: the hidden test files are not in it, whatever version of them."""
    mark = f"{_FORMAT}\0{tree.name}\0{recipe.model_dump_json(exclude={'problem'})}"
    place = (
        cache_directory("repositories")
        / f"{recipe.instance_id}-{hashlib.sha256(mark.encode()).hexdigest()[:12]}"
    )
    without = recipe.tests
    return built(
        place, lambda top: make_repository(top, tree, changes=broken, without=without), recorded=True
    )


def _read(tree: Path, path: str, recipe: Recipe) -> bytes:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not (tree / pure).is_file():
        raise CatalogError(f"{recipe.instance_id}: expected a file of the release, got {path!r}")
    return (tree / pure).read_bytes()
