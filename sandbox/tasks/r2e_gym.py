"""The benchmark's tasks: its JSONL file, read row by row in its order, and its SIF images.

The file is passed over once to check it; what the agent may see stays in memory, hidden tests are read
again from their row when the grader asks. Only fields of an allow-list reach a `TaskSpec`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.base import Image
from sandbox.tasks.catalog import reason
from sandbox.tasks.r2e_tests import node_ids
from sandbox.tasks.schema import SuiteTests, TaskSpec

TESTS_FOLDER = "r2e_tests"  # in the working directory
PYTHON = "/testbed/.venv/bin/python"
_INSTANCE = re.compile(r"[\w.-]+__(?P<repo>[\w.-]+)-(?P<commit>[0-9a-f]{40})")
_PASSED_ON = ("repo", "version", "hints_text")  # beside the id, the issue and its commit


class RowsError(ValueError):
    """The file is not what was expected: names file, row, key, value, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the whole file must be. `None`: not checked."""

    sha256: str | None = None
    rows: int | None = None


class R2EGymTasks:
    """An ordered task set (see `TaskSet`) over one file of rows; `images` is the folder of SIF files.

    Raises `RowsError` for a file with another hash or count than `expected`, an unreadable row, or an
    id that comes twice. Images are not opened here: `missing_images` lists those that are not there.
    """

    def __init__(self, path: Path, images: Path, *, expected: Expected = Expected()) -> None:
        self._path, self._images = path, images
        self._places: dict[str, tuple[int, int]] = {}  # id → row number, byte offset
        specs, hasher = [], hashlib.sha256()
        for number, offset, line in _lines(path):
            hasher.update(line)
            spec = self._spec(number, line)
            if spec.instance_id in self._places:
                raise RowsError(f"{path}, row {number}: instance_id {spec.instance_id} came before; keep one")
            self._places[spec.instance_id] = number, offset
            specs.append(spec)
        self.specs: Sequence[TaskSpec] = tuple(specs)
        self.digest = hasher.hexdigest()
        self._check(expected)

    def __len__(self) -> int:
        return len(self.specs)

    def hidden(self, instance_id: str) -> SuiteTests:
        """The hidden tests of one task, for the grader only. Raises `KeyError`, `RowsError`."""
        if instance_id not in self._places:
            raise KeyError(f"expected an instance id of these {len(self)} rows, got {instance_id!r}")
        number, offset = self._places[instance_id]
        with self._path.open("rb") as file:
            file.seek(offset)
            row = _Row(self._path, number, file.readline())
        return _suite(row)

    def missing_images(self) -> list[Path]:
        """SIF files that tasks need and the folder lacks, in row order."""
        roots = [spec.image.root for spec in self.specs if spec.image.root is not None]
        return [root for root in roots if not root.is_file()]

    def _spec(self, number: int, line: bytes) -> TaskSpec:
        row = _Row(self._path, number, line)
        name = row.text("instance_id")
        parts = _INSTANCE.fullmatch(name)
        if parts is None:
            raise row.error("instance_id", name, "owner__repo-<40 hex digits>")
        sif = self._images / f"{parts['repo'].lower()}_final_{parts['commit']}.sif"
        image = Image(root=sif, name=row.details.get("docker_image"), python=PYTHON)
        return TaskSpec(
            instance_id=name,
            problem_statement=row.text("problem_statement"),
            files={},
            image=image,
            base_commit=row.text("base_commit"),
            command_timeout=120.0,
            agent_timeout=1800.0,
            tests_timeout=300.0,
            concealed=(TESTS_FOLDER,),
            tags={"family": "r2e_gym", **{key: str(row.metadata.get(key, "")) for key in _PASSED_ON}},
        )

    def _check(self, expected: Expected) -> None:
        if expected.rows is not None and len(self) != expected.rows:
            raise RowsError(f"{self._path}: expected {expected.rows} rows, got {len(self)}; fetch it again")
        if expected.sha256 is not None and self.digest != expected.sha256:
            raise RowsError(
                f"{self._path}: expected sha256 {expected.sha256}, got {self.digest}; fetch it again"
            )


class _Row:
    """One parsed row: its `metadata`, and the `details` that its instance_dict holds."""

    def __init__(self, path: Path, number: int, line: bytes) -> None:
        self._place = f"{path}, row {number}"
        row = self._object("the row", _json(line))
        request = self._object("responses_create_params", row.get("responses_create_params"))
        self.metadata = self._object("metadata", request.get("metadata"))
        self.details = self.nested("instance_dict", self.metadata)

    def nested(self, key: str, within: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A JSON object that `within` (the details, if None) holds as a string."""
        text = (self.details if within is None else within).get(key)
        return self._object(key, _json(text) if isinstance(text, str) else text)

    def text(self, key: str) -> str:
        """A non-empty string of the metadata."""
        value = self.metadata.get(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, value, "a non-empty string")
        return value

    def strings(self, key: str, within: Mapping[str, Any]) -> list[str]:
        """A list of strings."""
        value = within.get(key)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(key, value, "a list of strings")
        return value

    def error(self, key: str, value: object, expected: str) -> RowsError:
        """What is wrong at `key`."""
        return RowsError(
            f"{self._place}: {key}: expected {expected}, got {value!r:.200}; fetch the file again"
        )

    def _object(self, key: str, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(key, value, "a JSON object")
        return value


def _suite(row: _Row) -> SuiteTests:
    expected = {name: str(status) for name, status in row.nested("expected_output_json").items()}
    results = row.nested("execution_result_content")
    names, codes = row.strings("test_file_names", results), row.strings("test_file_codes", results)
    if len(names) != len(codes):
        raise row.error("test_file_names", names, f"{len(codes)} names, one for each of test_file_codes")
    files = {f"{TESTS_FOLDER}/{name}": code for name, code in zip(names, codes, strict=True)}
    return SuiteTests(
        instance_id=row.text("instance_id"),
        files={path: code.encode() for path, code in files.items()},
        fail_to_pass=tuple(
            node_ids(files, [name for name, status in expected.items() if status == "PASSED"])
        ),
        pass_to_pass=(),
        reference=_fix(row),
        expected=expected,
    )


def _fix(row: _Row) -> dict[str, bytes | None]:
    """New contents of the commit's files outside of tests; empty if the row does not hold them whole."""
    diffs = row.nested("parsed_commit_content").get("file_diffs")
    found: dict[str, bytes | None] = {}
    for diff in diffs if isinstance(diffs, list) else ():
        path = diff.get("header", {}).get("file", {}).get("path") if isinstance(diff, dict) else None
        content = diff.get("new_file_content") if isinstance(diff, dict) else None
        if not isinstance(path, str) or not isinstance(content, str):
            return {}
        if not re.search(r"(^|/)tests?(/|_)|(^|/)test_|_test\.py$", path):
            found[path] = content.encode() or None
    return found


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(row number from 1, byte offset, line). Raises `RowsError`."""
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield number, offset, line
                offset += len(line)
    except OSError as error:
        raise RowsError(f"{path}: expected the benchmark's JSONL file: {reason(error)}") from error


def _json(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text[:80]  # no object: the caller says what was expected
