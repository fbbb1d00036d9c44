"""Definitions of project tasks as they are committed: how to make each, and hashes of what comes out."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sandbox.tasks.catalog import CatalogError, Sha256, Text, parse, reason
from sandbox.tasks.mutation.sites import OPERATORS

Paths = Annotated[list[Text], Field(min_length=1)]


def _known_operator(name: str) -> str:
    if name not in OPERATORS:
        raise ValueError(f"expected one of {', '.join(OPERATORS)}")
    return name


class _Recipe(BaseModel):
    """`tests` are the hidden test files; node ids are pytest's. `seconds`: their wall time as found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance_id: Text
    project: Text  # its key in the catalogue
    tests: Paths
    fail_to_pass: Paths
    problem: Text
    seconds: float


class MutationRecipe(_Recipe):
    """`path`'s bytes `start` to `end` become `replacement`; all stable ids of `tests` must pass again."""

    kind: Literal["mutation"] = "mutation"
    path: Text
    operator: Annotated[str, AfterValidator(_known_operator)]
    start: int
    end: int
    replacement: str
    before: Sha256  # of the file
    after: Sha256


class ReleaseRecipe(_Recipe):
    """The change from `project` to the release `fixed`: `code` is its fix, `tests` its new tests."""

    kind: Literal["release_diff"] = "release_diff"
    fixed: Text  # key in the catalogue
    code: Paths
    pass_to_pass: list[Text]


class _Suite(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    project: Text
    files: dict[Text, list[Text]]


Recipe = MutationRecipe | ReleaseRecipe
Suites = Mapping[str, Mapping[str, list[str]]]  # project → test file → ids that pass every time
_KINDS: Mapping[str, type[MutationRecipe] | type[ReleaseRecipe]] = {
    "mutation": MutationRecipe,
    "release_diff": ReleaseRecipe,
}


def load_recipes(path: Path) -> list[Recipe]:
    """Recipes of a JSONL file, in its order. Raises `CatalogError` naming file, line, key and value."""
    recipes: list[Recipe] = []
    seen: set[str] = set()
    for number, row in _rows(path):
        kind = row.get("kind") if isinstance(row, dict) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            raise CatalogError(
                f"{path}, line {number}: kind: expected one of {', '.join(_KINDS)}, got {kind!r}"
            )
        recipe = parse(_KINDS[kind], row, f"{path}, line {number}")
        if recipe.instance_id in seen:
            raise CatalogError(
                f"{path}, line {number}: instance_id: {recipe.instance_id} came before; keep one"
            )
        seen.add(recipe.instance_id)
        recipes.append(recipe)
    return recipes


def save_recipes(path: Path, recipes: Iterable[Recipe]) -> None:
    """Replaces `path`, one recipe a line."""
    lines = [json.dumps(recipe.model_dump(), ensure_ascii=False) + "\n" for recipe in recipes]
    _replace(path, "".join(lines))


def load_suites(path: Path) -> dict[str, dict[str, list[str]]]:
    """Stable node ids by project and test file; empty if there is no such file. Raises `CatalogError`."""
    if not path.exists():
        return {}
    rows = [parse(_Suite, row, f"{path}, line {number}") for number, row in _rows(path)]
    return {row.project: row.files for row in rows}


def save_suites(path: Path, suites: Suites) -> None:
    """Replaces `path`, one project a line."""
    rows = [{"project": key, "files": suites[key]} for key in sorted(suites)]
    _replace(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise CatalogError(f"{path}: expected a JSONL file: {reason(error)}") from error
    for number, line in enumerate(lines, 1):
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise CatalogError(f"{path}, line {number}: expected a JSON object: {error}") from error


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
