"""The benchmark's rows: synthesised to its published schema, since no real row is at hand."""

import hashlib
import json
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.tasks.r2e_gym import PYTHON, Expected, R2EGymTasks, RowsError
from sandbox.tasks.r2e_tests import node_ids

REPOS = ("numpy/numpy", "python-pillow/Pillow", "tornadoweb/tornado")
SECRETS = ("GOLD PATCH", "expected_output_json", "test_secret", "FIXED = 1", "r2e_tests")
Details = dict[str, Any]


def row(number: int, change: Callable[[Details, Details], None] = lambda details, metadata: None) -> bytes:
    commit = hashlib.sha1(str(number).encode()).hexdigest()
    owner, repo = REPOS[number % len(REPOS)].split("/")
    details: Details = {
        "FAIL_TO_PASS": [],
        "PASS_TO_PASS": [],
        "instance_id": f"{owner}__{repo}-{commit}",
        "docker_image": f"namanjain12/{repo.lower()}_final:{commit}",
        "prompt": "GOLD PATCH",
        "parsed_commit_content": json.dumps(
            {
                "file_diffs": [
                    {"header": {"file": {"path": "pkg/core.py"}}, "new_file_content": "FIXED = 1\n"},
                    {"header": {"file": {"path": "pkg/tests/test_core.py"}}, "new_file_content": "no\n"},
                ]
            }
        ),
        "execution_result_content": json.dumps(
            {"test_file_names": ["test_1.py"], "test_file_codes": ["def test_secret(): pass\n"]}
        ),
        "expected_output_json": json.dumps({"test_secret": "PASSED", "TestA.test_b": "FAILED"}),
    }
    metadata = {
        "instance_id": details["instance_id"],
        "base_commit": "b" * 40,
        "problem_statement": f"Issue {number}",
        "hints_text": "",
        "version": "",
        "repo": f"{owner}/{repo}",
    }
    change(details, metadata)
    metadata.setdefault("instance_dict", json.dumps(details))
    agent = {"type": "responses_api_agents", "name": "swe_agents_train"}
    request = {"input": [], "metadata": metadata, "model": "default"}
    return json.dumps({"responses_create_params": request, "agent_ref": agent}).encode() + b"\n"


def written(folder: Path, rows: list[bytes]) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(rows))
    return path


@pytest.mark.parametrize("count", [0, 1, 25])
def test_order_count_and_hash_are_the_files(tmp_path: Path, count: int) -> None:
    numbers = random.Random(count).sample(range(1000), count)
    path = written(tmp_path, [row(number) for number in numbers])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    tasks = R2EGymTasks(path, tmp_path, expected=Expected(sha256=digest, rows=count))
    assert [spec.problem_statement for spec in tasks.specs] == [f"Issue {number}" for number in numbers]
    assert len(tasks) == count and tasks.digest == digest
    assert all(tasks.hidden(spec.instance_id).instance_id == spec.instance_id for spec in tasks.specs)


def test_what_the_agent_sees_holds_none_of_the_answer(tmp_path: Path) -> None:
    tasks = R2EGymTasks(written(tmp_path, [row(1)]), tmp_path)
    (spec,) = tasks.specs
    assert spec.concealed == ("r2e_tests",)  # for the harness, not for the prompt
    seen = repr(asdict(replace(spec, concealed=())))
    assert not [secret for secret in SECRETS if secret in seen]
    commit = spec.instance_id[-40:]
    assert spec.base_commit == "b" * 40 and spec.language == "python"
    assert spec.image.root == tmp_path / f"pillow_final_{commit}.sif"
    assert spec.image.name == f"namanjain12/pillow_final:{commit}" and spec.image.python == PYTHON
    assert (spec.command_timeout, spec.agent_timeout, spec.tests_timeout) == (120, 1800, 300)
    assert tasks.missing_images() == [spec.image.root]
    (tmp_path / f"pillow_final_{commit}.sif").touch()
    assert tasks.missing_images() == []


def test_hidden_tests_come_from_the_row(tmp_path: Path) -> None:
    tasks = R2EGymTasks(written(tmp_path, [row(4), row(5)]), tmp_path)
    suite = tasks.hidden(tasks.specs[1].instance_id)
    assert suite.files == {"r2e_tests/test_1.py": b"def test_secret(): pass\n"}
    assert suite.expected == {"test_secret": "PASSED", "TestA.test_b": "FAILED"}
    assert suite.fail_to_pass == ("r2e_tests/test_1.py::test_secret",)
    assert suite.reference == {"pkg/core.py": b"FIXED = 1\n"}
    with pytest.raises(KeyError, match="2 rows"):
        tasks.hidden("other")


