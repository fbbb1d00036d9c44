"""Task sets: python -m sandbox.tasks build|validate|show|find|reword

    build     makes every repository and environment that the definitions need
    validate  proves each task: the known fix passes, the unchanged tree fails, twice
    show      lists the tasks, or prints one as an agent sees it
    find      looks for new tasks in a project (mutation) or in two of its releases (release_diff)
    reword    writes the issue texts anew, from how the hidden tests fail

Definitions lie in configs/tasks; --definitions names another folder. `show` and `build` take --r2e FILE
--images FOLDER instead, for the benchmark's rows: build then lists the images that are missing.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sandbox.base import SandboxError
from sandbox.images.environment import ImageBuildError
from sandbox.namespace import NamespaceProvider
from sandbox.tasks.build import Definitions
from sandbox.tasks.catalog import CatalogError
from sandbox.tasks.find import find_mutations, find_release_pair, reword_recipes
from sandbox.tasks.mutation.search import Rules
from sandbox.tasks.r2e_gym import Expected, R2EGymTasks, RowsError
from sandbox.tasks.recipes import Recipe
from sandbox.tasks.schema import TaskSpec
from sandbox.tasks.sources import SourceError
from sandbox.tasks.validate import validate

FAULTS = (CatalogError, RowsError, SourceError, ImageBuildError, SandboxError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if a task does not hold or an image is missing, 2 for a wrong definition or use.

    130 after Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except FAULTS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was made or proven until now is kept", file=sys.stderr)
        return 130


def tell(text: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _build(options: argparse.Namespace) -> int:
    if options.r2e:
        return _check_images(_rows(options))
    definitions, recipes = _chosen(options)
    started = time.monotonic()
    for number, recipe in enumerate(recipes, 1):
        definitions.task(recipe)
        if number % 50 == 0:
            tell(f"{number} of {len(recipes)}")
    tell(f"built {len(recipes)} tasks in {time.monotonic() - started:.1f} s")
    return 0


def _check_images(tasks: R2EGymTasks) -> int:
    missing = tasks.missing_images()
    for path in missing:
        print(f"missing: {path}")
    print(f"{len(tasks)} tasks, {len(tasks) - len(missing)} images are there, {len(missing)} are missing")
    return 1 if missing else 0


def _validate(options: argparse.Namespace) -> int:
    definitions, recipes = _chosen(options)

    async def run() -> int:
        provider = NamespaceProvider()
        try:
            proofs = await validate(
                provider, definitions, recipes, report=options.report, jobs=options.jobs, tell=tell
            )
        finally:
            await provider.close()
        bad = [proof for proof in proofs if not proof.holds]
        print(f"{len(proofs) - len(bad)} of {len(proofs)} tasks hold; report: {options.report}")
        return 1 if bad else 0

    return asyncio.run(run())


def _show(options: argparse.Namespace) -> int:
    if options.r2e:
        tasks = _rows(options)
        specs = [spec for spec in tasks.specs if not options.ids or spec.instance_id in options.ids]
        for spec in specs:
            _print_spec(spec) if options.ids else print(spec.instance_id)
        print(f"{len(specs)} tasks, sha256 {tasks.digest}")
        return 0
    definitions, recipes = _chosen(options)
    if options.ids:
        for recipe in recipes:
            _print_spec(definitions.task(recipe)[0])
        return 0
    for recipe in recipes:
        print(f"{recipe.instance_id}  {recipe.kind}  {len(recipe.fail_to_pass)} fail to pass")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(Counter(r.kind for r in recipes).items())))
    return 0


def _print_spec(spec: TaskSpec) -> None:
    """What an agent sees, and where its working copy comes from."""
    print(f"{spec.instance_id}\nsource: {spec.image.source or spec.image.root}\n\n{spec.problem_statement}")


def _find(options: argparse.Namespace) -> int:
    definitions = Definitions(options.definitions)
    if options.kind == "mutation":
        rules = Rules(seed=options.seed)
        return asyncio.run(
            find_mutations(definitions, options.keys, options.count, options.tries, rules, tell)
        )
    if len(options.keys) != 2:
        raise CatalogError(f"find release_diff: expected two keys, before and after, got {len(options.keys)}")
    before, after = options.keys
    return asyncio.run(find_release_pair(definitions, before, after, tell))


def _reword(options: argparse.Namespace) -> int:
    definitions, recipes = _chosen(options)
    asyncio.run(reword_recipes(definitions, recipes, tell))
    return 0


def _rows(options: argparse.Namespace) -> R2EGymTasks:
    if options.images is None:
        raise RowsError(f"{options.r2e}: expected --images with the folder of its SIF files")
    expected = Expected(sha256=options.sha256, rows=options.rows)
    return R2EGymTasks(options.r2e, options.images, expected=expected)


def _chosen(options: argparse.Namespace) -> tuple[Definitions, list[Recipe]]:
    definitions = Definitions(options.definitions)
    recipes = definitions.recipes()
    known = {recipe.instance_id for recipe in recipes}
    if unknown := set(options.ids) - known:
        raise CatalogError(
            f"{options.definitions}: expected ids of its recipes, got {', '.join(sorted(unknown))}"
        )
    return definitions, [recipe for recipe in recipes if not options.ids or recipe.instance_id in options.ids]


_OF_RECIPES = {"build": _build, "validate": _validate, "show": _show, "reword": _reword}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sandbox.tasks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run in _OF_RECIPES.items():
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("ids", nargs="*", help="instance ids; all without")
        if name == "validate":
            command.add_argument("--report", type=Path, default=Path("runs/tasks/validation.jsonl"))
            command.add_argument("--jobs", type=_positive, default=2, help="tasks at a time (default 2)")
        elif name != "reword":
            _add_rows(command)
    find = commands.add_parser("find")
    find.set_defaults(run=_find)
    find.add_argument("kind", choices=("mutation", "release_diff"))
    find.add_argument("keys", nargs="+", help="projects as name-version; for release_diff before and after")
    find.add_argument("--count", type=_positive, default=14, help="mutations a project (default 14)")
    find.add_argument("--tries", type=_positive, default=120, help="mutants tried a project (default 120)")
    find.add_argument("--seed", type=int, default=0)
    for command in commands.choices.values():
        command.add_argument("--definitions", type=Path, default=Path("configs/tasks"))
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _add_rows(command: argparse.ArgumentParser) -> None:
    command.add_argument("--r2e", type=Path, metavar="FILE", help="the benchmark's JSONL rows")
    command.add_argument("--images", type=Path, metavar="FOLDER", help="where its SIF files are")
    command.add_argument("--sha256", help="what the file's must be")
    command.add_argument("--rows", type=int, help="how many there must be")


if __name__ == "__main__":
    sys.exit(main())
