"""`str_replace_editor`: views and edits files by absolute path, and takes edits back."""

import posixpath
import re
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.agent_tools.arguments import BadArgumentError, integer, parsed, text
from sandbox.agent_tools.base import Observation, check, failure
from sandbox.agent_tools.edits import (
    CONTEXT,
    EditError,
    clip,
    excerpt,
    insert,
    line_count,
    numbered,
    replace,
)
from sandbox.agent_tools.listing import listing
from sandbox.agent_tools.text_file import NotTextError, TextFile
from sandbox.base import Sandbox
from sandbox.tasks.schema import TaskSpec

COMMANDS = ("view", "create", "str_replace", "insert", "undo_edit")
UNDO_STEPS = 10  # of each file
_IN_FILE = "find the lines with grep -n, then view them with view_range"
_IN_FOLDER = "list its parts one by one"


@dataclass(frozen=True, kw_only=True)
class StrReplaceEditor:
    """The tool; each episode opens one of its own, with its own history of edits."""

    name: str = "str_replace_editor"
    parameters: tuple[str, ...] = (
        "command",
        "path",
        "file_text",
        "old_str",
        "new_str",
        "insert_line",
        "view_range",
        "security_risk",
    )
    required: tuple[str, ...] = ("command", "path")

    def open(self, task: TaskSpec) -> "Editor":
        """The tool of one episode."""
        return Editor(task)


@dataclass(frozen=True)
class _Directory:
    """What a path leads to, if not to a file."""


class Editor:
    """`str_replace_editor` of one episode."""

    name = StrReplaceEditor.name
    parameters = StrReplaceEditor.parameters
    required = StrReplaceEditor.required

    def __init__(self, task: TaskSpec) -> None:
        self._workdir, self._timeout = task.workdir, task.command_timeout
        self._history: dict[str, deque[bytes]] = defaultdict(lambda: deque(maxlen=UNDO_STEPS))

    async def run(self, sandbox: Sandbox, arguments: Mapping[str, str]) -> Observation:
        """See `Tool.run`."""
        if wrong := check(self, arguments):
            return wrong
        try:
            return Observation(await self._edit(sandbox, arguments))
        except (BadArgumentError, EditError, NotTextError) as error:
            return failure(str(error))

    async def _edit(self, sandbox: Sandbox, arguments: Mapping[str, str]) -> str:
        command, path = arguments["command"].strip(), arguments["path"].strip()
        if command not in COMMANDS:
            raise EditError(f"command: expected one of {', '.join(COMMANDS)}, got {command[:80]!r}")
        if not path.startswith("/"):
            raise EditError(await self._not_absolute(sandbox, path))
        path = posixpath.normpath("/" + path.lstrip("/"))
        found = await _find(sandbox, path)
        if command == "create":
            return await self._create(sandbox, path, arguments, found)
        if found is None:
            raise EditError(f"path: {path} does not exist")
        if isinstance(found, _Directory):
            return await self._view_directory(sandbox, path, command, arguments)
        file = TextFile.parse(found)
        if command == "view":
            return _view(path, file, arguments)
        if command == "undo_edit":
            return await self._undo(sandbox, path)
        return await self._change(sandbox, path, command, arguments, before=found, file=file)

    async def _not_absolute(self, sandbox: Sandbox, path: str) -> str:
        meant = posixpath.normpath(posixpath.join(self._workdir, path))
        exists = bool(path) and await _find(sandbox, meant) is not None
        hint = f"; {meant} exists" if exists else ""
        return f"path: expected an absolute path, got {path[:200]!r}{hint}"

    async def _view_directory(
        self, sandbox: Sandbox, path: str, command: str, arguments: Mapping[str, str]
    ) -> str:
        if command != "view":
            raise EditError(f"path: {path} is a directory, which only view can handle")
        if "view_range" in arguments:
            raise EditError(f"view_range: only files have lines, and {path} is a directory")
        listed = await listing(sandbox, path, self._timeout)
        if listed is None:
            raise EditError(f"path: listing {path} took too long")
        return clip(f"[two levels of {path}]\n{listed}", _IN_FOLDER)

    async def _create(
        self, sandbox: Sandbox, path: str, arguments: Mapping[str, str], found: bytes | _Directory | None
    ) -> str:
        if found is not None:
            raise EditError(f"path: {path} exists already, and create never overwrites")
        content = _encoded(TextFile(""), text(arguments, "file_text"))
        await _write(sandbox, path, content)
        self._history[path].append(content)
        return f"[created {path}]"

    async def _change(
        self,
        sandbox: Sandbox,
        path: str,
        command: str,
        arguments: Mapping[str, str],
        *,
        before: bytes,
        file: TextFile,
    ) -> str:
        if command == "str_replace":
            new = text(arguments, "new_str")
            after, line = replace(file.text, text(arguments, "old_str"), new)
            added = new.count("\n")
        else:
            line, new = integer(arguments, "insert_line"), text(arguments, "new_str")
            after, added = insert(file.text, line, new), new.count("\n") + 1
        await _write(sandbox, path, _encoded(file, after))
        self._history[path].append(before)
        first = max(line - CONTEXT, 0) + 1
        shown = numbered(clip(excerpt(after, first, line + CONTEXT + added), _IN_FILE), first)
        return f"[edited {path}; the lines around the change are now]\n{_readable(shown)}"

    async def _undo(self, sandbox: Sandbox, path: str) -> str:
        if not self._history[path]:
            raise EditError(f"no edit of {path} is left to take back")
        content = self._history[path].pop()
        await _write(sandbox, path, content)
        shown = numbered(clip(TextFile.parse(content).text, _IN_FILE))
        return f"[took back the last edit of {path}; the file is now]\n{_readable(shown)}"


