"""Faults of definitions and of what the cache holds: one line that names file, place and value, once."""

import json
from pathlib import Path

import pytest

from sandbox.images import intact
from sandbox.images.cache import ImageBuildError, built
from sandbox.tasks.build import Definitions
from sandbox.tasks.catalog import CatalogError, load_catalog
from sandbox.tasks.recipes import load_recipes, load_suites
from sandbox.tasks.validate import load_report
from tests.sandbox.mini_project import catalogue
from tests.sandbox.test_tasks_build import cache, definitions, mutation, pair  # noqa: F401 (fixtures)


def test_faults_of_recipe_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "recipes.jsonl"
    row = mutation().model_dump()
    lacking = {key: value for key, value in row.items() if key != "path"}
    for rows, message in (
        ([{**row, "kind": "other"}], "recipes.jsonl, line 1: kind: expected one of mutation, release_diff"),
        ([row, {**row, "start": "x"}], "line 2: start: .*got 'x'"),
        ([row, row], "line 2: instance_id: counts-1.0__one came before"),
        ([{**row, "extra": 1}], "line 1: extra: "),
        ([{**row, "tests": []}], "line 1: tests: "),
        ([{**row, "operator": "swap"}], "line 1: operator: expected one of comparison, .*, got 'swap'$"),
        ([lacking], "line 1: path: Field required$"),
        ([7], "line 1: kind: "),
    ):
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        with pytest.raises(CatalogError, match=message):
            load_recipes(path)
    path.write_text(json.dumps(row) + "\n{\n")
    with pytest.raises(CatalogError, match="recipes.jsonl, line 2: expected a JSON object"):
        load_recipes(path)
    with pytest.raises(
        CatalogError, match=r"expected mutation.jsonl or release_diff.jsonl; there is neither"
    ):
        Definitions(tmp_path).recipes()


def test_a_path_and_a_record_are_said_once(tmp_path: Path) -> None:
    nothing = tmp_path / "none.jsonl"
    for load in (load_recipes, load_catalog):
        with pytest.raises(CatalogError) as fault:
            load(nothing)
        assert str(fault.value).count(str(nothing)) == 1 and "No such file" in str(fault.value)
    path = tmp_path / "some.jsonl"
    row = pair().model_dump() | {"seconds": "long " * 100}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(CatalogError) as fault:
        load_recipes(path)
    assert len(str(fault.value)) < len(str(path)) + 200 and "\n" not in str(fault.value)


def test_faults_of_suites_and_reports_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"project": "a", "files": {"t": ["1"]}}\n{"project": "b"}\n')
    with pytest.raises(CatalogError, match=r"rows.jsonl, line 2: files: Field required$"):
        load_suites(path)
    with pytest.raises(CatalogError, match=r"rows.jsonl, line 1: expected a proof .* delete the line$"):
        load_report(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\n", "expected a list of projects, got dict"),
        ("- [\n", "expected a YAML list"),
        (catalogue("a" * 64) * 2, "counts-1.0 is listed twice"),
        (catalogue("a" * 63), "project 1: sha256: "),
        (catalogue("a" * 64).replace("licence: MIT", "license: MIT"), "project 1: licen[cs]e: "),
    ],
)
def test_faults_of_the_catalogue_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "projects.yaml"
    path.write_text(text)
    with pytest.raises(CatalogError, match=message):
        load_catalog(path)


def test_what_was_changed_in_the_cache_is_refused(definitions: Definitions) -> None:  # noqa: F811
    task, _ = definitions.task(mutation())
    assert task.image.source is not None
    tree = definitions.project("counts-1.0").tree()
    for place in (tree, task.image.source):
        forget()
        file = place / "src" / "counts.py"
        content = file.read_bytes()
        file.write_bytes(content + b"\n")
        with pytest.raises(
            ImageBuildError, match=rf"{place}: expected content of digest .* delete this folder"
        ):
            definitions.task(mutation())
        file.write_bytes(content)
        forget()
        assert definitions.task(mutation())[0] == task
    record = tree.with_name(f"{tree.name}.sha256")
    record.unlink()
    with pytest.raises(ImageBuildError, match="expected the digest of its content beside it"):
        definitions.task(mutation())


def test_additions_links_and_branches_are_changes(tmp_path: Path) -> None:
    place = tmp_path / "place"
    built(place, lambda top: (top / "a").touch(), recorded=True)
    for change, back in (
        (lambda: (place / "b").write_text(""), (place / "b").unlink),
        (lambda: (place / "b").symlink_to("a"), (place / "b").unlink),
        (lambda: (place / "a").chmod(0o755), lambda: (place / "a").chmod(0o644)),
    ):
        assert intact.damage(place) is None
        change()
        forget()
        assert "it was changed" in str(intact.damage(place))
        back()
        forget()


def forget() -> None:
    """As in a new process."""
    intact._seen.clear()
