"""The task set that the settings name: generated, from recipes of real projects, or the benchmark's rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

from jaxrl.config import Config, ConfigError
from sandbox.images.environment import ImageBuildError
from sandbox.tasks.build import Definitions, load_task_set
from sandbox.tasks.catalog import CatalogError
from sandbox.tasks.generated.generate import generate
from sandbox.tasks.r2e_gym import R2EGymTasks, RowsError
from sandbox.tasks.schema import Hidden, TaskSpec
from sandbox.tasks.sources import SourceError

type Split = Literal["train", "validation", "test"]


class Tasks(Protocol):
    """Tasks in cursor order, with hidden tests that only the grader opens."""

    @property
    def specs(self) -> Sequence[TaskSpec]: ...

    @property
    def digest(self) -> str: ...

    def hidden(self, instance_id: str) -> Hidden: ...

    def __len__(self) -> int: ...


class First:
    """The first tasks of a set, at most `count`."""

    def __init__(self, tasks: Tasks, count: int) -> None:
        self.specs, self.hidden = tuple(tasks.specs[:count]), tasks.hidden
        self.digest = f"{tasks.digest}, the first {len(self.specs)}"

    def __len__(self) -> int:
        return len(self.specs)


def build_tasks(
    config: Config, split: Split, *, resource: Callable[[str], Path], tell: Callable[[str], None]
) -> Tasks:
    """The tasks of a split, in cursor order; `resource` finds a file that the settings name.

    `tell` hears of what takes long: the tasks of real projects are built by their first use.
    Sets made of files are taken whole and in their order; the counts belong to generated tasks.
    Raises `ConfigError` naming the key for what is missing, unreadable or not enough.
    """
    match config.tasks.set:
        case "generated":
            return _generated(config, split)
        case "projects":
            return _projects(config, split, resource(config.tasks.definitions), tell)
        case "r2e_gym":
            return _rows(config, split, resource)


def _generated(config: Config, split: Split) -> Tasks:
    count: int = getattr(config.tasks, f"{split}_count")
    try:
        return generate(split, count, config.tasks.seed)
    except ValueError as error:
        raise ConfigError(f"tasks.{split}_count = {count}: {error}") from error


def _projects(config: Config, split: Split, folder: Path, tell: Callable[[str], None]) -> Tasks:
    """All tasks of the projects of a split: no project is in two of them."""
    try:
        definitions = Definitions(folder)
        recipes = definitions.recipes()
        names = {recipe.instance_id: definitions.project(recipe.project).name for recipe in recipes}
        chosen = _of_split(config, split, names)
        ids = [each.instance_id for each in recipes if each.instance_id in chosen]
        ids = evenly(ids, names, config.tasks.per_project)
        return load_task_set(folder, ids=ids, tell=lambda text: tell(f"{split} tasks: {text}"))
    except (CatalogError, SourceError, ImageBuildError) as error:
        raise ConfigError(f"tasks.definitions = {config.tasks.definitions}: {error}") from error


def _of_split(config: Config, split: Split, names: Mapping[str, str]) -> set[str]:
    """Ids whose project belongs to the split; by default training has those that no other split names."""
    held = {
        "validation": set(config.tasks.validation_projects),
        "test": set(config.tasks.test_projects),
    }
    trained = set(config.tasks.train_projects)
    for key, projects in {**held, "train": trained}.items():
        if unknown := sorted(projects - set(names.values())):
            raise ConfigError(
                f"tasks.{key}_projects: expected projects of tasks.definitions, "
                f"{', '.join(sorted(set(names.values())))}; got {', '.join(unknown)}"
            )
    if both := sorted(held["validation"] & held["test"]):
        raise ConfigError(f"tasks.test_projects: {', '.join(both)} is held out for validation already")
    for key, projects in held.items():
        if both := sorted(trained & projects):
            raise ConfigError(f"tasks.train_projects: {', '.join(both)} is held out for {key} already")
    rest = set(names.values()) - held["validation"] - held["test"]
    wanted = held.get(split, trained or rest)
    found = {name for name, project in names.items() if project in wanted}
    if not found:
        raise ConfigError(
            f"tasks.{split}_projects: expected at least one project with tasks"
            if split in held
            else "tasks: every project is held out, none is left to train on"
        )
    return found


def evenly(ids: Sequence[str], projects: Mapping[str, str], most: int | None) -> list[str]:
    """At most `most` ids of each project (id → project), from first to last of its own; None: all."""
    own: dict[str, list[str]] = {}
    for each in ids:
        own.setdefault(projects[each], []).append(each)
    kept = {part[place] for part in own.values() for place in _spread(len(part), most or len(part))}
    return [each for each in ids if each in kept]


def _spread(size: int, most: int) -> list[int]:
    """At most `most` places among `size`, both ends among them where there are two or more."""
    count = min(size, most)
    return [place * (size - 1) // max(1, count - 1) for place in range(count)]


def _rows(config: Config, split: Split, resource: Callable[[str], Path]) -> Tasks:
    rows: str | None = getattr(config.tasks, f"{split}_rows")
    stored = config.sandbox.backend == "docker"  # which has its images in the engine's own store
    needed = {f"{split}_rows": rows} | ({} if stored else {"images": config.tasks.images})
    for key, value in needed.items():
        if value is None:
            raise ConfigError(f"tasks.{key}: expected a path with tasks.set = r2e_gym, got null")
    assert rows is not None
    try:
        tasks = R2EGymTasks(resource(rows), resource(config.tasks.images or "."))
    except (RowsError, OSError) as error:
        raise ConfigError(f"tasks.{split}_rows = {rows}: {error}") from error
    if stored:
        tasks.specs = [replace(spec, image=replace(spec.image, root=None)) for spec in tasks.specs]
    elif missing := tasks.missing_images():
        raise ConfigError(
            f"tasks.images = {config.tasks.images}: expected an image for each of {len(tasks)} rows; "
            f"{len(missing)} are missing, the first is {missing[0].name}"
        )
    return tasks
