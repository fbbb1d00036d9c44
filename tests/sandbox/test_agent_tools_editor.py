"""`str_replace_editor` against a model of its files, and every mistake by its words."""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sandbox.agent_tools.base import Observation, for_episode, run_tool
from sandbox.agent_tools.openhands import NAMES, openhands_tools
from sandbox.agent_tools.str_replace_editor import UNDO_STEPS, Editor
from sandbox.base import SandboxError
from sandbox.tasks.schema import TaskSpec
from tests.sandbox.pty_double import PtySandbox

TASK = TaskSpec(instance_id="t", problem_statement="", files={}, workdir="/testbed")


class MemorySandbox:
    """Files in a dict; folders are what paths imply."""

    def __init__(self, files: Mapping[str, bytes] = {}) -> None:
        self.files = dict(files)
        self.full = False

    async def read(self, path: str) -> bytes:
        if path in self.files:
            return self.files[path]
        if path == "/" or any(name.startswith(f"{path}/") for name in self.files):
            raise IsADirectoryError(21, "Is a directory", path)
        if any(path.startswith(f"{name}/") for name in self.files):
            raise NotADirectoryError(20, "Not a directory", path)
        if "link" in path:
            raise OSError(40, "Too many levels of symbolic links", path)
        raise FileNotFoundError(2, "No such file or directory", path)

    async def write(self, path: str, content: bytes) -> None:
        if self.full:
            raise OSError(28, "No space left on device", path)
        self.files[path] = content


def edit(editor: Editor, sandbox: object, **arguments: str) -> Observation:
    return asyncio.run(run_tool({editor.name: editor}, editor.name, sandbox=sandbox, arguments=arguments))  # type: ignore[arg-type]


PATHS = st.sampled_from(["/testbed/a.py", "/testbed/d/b.py", "/tmp/c", "/testbed//d/./b.py"])
PIECES = st.sampled_from(["", "x", "x\n", "\n", "y = 1\n", "  x", "é\n", "x\ny"]) | st.text(
    "xy\n ", max_size=4
)


class EditorMachine(RuleBasedStateMachine):
    """The editor beside plain strings: every command, in any order, on several files."""

    @initialize()
    def start(self) -> None:
        self.sandbox, self.editor = MemorySandbox(), Editor(TASK)
        self.model: dict[str, str] = {}
        self.history: dict[str, list[str]] = {}

    def call(self, path: str, **arguments: str) -> Observation:
        return edit(self.editor, self.sandbox, path=path, **arguments)

    def changed(self, path: str, text: str, before: str) -> None:
        self.history[path] = [*self.history.get(path, []), before][-UNDO_STEPS:]
        self.model[path] = text

    @rule(path=PATHS, text=PIECES)
    def create(self, path: str, text: str) -> None:
        seen, path = self.call(path, command="create", file_text=text), path.replace("//d/./", "/d/")
        assert seen.error == (path in self.model)
        if not seen.error:
            self.changed(path, text, text)

    @rule(path=PATHS, old=PIECES, new=PIECES)
    def str_replace(self, path: str, old: str, new: str) -> None:
        seen = self.call(path, command="str_replace", old_str=old, new_str=new)
        path = path.replace("//d/./", "/d/")
        text = self.model.get(path)
        used = old if text is not None and old in text else old.strip()
        good = text is not None and old not in ("", new) and used != "" and occurrences(text, used) == 1
        assert seen.error != good, seen.text
        if good:
            assert text is not None
            self.changed(path, text.replace(used, new), text)

    @rule(path=PATHS, line=st.integers(-1, 6), new=PIECES)
    def insert(self, path: str, line: int, new: str) -> None:
        seen = self.call(path, command="insert", insert_line=str(line), new_str=new)
        path = path.replace("//d/./", "/d/")
        text = self.model.get(path)
        lines = (text or "").split("\n")
        lines = lines[:-1] if lines[-1] == "" else lines
        good = text is not None and 0 <= line <= len(lines)
        assert seen.error != good, seen.text
        if good:
            assert text is not None
            whole = "\n".join([*lines[:line], *new.split("\n"), *lines[line:]])
            ends = line == len(lines) or text.endswith("\n")
            self.changed(path, whole + "\n" * ends, text)
            first = max(line - 4, 0) + 1
            shown = seen.text.partition("\n")[2].splitlines()
            assert shown[0] == f"{first:6}\t{whole.splitlines()[first - 1] if whole else ''}"
            assert len(shown) <= 8 + len(new.split("\n"))

    @rule(path=PATHS)
    def undo_edit(self, path: str) -> None:
        seen, path = self.call(path, command="undo_edit"), path.replace("//d/./", "/d/")
        good = bool(self.history.get(path))
        assert seen.error != good, seen.text
        if good:
            self.model[path] = self.history[path].pop()

    @rule(path=PATHS, first=st.integers(0, 5), last=st.integers(-2, 8))
    def view(self, path: str, first: int, last: int) -> None:
        whole, part = (
            self.call(path, command="view"),
            self.call(path, command="view", view_range=f"[{first}, {last}]"),
        )
        path = path.replace("//d/./", "/d/")
        text = self.model.get(path)
        assert whole.error == (text is None)
        if text is None:
            return
        lines = text.removesuffix("\n").split("\n") if text else []
        numbers = [f"{number:6}\t{line}" for number, line in enumerate(lines, 1)]
        assert whole.text == "\n".join([f"[lines of {path}]", *numbers, ""])
        end = len(lines) if last == -1 else last
        assert part.error != (1 <= first <= len(lines) and end >= first)
        if not part.error:
            assert part.text.endswith("\n".join([f"[lines of {path}]", *numbers[first - 1 : end], ""]))
            assert part.text.startswith("[the file has only") == (end > len(lines))

    @invariant()
    def the_files_are_those_of_the_model(self) -> None:
        if hasattr(self, "model"):
            assert self.sandbox.files == {path: text.encode() for path, text in self.model.items()}


