"""Which tasks come next: one fixed order, read round after round."""

from collections.abc import Sequence

from sandbox.tasks.schema import TaskSpec


class TaskCursor:
    """Reads `tasks` in order without end; `position` counts what was taken since the run's start."""

    def __init__(self, tasks: Sequence[TaskSpec], *, position: int = 0) -> None:
        """Raises `ValueError` for no tasks."""
        if not tasks:
            raise ValueError("expected at least one task, got none")
        self._tasks, self.position = tasks, position

    def take(self, count: int) -> tuple[int, Sequence[TaskSpec]]:
        """(epoch, the next `count` tasks). A step never spans two epochs: a short rest is left out.

        Raises `ValueError` if the set is smaller than `count`.
        """
        total = len(self._tasks)
        if not 1 <= count <= total:
            raise ValueError(f"expected 1 to {total} tasks a step, got {count}: generate more tasks")
        if self.position % total + count > total:
            self.position += total - self.position % total
        start = self.position % total
        epoch = self.position // total
        self.position += count
        return epoch, self._tasks[start : start + count]
