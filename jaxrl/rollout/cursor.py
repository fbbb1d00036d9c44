"""Which tasks come next: one fixed order, read round after round."""

from collections.abc import Sequence
from typing import NamedTuple

from sandbox.tasks.schema import TaskSpec


class Ticket(NamedTuple):
    """A task whose turn it is. A cursor at `position` goes on with the ticket after this one."""

    epoch: int
    task: TaskSpec
    position: int


class TaskCursor:
    """Iterates over `tasks` in order without end. What is left of a round for no whole step is left out."""

    def __init__(self, tasks: Sequence[TaskSpec], *, per_step: int, position: int = 0) -> None:
        """`position` counts what was taken or left out since the run's start.

        Raises `ValueError` if `tasks` has fewer than the `per_step` tasks of a step.
        """
        total = len(tasks)
        if not 1 <= per_step <= total:
            raise ValueError(f"expected 1 to {total} tasks a step, got {per_step}: generate more tasks")
        self._tasks, self._whole = tasks, total - total % per_step
        self.position = position

    def __iter__(self) -> "TaskCursor":
        return self

    def __next__(self) -> Ticket:
        total = len(self._tasks)
        if self.position % total >= self._whole:
            self.position += total - self.position % total
        epoch, place = divmod(self.position, total)
        self.position += 1
        return Ticket(epoch, self._tasks[place], self.position)