def occurrences(text: str, old: str) -> int:
    return len(re.findall(re.escape(old), text))


EditorMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
TestEditorModel = EditorMachine.TestCase

FILES = {
    "/testbed/a.py": b"one\ntwo\ntwo\n",
    "/testbed/d/b.py": b"",
    "/testbed/bin": b"\x7fELF\0\1",
    "/testbed/huge": b"x" * (10 * 2**20 + 1),
    "/testbed/dos.txt": b"one\r\ntwo\r\n",
    "/testbed/latin": b"caf\xe9 au lait, et cetera\n",
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": "view", "path": "a.py"}, "expected an absolute path, got 'a.py'; /testbed/a.py exists"),
        ({"command": "view", "path": "none.py"}, "expected an absolute path, got 'none.py'$"),
        ({"command": "view", "path": ""}, "expected an absolute path, got ''$"),
        ({"command": "view", "path": "/none"}, "/none does not exist"),
        ({"command": "view", "path": "/testbed/a.py/x"}, "does not exist"),
        ({"command": "insert", "path": "/testbed/d"}, "is a directory, which only view"),
        ({"command": "undo_edit", "path": "/testbed/d"}, "is a directory, which only view"),
        ({"command": "view", "path": "/testbed/d", "view_range": "[1, 2]"}, "only files have lines"),
        ({"command": "view", "path": "/testbed/bin"}, "binary"),
        ({"command": "str_replace", "path": "/testbed/bin", "old_str": "a", "new_str": "b"}, "binary"),
        ({"command": "view", "path": "/testbed/huge"}, "10485761 bytes; at most 10485760"),
        ({"command": "view", "path": "/testbed/link"}, "cannot be read: Too many levels of symbolic links"),
        ({"command": "create", "path": "/testbed/a.py", "file_text": "x"}, "exists already"),
        ({"command": "create", "path": "/testbed/d", "file_text": "x"}, "exists already"),
        ({"command": "create", "path": "/testbed/new"}, "missing argument file_text"),
        ({"command": "create", "path": "/testbed/new", "file_text": "\ud800"}, "UTF-8 cannot hold"),
        ({"command": "str_replace", "path": "/testbed/a.py", "new_str": "x"}, "missing argument old_str"),
        ({"command": "str_replace", "path": "/testbed/a.py", "old_str": "x"}, "missing argument new_str"),
        (
            {"command": "str_replace", "path": "/testbed/a.py", "old_str": "x", "new_str": "y"},
            "does not occur",
        ),
        (
            {"command": "str_replace", "path": "/testbed/a.py", "old_str": "", "new_str": "y"},
            "old_str is empty",
        ),
        (
            {"command": "str_replace", "path": "/testbed/a.py", "old_str": "two", "new_str": "y"},
            "in lines 2, 3",
        ),
        (
            {"command": "str_replace", "path": "/testbed/a.py", "old_str": "one", "new_str": "one"},
            "are equal",
        ),
        ({"command": "insert", "path": "/testbed/a.py", "new_str": "x"}, "missing argument insert_line"),
        ({"command": "insert", "path": "/testbed/a.py", "insert_line": "1"}, "missing argument new_str"),
        ({"command": "insert", "path": "/testbed/a.py", "insert_line": "x", "new_str": "x"}, "expected JSON"),
        ({"command": "insert", "path": "/testbed/a.py", "insert_line": "1.5", "new_str": "x"}, "an integer"),
        ({"command": "insert", "path": "/testbed/a.py", "insert_line": "true", "new_str": "x"}, "an integer"),
        (
            {"command": "insert", "path": "/testbed/a.py", "insert_line": "4", "new_str": "x"},
            "expected 0 to 3",
        ),
        ({"command": "view", "path": "/testbed/a.py", "view_range": "[1]"}, "two integers"),
        ({"command": "view", "path": "/testbed/a.py", "view_range": "1, 2"}, "expected JSON"),
        ({"command": "view", "path": "/testbed/a.py", "view_range": '["1", 2]'}, "two integers"),
        (
            {"command": "view", "path": "/testbed/a.py", "view_range": "[0, 2]"},
            "a first line of 1 to 3, got 0",
        ),
        (
            {"command": "view", "path": "/testbed/a.py", "view_range": "[4, 5]"},
            "a first line of 1 to 3, got 4",
        ),
        ({"command": "view", "path": "/testbed/a.py", "view_range": "[3, 2]"}, "a last line of at least 3"),
        ({"command": "undo_edit", "path": "/testbed/a.py"}, "no edit of /testbed/a.py is left"),
        ({"command": "open", "path": "/testbed/a.py"}, "expected one of view, create, .*, got 'open'"),
        ({"command": "view"}, "missing argument path"),
        (
            {"command": "view", "path": "/x", "line": "1"},
            "unexpected argument line; allowed: command, path, ",
        ),
    ],
)
def test_every_mistake_is_told(arguments: dict[str, str], message: str) -> None:
    sandbox = MemorySandbox(FILES)
    seen = edit(Editor(TASK), sandbox, **arguments)
    assert seen.error and re.search(message, seen.text), seen.text
    assert sandbox.files == FILES


