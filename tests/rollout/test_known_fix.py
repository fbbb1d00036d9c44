"""A known fix becomes tool calls that make it, exactly; a script says them token by token."""

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.contracts import Generator, SampleKey, Sampling, Session
from jaxrl.rollout.calls import Call, parse_calls, render_call
from jaxrl.rollout.known_fix import fix_turns, replacements
from jaxrl.rollout.scripted import Scripted
from sandbox.agent_tools.str_replace_editor import StrReplaceEditor
from sandbox.tasks.schema import TaskSpec
from tests.rollout.rollout_fakes import END, TOKENIZER

TEXT = st.lists(st.sampled_from(["a\n", "b\n", "  a\n", "\n", "c", "ab\n"])).map("".join)
SPEC = TaskSpec(instance_id="one", problem_statement="It fails.", files={})


class Folder:
    """As much of a sandbox as the editor uses."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    async def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    async def write(self, path: str, content: bytes) -> None:
        self.files[path] = content


@given(before=TEXT.filter(str.strip), after=TEXT)
def test_replacements_make_the_new_text_and_are_unique(before: str, after: str) -> None:
    text = before
    for old, new in replacements(before, after):
        assert text.count(old) == 1 and old != new
        text = text.replace(old, new)
    assert text == after


def test_a_small_change_stays_small() -> None:
    before = "def f(a):\n    x = a\n    return x\n\ndef g(a):\n    x = a\n    return 2\n"
    ((old, new),) = replacements(before, before.replace("return 2", "return 3"))
    assert (old, new) == ("    return 2", "    return 3")
    ((old, _),) = replacements(before, before.replace("    x = a\n    return 2", "    x = b\n    return 2"))
    assert old == "def g(a):\n    x = a\n    return 2"  # more lines, until it is unique


def played(before: dict[str, bytes | None], after: dict[str, bytes | None]) -> dict[str, bytes]:
    """Files after the editor's calls, each read back from its text as the agent loop does."""
    files = {f"/testbed/{path}": data for path, data in before.items() if data is not None}
    folder, editor = Folder(files), StrReplaceEditor().open(SPEC)

    async def run() -> None:
        for turn in fix_turns(before, after, harness="openhands", workdir="/testbed"):
            for call in turn:
                (read,) = parse_calls(render_call(call.name, call.arguments)).calls
                if read.name == "str_replace_editor":
                    seen = await editor.run(folder, read.arguments)  # type: ignore[arg-type]
                    assert not seen.error, seen.text

    asyncio.run(run())
    return {path.removeprefix("/testbed/"): data for path, data in files.items()}


@given(before=TEXT.filter(str.strip), after=TEXT, crlf=st.booleans())
def test_the_editor_makes_the_fix(before: str, after: str, crlf: bool) -> None:
    old, new = (
        text.replace("\n", "\r\n").encode() if crlf and "\n" in before and "\n" in after else text.encode()
        for text in (before, after)
    )
    made = played({"a.py": old, "same.py": b"x"}, {"a.py": new, "same.py": b"x"})
    assert made == {"a.py": new, "same.py": b"x"}


def test_new_files_are_created() -> None:
    assert played({"new/b.py": None}, {"new/b.py": b"x = 1\n"}) == {"new/b.py": b"x = 1\n"}


def bash_commands(before: bytes | None, after: bytes | None) -> list[str]:
    turns = fix_turns({"a b": before}, {"a b": after}, harness="openhands", workdir="/testbed")
    return [call.arguments["command"] for turn in turns[1:] for call in turn if call.name == "execute_bash"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"\0\1", b"\0\2"),
        (b"x\n", b"x\r\n"),
        (b"", b"x\n"),
        (b"x\n", b"'</parameter>'\n"),
        (None, b"\xff\n"),
        (b"a\n", b"a \xff\n" * 9),
    ],
    ids=["binary", "line ends", "was empty", "markup", "no UTF-8", "some of it no UTF-8"],
)
def test_what_the_editor_cannot_carry_goes_through_the_shell(before: bytes | None, after: bytes) -> None:
    (command,) = bash_commands(before, after)
    assert "base64 -d > '/testbed/a b'" in command
    assert max(len(line) for line in command.splitlines()) < 200


def test_deleted_files_are_removed_and_unchanged_ones_left_alone() -> None:
    assert bash_commands(b"x", None) == ["rm -- '/testbed/a b'"]
    assert bash_commands(b"x", b"x") == []


def test_compact_refuses_what_it_cannot_do() -> None:
    turns = fix_turns({"a": b"x\n"}, {"a": b"y\n"}, harness="compact", workdir="/testbed")
    assert [call.name for turn in turns for call in turn] == ["view", "str_replace", "finish"]
    with pytest.raises(ValueError, match="a: expected a change within a file"):
        fix_turns({"a": b"x\n"}, {"a": None}, harness="compact", workdir="/testbed")


def test_a_script_is_said_turn_by_turn_and_cut_where_a_model_would_be() -> None:
    turns = {"one": [(Call(name="view", arguments={"path": "é"}), Call(name="finish"))]}
    generator = Scripted(turns, tokenizer=TOKENIZER, context=99)
    session = generator.open_session()
    assert isinstance(generator, Generator) and isinstance(session, Session)

    def said(turn: int, most: int):
        key = SampleKey(0, "one", 0, 0, turn)
        stop = (TOKENIZER.special(END),)
        return asyncio.run(
            session.generate([5, 6], key=key, sampling=Sampling(), max_tokens=most, stop_ids=stop)
        )

    whole = said(0, 99)
    assert whole.finish == "stop" and session.length == 2 + len(whole.tokens)
    text = TOKENIZER.decode(whole.tokens)
    assert re.fullmatch(r"<tool_call>.*é.*</tool_call>\n<tool_call>.*</tool_call><\|im_end\|>", text, re.S)
    assert said(0, 4).finish == "length" and said(0, 4).tokens == whole.tokens[:4]
    assert said(1, 99).tokens == [TOKENIZER.special(END)]  # the script has ended
