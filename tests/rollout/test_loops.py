"""When an agent counts as stuck: a pure function of its steps."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jaxrl.rollout.loops import Step, stuck_in_loop

A = Step(action=("", "execute_bash", "ls"), observation="a.py")
B = Step(action=("", "execute_bash", "cat a.py"), observation="x = 1")
WRONG = Step(action=("", "execute_bash", "\n"), observation="error: 1", error=True)
MESSAGE = Step(action=("I am done.",))


def others(count: int) -> list[Step]:
    return [Step(action=("", "think", str(number)), observation="[noted]") for number in range(count)]


def first_stuck(steps: list[Step]) -> int | None:
    """After how many steps the agent is stuck, None if never."""
    return next((count for count in range(len(steps) + 1) if stuck_in_loop(steps[:count])), None)


def test_the_same_call_with_the_same_result_four_times() -> None:
    assert first_stuck([A] * 6) == 4
    assert first_stuck([*others(5), A, A, B, A, A, A, A]) == 12
    assert first_stuck([replace(A, observation=str(number)) for number in range(9)]) is None
    assert first_stuck([replace(A, action=("", "execute_bash", str(number))) for number in range(9)]) is None
    assert first_stuck([replace(A, action=(f"thought {n}", "execute_bash", "ls")) for n in range(9)]) is None


def test_the_same_call_with_any_errors_three_times() -> None:
    assert first_stuck([replace(WRONG, observation=f"error: {number}") for number in range(4)]) == 3
    assert first_stuck([WRONG, replace(WRONG, error=False), WRONG, replace(WRONG, action=("b",))]) is None


def test_two_calls_in_turn_over_six_steps() -> None:
    assert first_stuck([A, B] * 5) == 6
    assert first_stuck([*others(3), B, A, B, A, B, A]) == 9
    assert first_stuck([A, B, A, B, A, replace(B, observation="x = 2"), A, B]) is None


def test_the_same_message_three_times() -> None:
    assert first_stuck([MESSAGE] * 4) == 3
    assert first_stuck([MESSAGE, MESSAGE, A, MESSAGE, MESSAGE]) is None
    assert first_stuck([replace(MESSAGE, action=(str(number),)) for number in range(5)]) is None
    assert first_stuck([A, A, MESSAGE, A, A]) == 5  # a message between does not break a loop of calls


STEPS = st.lists(st.sampled_from([A, B, WRONG, MESSAGE, replace(A, observation="b.py")]), max_size=14)


@given(STEPS)
def test_only_what_came_last_counts(steps: list[Step]) -> None:
    assert stuck_in_loop([]) == ""
    if stuck_in_loop(steps):
        assert stuck_in_loop([*others(4), *steps])
        assert not stuck_in_loop([*steps, *others(1)])


@given(STEPS)
def test_fewer_than_three_steps_are_no_loop(steps: list[Step]) -> None:
    assert not stuck_in_loop(steps[:2])
    assert not stuck_in_loop([])