def test_a_full_disk_is_told_and_is_no_edit() -> None:
    sandbox, editor = MemorySandbox(FILES), Editor(TASK)
    sandbox.full = True
    seen = edit(editor, sandbox, command="str_replace", path="/testbed/a.py", old_str="one", new_str="1")
    assert seen.error and "cannot be written: No space left" in seen.text
    sandbox.full = False
    assert edit(editor, sandbox, command="undo_edit", path="/testbed/a.py").error


def test_line_ends_and_bytes_that_were_not_edited_stay() -> None:
    sandbox, editor = MemorySandbox(FILES), Editor(TASK)
    seen = edit(
        editor, sandbox, command="str_replace", path="/testbed/dos.txt", old_str="one\ntwo", new_str="1\n2"
    )
    assert not seen.error and sandbox.files["/testbed/dos.txt"] == b"1\r\n2\r\n" and "\r" not in seen.text
    seen = edit(editor, sandbox, command="str_replace", path="/testbed/latin", old_str="lait", new_str="thé")
    assert sandbox.files["/testbed/latin"] == "caf\udce9 au thé, et cetera\n".encode(errors="surrogateescape")
    assert "caf\ufffd au thé" in seen.text


def test_ten_edits_of_a_file_can_be_taken_back() -> None:
    sandbox, editor = MemorySandbox(FILES), Editor(TASK)
    for number in range(12):
        edit(editor, sandbox, command="insert", path="/testbed/d/b.py", insert_line="0", new_str=str(number))
    taken = [edit(editor, sandbox, command="undo_edit", path="/testbed/d/b.py").error for _ in range(11)]
    assert taken == [False] * 10 + [True] and sandbox.files["/testbed/d/b.py"] == b"1\n0\n"
    assert edit(Editor(TASK), sandbox, command="undo_edit", path="/testbed/d/b.py").error  # another episode