def test_large_files_are_never_whole_in_memory(tmp_path: Path) -> None:
    def heavy(details: Details, metadata: Details) -> None:
        details["padding"] = "x" * (1 << 20)

    path = written(tmp_path, [row(number, heavy) for number in range(24)])
    tracemalloc.start()
    try:
        tasks = R2EGymTasks(path, tmp_path)
        tasks.hidden(tasks.specs[-1].instance_id)
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 3
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("expected", "message"),
    [(Expected(rows=3), "expected 3 rows, got 2"), (Expected(sha256="0" * 64), "expected sha256 0000")],
)
def test_another_file_is_refused(tmp_path: Path, expected: Expected, message: str) -> None:
    with pytest.raises(RowsError, match=message):
        R2EGymTasks(written(tmp_path, [row(1), row(2)]), tmp_path, expected=expected)


def spoiled(key: str, value: object, *, details: bool = False) -> Callable[[Details, Details], None]:
    def change(inner: Details, metadata: Details) -> None:
        (inner if details else metadata)[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            spoiled("instance_id", "numpy"),
            r"row 2: instance_id: expected owner__repo-<40 hex digits>, got 'numpy'",
        ),
        (spoiled("instance_id", "../__x/../y-" + "a" * 40), "row 2: instance_id"),
        (spoiled("problem_statement", ""), "row 2: problem_statement: expected a non-empty string, got ''"),
        (spoiled("instance_dict", "{"), "row 2: instance_dict: expected a JSON object, got '{'"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, change: Callable, message: str) -> None:
    with pytest.raises(RowsError, match=message):
        R2EGymTasks(written(tmp_path, [row(1), row(2, change)]), tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expected_output_json", "[]", "expected_output_json: expected a JSON object"),
        ("execution_result_content", json.dumps({"test_file_names": 1}), "test_file_names: expected a list"),
        (
            "execution_result_content",
            json.dumps({"test_file_names": ["a", "b"], "test_file_codes": ["c"]}),
            "expected 1 names",
        ),
    ],
)
def test_bad_hidden_parts_are_named(tmp_path: Path, key: str, value: str, message: str) -> None:
    tasks = R2EGymTasks(written(tmp_path, [row(1, spoiled(key, value, details=True))]), tmp_path)
    with pytest.raises(RowsError, match=message):
        tasks.hidden(tasks.specs[0].instance_id)


def test_no_json_no_file_and_equal_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RowsError, match="row 1: the row: expected a JSON object"):
        R2EGymTasks(written(tmp_path, [b"nothing\n"]), tmp_path)
    with pytest.raises(RowsError, match="row 2: instance_id .* came before"):
        R2EGymTasks(written(tmp_path, [row(1), row(1)]), tmp_path)
    with pytest.raises(RowsError, match="expected the benchmark's JSONL file"):
        R2EGymTasks(tmp_path / "none.jsonl", tmp_path)


NAMES = st.from_regex(r"test_[a-z]{1,4}", fullmatch=True)


@given(st.lists(NAMES, unique=True, min_size=1, max_size=6), st.integers(1, 3), st.randoms())
def test_names_get_the_file_that_defines_them(names: list[str], count: int, chance: random.Random) -> None:
    homes = {name: chance.randrange(count) for name in names}
    files = {
        f"r2e_tests/test_{k}.py": "class TestK:\n def other(self): pass\n"
        + "".join(f"def {name}(): pass\n" for name in names if homes[name] == k)
        for k in range(count)
    }
    asked = [f"{name}[1.5-a::b]" for name in names]
    assert node_ids(files, asked) == [f"r2e_tests/test_{homes[name]}.py::{name}[1.5-a::b]" for name in names]


def test_names_that_cannot_be_told_give_no_ids_at_all() -> None:
    files = {"a.py": "class T:\n def test_x(self): pass\n", "b.py": "class T:\n def test_x(self): pass\n"}
    assert node_ids(files, ["T.test_x"]) == []
    assert node_ids({"a.py": "def test_y(): pass\n", "b.py": ""}, ["test_y", "inherited"]) == []
    assert node_ids({"a.py": "print 'old python'"}, ["T.test_x"]) == ["a.py::T::test_x"]
