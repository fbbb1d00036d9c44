"""Looks for new tasks and adds their recipes to a folder of definitions."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sandbox.namespace import NamespaceProvider
from sandbox.tasks.build import Definitions
from sandbox.tasks.mutation.campaign import harvest
from sandbox.tasks.mutation.search import Rules
from sandbox.tasks.recipes import Recipe, load_recipes, load_suites, save_recipes, save_suites
from sandbox.tasks.release_diff import compare_releases
from sandbox.tasks.reword import reword

Tell = Callable[[str], None]


async def find_mutations(
    definitions: Definitions, keys: Sequence[str], count: int, tries: int, rules: Rules, tell: Tell
) -> int:
    """Adds up to `count` mutations of each project; saved after each. Returns 1 if one gave none."""
    suites_path, missing = definitions.folder / "suites.jsonl", 0
    projects = [definitions.project(key) for key in keys]
    provider = NamespaceProvider()
    try:
        for project in projects:
            made = await harvest(
                provider, project, definitions.environment, count=count, tries=tries, rules=rules, tell=tell
            )
            tell(f"{project.key}: {len(made.recipes)} tasks of {made.tried} mutants")
            suites = load_suites(suites_path)
            suites[project.key] = {**suites.get(project.key, {}), **made.suite}
            save_suites(suites_path, suites)
            _add(definitions.folder / "mutation.jsonl", made.recipes)
            missing |= not made.recipes
    finally:
        await provider.close()
    return int(missing)


async def find_release_pair(definitions: Definitions, before: str, after: str, tell: Tell) -> int:
    """Adds the task of two releases. Returns 1 if they give none."""
    pair = definitions.project(before), definitions.project(after)
    provider = NamespaceProvider()
    try:
        recipe = await compare_releases(provider, *pair, definitions.environment, tell=tell)
    finally:
        await provider.close()
    _add(definitions.folder / "release_diff.jsonl", [recipe] if recipe else [])
    return int(recipe is None)


async def reword_recipes(definitions: Definitions, recipes: Sequence[Recipe], tell: Tell) -> None:
    """Saves `recipes` with issue texts written anew."""
    provider = NamespaceProvider()
    try:
        reworded = await reword(provider, definitions, recipes, tell)
    finally:
        await provider.close()
    for kind in sorted({recipe.kind for recipe in reworded}):
        _add(definitions.folder / f"{kind}.jsonl", [recipe for recipe in reworded if recipe.kind == kind])


def _add(path: Path, recipes: Iterable[Recipe]) -> None:
    """Saves the file with `recipes` in it, sorted by id; those of equal id are replaced."""
    known = {recipe.instance_id: recipe for recipe in (load_recipes(path) if path.exists() else [])}
    known |= {recipe.instance_id: recipe for recipe in recipes}
    save_recipes(path, [known[name] for name in sorted(known)])