def test_snippets_show_four_lines_around() -> None:
    sandbox = MemorySandbox({"/f": b"".join(b"line %d\n" % n for n in range(1, 21))})
    seen = edit(
        Editor(TASK), sandbox, command="str_replace", path="/f", old_str="line 10\n", new_str="a\nb\n"
    )
    numbers = [int(line[:6]) for line in seen.text.splitlines()[1:]]
    assert numbers == list(range(7, 17)) and "    10\ta\n    11\tb\n    12\tline 11\n" in seen.text
    seen = edit(Editor(TASK), sandbox, command="insert", path="/f", insert_line="0", new_str="top")
    assert seen.text.splitlines()[1:] == [
        f"     {n}\t{line}" for n, line in enumerate(["top", *(f"line {n}" for n in range(1, 5))], 1)
    ]


def test_long_files_are_clipped() -> None:
    seen = edit(Editor(TASK), MemorySandbox({"/f": b"x\n" * 20_000}), command="view", path="/f")
    assert "<response clipped>" in seen.text and "  8000\tx\n" in seen.text and "  8002\t" not in seen.text


def test_a_directory_is_listed_two_levels_deep(tmp_path: Path) -> None:
    for name in (
        "b.py",
        "pkg/m.py",
        "pkg/sub/deep.py",
        "pkg/.hid",
        ".git/config",
        ".env",
        "a b",
        "pkg.py",
        "empty/.x",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    seen = edit(Editor(TASK), PtySandbox(tmp_path), command="view", path=f"{tmp_path}/")
    names = ["/", "/a b", "/b.py", "/empty/", "/pkg/", "/pkg/m.py", "/pkg/sub/", "/pkg.py"]
    hidden = ["", "[2 hidden entries of this directory left out; ls -la shows them]"]
    assert seen.text.splitlines() == [
        f"[two levels of {tmp_path}]",
        *(f"{tmp_path}{name}" for name in names),
        *hidden,
    ]
    inside = edit(Editor(TASK), PtySandbox(tmp_path), command="view", path=f"{tmp_path}/.git")
    assert inside.text.endswith("/.git/config") and "hidden" not in inside.text
    for number in range(2000):
        (tmp_path / f"{number:012}").touch()
    assert (
        "<response clipped>"
        in edit(Editor(TASK), PtySandbox(tmp_path), command="view", path=str(tmp_path)).text
    )


ANY = st.text(max_size=8) | st.sampled_from(
    ["view", "create", "str_replace", "insert", "undo_edit", "plan", "[1, -1]", "/f", "[{}]", "3", "[" * 3000]
)
NAMED = st.sampled_from(
    [
        "command",
        "path",
        "file_text",
        "old_str",
        "new_str",
        "insert_line",
        "view_range",
        "thought",
        "message",
        "task_list",
        "other",
    ]
)


@settings(deadline=None)
@given(
    st.sampled_from([*(name for name in NAMES if name != "execute_bash"), "rm"]), st.dictionaries(NAMED, ANY)
)
def test_any_arguments_give_an_observation(name: str, arguments: dict[str, str]) -> None:
    tools = for_episode(openhands_tools(), TASK)
    sandbox = MemorySandbox({"/f": b"text\n"})
    seen = asyncio.run(run_tool(tools, name, sandbox=sandbox, arguments=arguments))  # type: ignore[arg-type]
    assert isinstance(seen.text, str) and (not seen.finished or name == "finish")


def test_a_sandbox_that_fails_is_no_observation() -> None:
    class Gone(MemorySandbox):
        async def read(self, path: str) -> bytes:
            raise SandboxError("gone")

    with pytest.raises(SandboxError):
        edit(Editor(TASK), Gone(), command="view", path="/f")
