"""The projects that tasks are made from: which release, where its code and its tests are."""

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from sandbox.tasks.sources import Release, source_tree

Text = Annotated[str, StringConstraints(min_length=1)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


_LONGEST = 80  # letters of a wrong value in an error


class CatalogError(ValueError):
    """A file of definitions is not as expected: names file, key, what was expected and got."""


class Project(BaseModel):
    """One source release. Globs are relative to its top; `*` matches across folders.

    `code` are the modules that may be changed, `tests` the test files; `without` is left out of both.
    `metadata`: folder in which the project finds its own version, if it asks for it at run time.
    `also`: sha256 by version of other releases that are laid out alike.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Text
    version: Text
    sha256: Sha256
    licence: Text
    code: list[Text] = Field(min_length=1)
    tests: list[Text] = Field(min_length=1)
    without: list[Text] = []
    metadata: str | None = None
    also: dict[Text, Sha256] = {}

    @property
    def key(self) -> str:
        """Name and version, unique in a catalogue."""
        return f"{self.name}-{self.version}"

    @property
    def release(self) -> Release:
        """What to fetch."""
        return Release(name=self.name, version=self.version, sha256=self.sha256)

    def tree(self) -> Path:
        """The unpacked release. Raises `SourceError`."""
        return source_tree(self.release, metadata=self.metadata)

    def releases(self) -> list["Project"]:
        """This one, then those of `also`."""
        others = [
            self.model_copy(update={"version": v, "sha256": s, "also": {}}) for v, s in self.also.items()
        ]
        return [self, *others]

    def code_files(self, tree: Path) -> list[str]:
        """Modules that may be changed, sorted."""
        tests = set(self.test_files(tree))
        return [path for path in _matching(tree, self.code, self.without) if path not in tests]

    def test_files(self, tree: Path) -> list[str]:
        """Test files, sorted."""
        return _matching(tree, self.tests, self.without)


def load_catalog(path: Path) -> Mapping[str, Project]:
    """Projects by key. Raises `CatalogError`."""
    try:
        rows = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CatalogError(f"{path}: expected a YAML list of projects: {reason(error)}") from error
    if not isinstance(rows, list):
        raise CatalogError(f"{path}: expected a list of projects, got {type(rows).__name__}")
    projects = [parse(Project, row, f"{path}, project {number}") for number, row in enumerate(rows, 1)]
    found: dict[str, Project] = {}
    for project in (release for listed in projects for release in listed.releases()):
        if project.key in found:
            raise CatalogError(f"{path}: {project.key} is listed twice; keep one")
        found[project.key] = project
    return found


def parse[Row: BaseModel](kind: type[Row], row: Any, place: str) -> Row:
    """One validated row. Raises `CatalogError` that names `place`, the key and the value."""
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the row"
        # Of a missing key, the input is the whole row.
        got = "" if first["type"] == "missing" else f", got {_brief(first['input'])}"
        raise CatalogError(f"{place}: {key}: {first['msg'].removeprefix('Value error, ')}{got}") from error


def reason(error: Exception) -> str:
    """What an error says in one line, without the path that an `OSError` repeats."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(said.split())


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _matching(tree: Path, patterns: Sequence[str], without: Sequence[str]) -> list[str]:
    paths = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*.py"))
    return [
        path
        for path in paths
        if any(fnmatch.fnmatchcase(path, each) for each in patterns)
        and not any(fnmatch.fnmatchcase(path, each) for each in without)
    ]
