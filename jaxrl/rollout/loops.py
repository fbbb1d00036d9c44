"""Whether an agent goes in circles: a pure function of what it did and saw."""

from collections.abc import Sequence
from dataclasses import dataclass

REPEATS, ERRORS, MESSAGES, ALTERNATIONS = 4, 3, 3, 6


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call and what it showed. A turn without a call is a step without an observation."""

    action: tuple[str, ...]  # the text before the call, the tool, the arguments
    observation: str | None = None
    error: bool = False


def stuck_in_loop(steps: Sequence[Step]) -> str:
    """Why the agent counts as stuck after these steps, "" if it does not.

    One call with one result four times in a row, one call with any errors three times, one message
    three times, or two calls with their results in turn over six steps.
    """
    last = steps[-1] if steps else None
    if last is None:
        return ""
    if last.observation is None and _all_equal(steps, MESSAGES):
        return f"the same message {MESSAGES} times"
    acted = [step for step in steps if step.observation is not None]
    if last.observation is None or not acted:
        return ""
    if _all_equal(acted, REPEATS):
        return f"the same call with the same result {REPEATS} times"
    tail = acted[-ERRORS:]
    if len(tail) == ERRORS and all(step.error and step.action == last.action for step in tail):
        return f"the same call with an error {ERRORS} times"
    tail = acted[-ALTERNATIONS:]
    pairs = zip(tail, tail[2:], strict=False)
    if len(tail) == ALTERNATIONS and all(_same(one, other) for one, other in pairs):
        return f"two calls in turn over {ALTERNATIONS} steps"
    return ""


def _all_equal(steps: Sequence[Step], count: int) -> bool:
    tail = steps[-count:]
    return len(tail) == count and all(_same(step, tail[0]) for step in tail)


def _same(one: Step, other: Step) -> bool:
    return one.action == other.action and one.observation == other.observation
