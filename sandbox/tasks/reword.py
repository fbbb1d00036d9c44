"""Issue texts of known recipes, written anew from how their hidden tests fail today."""

from collections.abc import Callable, Sequence
from pathlib import Path

from sandbox.images.environment import environment_image
from sandbox.namespace import NamespaceProvider
from sandbox.tasks.build import Definitions
from sandbox.tasks.issue import Change, doc_lines, harmless, write_issue
from sandbox.tasks.probe.client import Prober, Reason
from sandbox.tasks.recipes import MutationRecipe, Recipe
from sandbox.tasks.schema import SuiteTests

_TIMEOUT = 60.0  # seconds, one test file


async def reword(
    provider: NamespaceProvider,
    definitions: Definitions,
    recipes: Sequence[Recipe],
    tell: Callable[[str], None],
) -> list[Recipe]:
    """The recipes with new issue texts; one whose failures all tell the cause keeps its text."""
    reworded: list[Recipe] = []
    for number, recipe in enumerate(recipes, 1):
        problem = await _problem(provider, definitions, recipe)
        if problem is None:
            tell(f"{recipe.instance_id}: every failure tells the cause; its text stays")
        reworded.append(recipe.model_copy(update={"problem": problem or recipe.problem}))
        if number % 20 == 0:
            tell(f"{number} of {len(recipes)}")
    return reworded


async def _problem(provider: NamespaceProvider, definitions: Definitions, recipe: Recipe) -> str | None:
    task, suite = definitions.task(recipe)
    project, source = definitions.project(recipe.project), task.image.source
    assert source is not None
    prober = Prober(provider, environment_image(definitions.environment, source=source))
    try:
        hidden = {path: data.decode() for path, data in suite.files.items()}
        runs = await prober.run(recipe.tests, hidden, timeout=_TIMEOUT)
    finally:
        await prober.close()
    known: dict[str, Reason] = {node: why for run in runs.values() for node, why in run.reasons.items()}
    reasons = {node: known[node] for node in recipe.fail_to_pass if node in known}
    told = harmless(reasons, _changes(recipe, suite, source))
    return write_issue(project.name, told, doc_lines(source, project.code_files(source))) if told else None


def _changes(recipe: Recipe, suite: SuiteTests, source: Path) -> list[Change]:
    """The fix; for a mutation what it undoes, too."""
    found: list[Change] = []
    for path, fixed in suite.reference.items():
        broken = (source / path).read_bytes() if (source / path).is_file() else None
        found.append((path, broken, fixed))
        if isinstance(recipe, MutationRecipe):
            found.append((path, fixed, broken))
    return found
