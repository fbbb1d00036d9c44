"""Finished groups as bytes: every field of every trajectory comes back, bit by bit."""

import io
import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.contracts import Outcome, Trajectory, TrajectoryGroup, Turn
from jaxrl.rollout.group_codec import decode_groups, encode_groups

floats = st.floats(width=32, allow_nan=True, allow_infinity=True)
text = st.text(max_size=5)


@st.composite
def rows(draw, task: str, epoch: int, sample: int) -> dict[str, Any]:
    """Fields of a trajectory. The type checker samples at random, which a strategy must not."""
    length = draw(st.integers(0, 4))
    column = lambda values: st.lists(values, min_size=length, max_size=length)  # noqa: E731
    return dict(
        task=task,
        epoch=epoch,
        sample=sample,
        tokens=np.array(draw(column(st.integers(0, 2**31 - 1))), np.int32),
        loss_mask=np.array(draw(column(st.booleans())), bool),
        logprobs=np.array(draw(column(floats)), np.float32),
        full_logprobs=np.array(draw(column(floats)), np.float32),
        versions=np.array(draw(column(st.integers(-1, 99))), np.int32),
        turns=tuple(draw(st.lists(st.just(Turn("tool", 0, length)), max_size=2))),
        outcome=draw(st.sampled_from(Outcome)),
        reward=draw(st.none() | st.floats(0, 1)),
        timings=draw(st.dictionaries(text, st.floats(0, 1e9), max_size=2)),
        detail=draw(text),
        routed_experts=draw(st.none() | st.just(np.arange(length * 6, dtype=np.int16).reshape(length, 2, 3))),
    )


@st.composite
def some_groups(draw) -> list[tuple[str, int, list[dict[str, Any]]]]:
    return [
        (task, epoch, [draw(rows(task, epoch, g)) for g in range(draw(st.integers(1, 3)))])
        for epoch, task in enumerate(draw(st.lists(text, max_size=3)))
    ]


@given(some_groups())
def test_every_field_comes_back(drawn):
    groups = [
        TrajectoryGroup(task=task, epoch=epoch, trajectories=tuple(Trajectory(**each) for each in members))
        for task, epoch, members in drawn
    ]
    back = decode_groups(encode_groups(groups))
    assert [(g.task, g.epoch) for g in back] == [(g.task, g.epoch) for g in groups]
    pairs = [
        pair
        for a, b in zip(groups, back, strict=True)
        for pair in zip(a.trajectories, b.trajectories, strict=True)
    ]
    for one, other in pairs:
        for field in fields(Trajectory):
            left, right = getattr(one, field.name), getattr(other, field.name)
            if isinstance(left, np.ndarray):
                assert left.dtype == right.dtype and left.tobytes() == right.tobytes()
            else:
                assert left == right and type(left) is type(right)


def test_another_schema_is_refused():
    with np.load(io.BytesIO(encode_groups([]))) as archive:
        arrays = dict(archive)
    index = json.loads(arrays["index"].tobytes()) | {"schema": 99}
    arrays["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)
    content = io.BytesIO()
    np.savez(content, **arrays)
    with pytest.raises(ValueError, match="schema 1, got 99"):
        decode_groups(content.getvalue())
