"""Finished groups as bytes, to be kept with a checkpoint: an NPZ archive that holds every field.

An array field of all trajectories lies end to end in one array; `index` is JSON with everything else and says
what is whose. Floats survive bit by bit. Damage is noticed by who keeps the bytes: the ledger of a
checkpoint has their digest.
"""

import io
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from jaxrl.contracts import Outcome, Trajectory, TrajectoryGroup, Turn

SCHEMA = 1
FIELDS = tuple(field.name for field in fields(Trajectory))


def encode_groups(groups: Sequence[TrajectoryGroup]) -> bytes:
    """The groups as the bytes of an NPZ archive."""
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    rows = [
        {"task": group.task, "epoch": group.epoch, "rows": [_row(t, columns) for t in group.trajectories]}
        for group in groups
    ]
    index = json.dumps({"schema": SCHEMA, "groups": rows}).encode()
    content = io.BytesIO()
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    np.savez(content, index=np.frombuffer(index, np.uint8), **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def decode_groups(content: bytes) -> list[TrajectoryGroup]:
    """What `encode_groups` was given.

    Raises `ValueError` for another schema.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        arrays = dict(archive)
    index = json.loads(arrays.pop("index").tobytes())
    if index["schema"] != SCHEMA:
        raise ValueError(
            f"expected groups of schema {SCHEMA}, got {index['schema']}: use the jaxrl that wrote them"
        )
    rows = [row for group in index["groups"] for row in group["rows"]]
    columns = {name: _pieces(name, array, rows) for name, array in arrays.items()}
    return [_group(group, columns) for group in index["groups"]]


def _row(trajectory: Trajectory, columns: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """The plain fields, and which arrays there are; those go to `columns`."""
    values = {name: getattr(trajectory, name) for name in FIELDS}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    for name, value in arrays.items():
        columns[name].append(value)
    plain = {name: value for name, value in values.items() if name not in arrays}
    return plain | {
        "turns": [list(turn) for turn in trajectory.turns],
        "timings": dict(trajectory.timings),
        "lengths": {name: len(value) for name, value in arrays.items()},
    }


def _pieces(name: str, array: np.ndarray, rows: Sequence[dict[str, Any]]) -> Iterator[np.ndarray]:
    stops = np.cumsum([row["lengths"][name] for row in rows if name in row["lengths"]])
    return iter(np.split(array, stops[:-1]))


def _group(group: dict[str, Any], columns: dict[str, Iterator[np.ndarray]]) -> TrajectoryGroup:
    trajectories = tuple(_trajectory(row, columns) for row in group["rows"])
    return TrajectoryGroup(task=group["task"], epoch=group["epoch"], trajectories=trajectories)


def _trajectory(row: dict[str, Any], columns: dict[str, Iterator[np.ndarray]]) -> Trajectory:
    arrays: dict[str, Any] = {name: next(columns[name]) for name in row.pop("lengths")}
    turns = tuple(Turn(*turn) for turn in row.pop("turns"))
    return Trajectory(turns=turns, outcome=Outcome(row.pop("outcome")), **row, **arrays)