def _view(path: str, file: TextFile, arguments: Mapping[str, str]) -> str:
    first, last, note = 1, line_count(file.text), ""
    if "view_range" in arguments:
        first, last, note = _range(arguments, last)
    shown = numbered(clip(excerpt(file.text, first, last), _IN_FILE), first)
    return f"{note}[lines of {path}]\n{_readable(shown)}"


def _range(arguments: Mapping[str, str], count: int) -> tuple[int, int, str]:
    """(first line, last line, note) of `view_range` in a file of `count` lines."""
    value = parsed(arguments, "view_range")
    if not isinstance(value, list) or len(value) != 2 or any(type(each) is not int for each in value):
        raise BadArgumentError(f"view_range: expected two integers [first, last], got {str(value)[:80]}")
    first, last = value
    if not 1 <= first <= count:
        raise BadArgumentError(f"view_range: expected a first line of 1 to {count}, got {first}")
    note = f"[the file has only {count} lines]\n" if last > count else ""
    last = count if last == -1 or last > count else last
    if last < first:
        raise BadArgumentError(f"view_range: expected a last line of at least {first}, or -1, got {last}")
    return first, last, note


async def _find(sandbox: Sandbox, path: str) -> bytes | _Directory | None:
    """The content of a file; None if there is nothing. Raises `EditError` for what is neither."""
    try:
        return await sandbox.read(path)
    except IsADirectoryError:
        return _Directory()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise EditError(f"path: {_readable(path)[:200]} cannot be read: {_reason(error)}") from error


async def _write(sandbox: Sandbox, path: str, content: bytes) -> None:
    try:
        await sandbox.write(path, content)
    except (OSError, ValueError) as error:
        raise EditError(f"path: {path} cannot be written: {_reason(error)}") from error


def _encoded(file: TextFile, new: str) -> bytes:
    try:
        return file.content(new)
    except UnicodeEncodeError:
        raise EditError("the text holds characters that UTF-8 cannot hold") from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _readable(shown: str) -> str:
    """`shown` with U+FFFD for bytes that are no UTF-8."""
    return re.sub("[\ud800-\udfff]", "\ufffd", shown)
