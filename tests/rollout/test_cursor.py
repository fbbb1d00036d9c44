"""The task cursor: fixed order, whole steps, epochs."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.rollout.cursor import TaskCursor
from sandbox.tasks.schema import TaskSpec

TASKS = tuple(TaskSpec(instance_id=f"t{i}", problem_statement="", files={}) for i in range(10))


@given(st.integers(1, 10), st.integers(1, 35))
def test_every_round_has_the_same_tasks_in_the_same_order_in_whole_steps(per_step, count):
    seen: dict[int, list[str]] = {}
    for ticket in islice(TaskCursor(TASKS, per_step=per_step), count):
        seen.setdefault(ticket.epoch, []).append(ticket.task.instance_id)
    whole = 10 - 10 % per_step
    assert list(seen) == list(range(-(-count // whole)))
    for epoch, names in seen.items():
        assert names == [f"t{i}" for i in range(min(whole, count - epoch * whole))]


@given(st.integers(1, 10), st.integers(0, 30))
def test_a_cursor_goes_on_from_the_position_of_any_ticket(per_step, cut):
    expected = list(islice(TaskCursor(TASKS, per_step=per_step), cut + 12))
    position = expected[cut - 1].position if cut else 0
    resumed = TaskCursor(TASKS, per_step=per_step, position=position)
    assert list(islice(resumed, 12)) == expected[cut:]


def test_too_large_a_step_says_what_to_do():
    with pytest.raises(ValueError, match="1 to 10 tasks a step, got 11: generate more"):
        TaskCursor(TASKS, per_step=11)
