"""JSON lines survive cuts at any byte, full disks, and readers that come while they grow."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.feed import jsonl
from jaxrl.feed.jsonl import Appender, JsonlWriter, encode, read_rows

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2)
)
ROWS = st.lists(st.dictionaries(st.text(), VALUES, min_size=1, max_size=4), max_size=6)


def write_rows(path: Path, rows: list) -> None:
    writer = JsonlWriter(path)
    assert all(map(writer.write, rows))
    writer.close()


@given(before=ROWS, after=ROWS, data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_cut_at_any_byte_costs_only_the_row_it_hits(before, after, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, before)
        lines = path.read_bytes().splitlines(keepends=True)
        cut = data.draw(st.integers(0, sum(map(len, lines))))
        os.truncate(path, cut)
        write_rows(path, after)
        starts = np.cumsum([0, *map(len, lines)])
        whole = sum(end - 1 <= cut for end in starts[1:]) if after else sum(end <= cut for end in starts[1:])
        assert read_rows(path).rows == before[:whole] + after


@given(rows=ROWS, data=st.data())
@settings(deadline=None, max_examples=60)
def test_reading_in_pieces_gives_what_reading_at_once_gives(rows, data):
    with tempfile.TemporaryDirectory() as folder:
        whole, growing = Path(folder) / "whole.jsonl", Path(folder) / "growing.jsonl"
        write_rows(whole, rows)
        content = whole.read_bytes()
        cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
        seen, offset = [], 0
        for cut in [*cuts, len(content)]:
            growing.write_bytes(content[:cut])
            tail = read_rows(growing, offset)
            seen, offset = seen + tail.rows, tail.offset
        assert seen == rows
        assert offset == len(content)


def test_a_missing_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl", 7) == ([], 7, 0)


def test_torn_lines_are_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":\n[1]\n\xff\n\n{"a":2}\n{"a":3')
    assert read_rows(path) == ([{"a": 1}, {"a": 2}], path.stat().st_size - 6, 3)


@given(st.lists(st.floats() | st.tuples(st.floats(), st.floats()), max_size=5))
def test_non_finite_numbers_become_null_and_are_named(values):
    row = json.loads(encode({"m": {f"x{index}": value for index, value in enumerate(values)}}))
    expected = []
    for index, value in enumerate(values):
        for part, number in enumerate(value if isinstance(value, tuple) else [value]):
            read = row["m"][f"x{index}"][part] if isinstance(value, tuple) else row["m"][f"x{index}"]
            assert read == (number if math.isfinite(number) else None)
            if not math.isfinite(number):
                expected.append(f"m.x{index}.{part}" if isinstance(value, tuple) else f"m.x{index}")
    assert row.get("nonfinite", []) == expected


def test_numpy_values_are_plain_data():
    row = json.loads(
        encode({"a": np.float32(0.5), "b": np.arange(2), "c": np.float64("nan"), "d": np.int32(3)})
    )
    assert row == {"a": 0.5, "b": [0, 1], "c": None, "d": 3, "nonfinite": ["c"]}


def test_a_value_that_json_cannot_hold_is_a_mistake_of_the_caller(tmp_path):
    with pytest.raises(TypeError):
        JsonlWriter(tmp_path / "rows.jsonl").write({"a": object()})


def test_a_full_disk_is_counted_and_not_raised():
    appender = Appender(Path("/dev/full"))
    assert appender.append(b"row\n") is None
    assert appender.lost == 1


def test_a_row_half_written_on_a_full_disk_does_not_spoil_the_next(tmp_path, monkeypatch):
    real_write, budget = os.write, [15]

    def short_write(file: int, content: memoryview) -> int:
        if budget[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real_write(file, content[: budget[0]])
        budget[0] -= written
        return written

    monkeypatch.setattr(jsonl.os, "write", short_write)
    writer = JsonlWriter(tmp_path / "rows.jsonl")
    assert [writer.write({"row": index}) for index in range(4)] == [True, False, False, False]
    budget[0] = 1000
    assert writer.write({"row": 4})
    assert writer.lost == 3
    assert read_rows(tmp_path / "rows.jsonl").rows == [{"row": 0}, {"row": 4}]


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        JsonlWriter(tmp_path / "file" / "rows.jsonl")


WRITE_FOREVER = """
import itertools, sys
from pathlib import Path
from jaxrl.feed.jsonl import JsonlWriter
writer = JsonlWriter(Path(sys.argv[1]))
for index in itertools.count():
    writer.write({"row": index, "pad": "x" * 1000})
    print(index, flush=True)
"""


def test_a_killed_writer_loses_no_row_that_it_reported(tmp_path):
    path = tmp_path / "rows.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOREVER, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert process.stdout is not None
    reported = [int(process.stdout.readline()) for _ in range(200)]
    process.send_signal(signal.SIGKILL)
    reported += [int(line) for line in process.communicate()[0].splitlines() if line]
    write_rows(path, [{"row": -1}])
    rows = [row["row"] for row in read_rows(path).rows]
    assert rows[: len(reported)] == reported
    assert rows[-1] == -1
