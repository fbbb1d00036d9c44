"""The tools that touch no file: `think`, `finish` and `task_tracker`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sandbox.agent_tools.arguments import BadArgumentError, parsed
from sandbox.agent_tools.base import Observation, check, failure
from sandbox.base import Sandbox
from sandbox.tasks.schema import TaskSpec

_MARKS = {"todo": " ", "in_progress": "~", "done": "x"}


@dataclass(frozen=True, kw_only=True)
class Think:
    """Takes a thought, which changes nothing."""

    name: str = "think"
    parameters: tuple[str, ...] = ("thought", "security_risk")
    required: tuple[str, ...] = ("thought",)

    async def run(self, sandbox: Sandbox, arguments: Mapping[str, str]) -> Observation:
        """See `Tool.run`."""
        return check(self, arguments) or Observation("[noted]")


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Ends the episode with a message."""

    name: str = "finish"
    parameters: tuple[str, ...] = ("message", "task_completed", "security_risk")
    required: tuple[str, ...] = ("message",)

    async def run(self, sandbox: Sandbox, arguments: Mapping[str, str]) -> Observation:
        """See `Tool.run`."""
        return check(self, arguments) or Observation("", finished=True)


@dataclass(frozen=True)
class _Item:
    title: str
    status: str
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskTracker:
    """The tool; each episode opens a list of its own."""

    name: str = "task_tracker"
    parameters: tuple[str, ...] = ("command", "task_list", "security_risk")
    required: tuple[str, ...] = ("command",)

    def open(self, task: TaskSpec) -> "TaskList":
        """The tool of one episode."""
        return TaskList()


@dataclass
class TaskList:
    """`task_tracker` of one episode."""

    items: Sequence[_Item] = ()
    name: str = TaskTracker.name
    parameters: tuple[str, ...] = TaskTracker.parameters
    required: tuple[str, ...] = field(default=TaskTracker.required)

    async def run(self, sandbox: Sandbox, arguments: Mapping[str, str]) -> Observation:
        """See `Tool.run`."""
        if wrong := check(self, arguments):
            return wrong
        command = arguments["command"].strip()
        if command == "view":
            return Observation(self._text())
        if command != "plan":
            return failure(f"command: expected plan or view, got {command[:80]!r}")
        try:
            self.items = _items(arguments)
        except BadArgumentError as error:
            return failure(str(error))
        count = len(self.items)
        return Observation(f"[the list now has {count} task{'s' * (count != 1)}]\n{self._text()}")

    def _text(self) -> str:
        if not self.items:
            return "[no tasks; the command plan sets them]"
        lines = (
            f"{number}. [{_MARKS[item.status]}] {item.title} ({item.status})"
            + (f"\n   {item.notes}" if item.notes else "")
            for number, item in enumerate(self.items, 1)
        )
        return "\n".join(lines)


def _items(arguments: Mapping[str, str]) -> Sequence[_Item]:
    written = parsed(arguments, "task_list")
    if not isinstance(written, list):
        raise BadArgumentError("task_list: expected a JSON list of tasks")
    return [_item(number, each) for number, each in enumerate(written, 1)]


def _item(number: int, written: object) -> _Item:
    """One task. `id` is accepted, as the benchmark's schema has it, and the order counts."""
    where = f"task_list, task {number}"
    if not isinstance(written, dict):
        raise BadArgumentError(f"{where}: expected an object with title and status")
    known = {key: value for key, value in written.items() if key in ("title", "status", "notes")}
    if wrong := [key for key, value in known.items() if not isinstance(value, str)]:
        raise BadArgumentError(f"{where}: expected a text for {wrong[0]}")
    if not known.get("title", "").strip():
        raise BadArgumentError(f"{where}: missing title")
    status = known.get("status", "todo")
    if status not in _MARKS:
        raise BadArgumentError(f"{where}: expected a status of {', '.join(_MARKS)}, got {status[:80]!r}")
    return _Item(known["title"], status, known.get("notes", ""))
