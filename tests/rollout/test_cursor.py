"""The task cursor: fixed order, whole steps, epochs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.rollout.cursor import TaskCursor
from sandbox.tasks.schema import TaskSpec

TASKS = tuple(TaskSpec(instance_id=f"t{i}", problem_statement="", files={}) for i in range(10))


@given(st.lists(st.integers(1, 10), min_size=1, max_size=8))
def test_no_task_comes_twice_in_an_epoch_and_the_order_is_fixed(counts):
    cursor = TaskCursor(TASKS)
    seen: dict[int, list[str]] = {}
    for count in counts:
        epoch, taken = cursor.take(count)
        assert len(taken) == count
        seen.setdefault(epoch, []).extend(task.instance_id for task in taken)
    for names in seen.values():
        assert names == [f"t{i}" for i in range(len(names))]


@given(st.lists(st.integers(1, 10), min_size=2, max_size=8), st.data())
def test_a_cursor_goes_on_from_its_position(counts, data):
    cut = data.draw(st.integers(1, len(counts) - 1))
    whole, first = TaskCursor(TASKS), TaskCursor(TASKS)
    expected = [whole.take(count) for count in counts][cut:]
    for count in counts[:cut]:
        first.take(count)
    resumed = TaskCursor(TASKS, position=first.position)
    assert [resumed.take(count) for count in counts[cut:]] == expected


def test_too_large_a_step_says_what_to_do():
    with pytest.raises(ValueError, match="1 to 10 tasks a step, got 11: generate more"):
        TaskCursor(TASKS).take(11)
