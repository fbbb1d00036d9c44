"""Pure parts of the tools: the screen, command counting, normalising, edits."""

import ast
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.agent_tools.commands import split_commands
from sandbox.agent_tools.edits import EditError, clip, excerpt, insert, line_count, numbered, replace
from sandbox.agent_tools.normalise import Normaliser
from sandbox.agent_tools.screen import HISTORY_LINES, Screen
from sandbox.agent_tools.text_file import MAX_SIZE, NotTextError, TextFile

ROOT = Path(__file__).parents[2]


def shown(*chunks: bytes) -> str:
    screen = Screen()
    for chunk in chunks:
        screen.feed(chunk)
    return screen.text()


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (b"one\r\ntwo\r\n", "one\ntwo\n"),
        (b"10%\r 50%\r100%\r\n", "100%\n"),
        (b"longer\rshort\r\n", "shortr\n"),
        (b"longer\r\x1b[Kshort\n", "short\n"),
        (b"ab\x08c\n", "ac\n"),
        (b"\x1b[31mred\x1b[0m \x1b[1;32mgreen\x1b[m\n", "red green\n"),
        (b"\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", "textlink\n"),
        (b"a\x1b[5Cb\x1b[2Dc\n", "a    cb\n"),
        (b"\x1b(Bx\x1b=y\x1b7z\n", "xyz\n"),
        (b"bell\x07 nul\x00 del\x7f\n", "bell nul del\n"),
        (b"\ttab\tkept\n", "\ttab\tkept\n"),
        (b"caf\xc3\xa9 \xff\n", "café \ufffd\n"),
        (b"12345\x1b[3D\x1b[1Kx\x1b[2K\n", "\n"),
        (b"12345\x1b[2G\x1b[2P\n", "145\n"),
        (b"trailing   \r\n", "trailing\n"),
        (b"\x1b[99999999999999999999C!\n", " " * 10_000 + "!\n"),
    ],
)
def test_a_screen_shows_what_a_reader_would_see(output: bytes, text: str) -> None:
    assert shown(output) == text
    assert shown(*(output[at : at + 1] for at in range(len(output)))) == text  # split anywhere


@given(
    st.lists(st.binary(max_size=12) | st.sampled_from([b"\x1b[", b"\x1b]", b"\r", b"\n", b"3K"]), max_size=12)
)
def test_a_screen_takes_any_bytes_and_any_split(chunks: list[bytes]) -> None:
    whole, parts = shown(b"".join(chunks)), shown(*chunks)
    assert whole == parts
    assert not any(ord(character) < 32 and character not in "\t\n" for character in whole.replace("\x1b", ""))


@given(st.text(st.characters(min_codepoint=32, exclude_categories=["Cc", "Cs"]) | st.just("\n"), max_size=80))
def test_a_screen_leaves_plain_text_alone(text: str) -> None:
    assert shown(text.encode()) == "\n".join(line.rstrip(" ") for line in text.split("\n"))


def test_a_screen_remembers_a_bounded_history() -> None:
    text = shown(b"".join(b"%d\n" % number for number in range(12_000)))
    assert text.count("\n") < HISTORY_LINES and text.endswith("\n11999\n") and text.startswith("2001\n")
    flood = Screen()
    for _ in range(40):
        flood.feed(b"x" * 1_000_000)
    assert len(flood.text()) <= 80_000
    for _ in range(20):
        flood.feed((b"y" * 999 + b"\n") * 500)
    assert len(flood.text()) < 5_000_000


SPLIT = {
    "a\nb": 2,
    "a; b && c | d &": 1,
    "a &\nb": 2,
    "cat <<EOF\nx\ny\nEOF": 1,
    "cat <<'EOF' > f && echo\nx $y\nEOF\necho b": 2,
    "for i in 1 2; do\n echo $i\ndone": 1,
    "f() {\n echo 1\n}\nf": 2,
    "a && \\\n b": 1,
    "a |\n b": 1,
    "if true; then\n a\nelse\n b\nfi": 1,
    "case x in\n a) b;;\nesac": 1,
    "echo 'a\nb' \"c\nd\"": 1,
    "(a\nb)": 1,
    "x=$(ls\nls)": 1,
    "# note\na # more\n# end": 1,
    "a\n\n# note\n\nb\n": 2,
    "python - <<'PY'\nimport x\nPY\n": 1,
    "\\\nls": 1,
    "while read x; do echo $x; done <<EOF\n1\nEOF\necho": 2,
    'git commit -m "a\n\nb"': 1,
    "echo é\necho ü\necho": 3,
    'echo "never closed\nb': 1,
    "": 1,
    "# only a note": 1,
}


@pytest.mark.parametrize(("text", "count"), SPLIT.items())
def test_commands_are_counted_as_bash_reads_them(text: str, count: int) -> None:
    parts = split_commands(text)
    assert len(parts) == count
    assert "".join("".join(parts).split()) == "".join(text.split())


@pytest.mark.parametrize("text", [text for text, count in SPLIT.items() if count > 1])
def test_each_part_is_whole_for_bash_itself(text: str) -> None:
    for part in split_commands(text):
        checked = subprocess.run(["bash", "-n"], input=part, text=True, capture_output=True, check=False)
        assert checked.returncode == 0 and not checked.stderr


def test_no_character_ends_the_process() -> None:
    """In a process of its own, which the grammar alone does end."""
    every = "[split_commands('{' + chr(code)) for code in range(0x80, 0x110000, 61)]"
    program = f"from sandbox.agent_tools.commands import split_commands; print(len({every}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{len(range(0x80, 0x110000, 61))}\n"), done.stderr
    assert split_commands("cat <<é\nü\né\nls") == ["cat <<é\nü\né", "ls"]
    assert split_commands("echo é\nmv ñ 日本\n") == ["echo é", "mv ñ 日本"]


@given(st.text(max_size=40) | st.lists(st.sampled_from("a\n;&|<>()'\"#$\\ {}"), max_size=30).map("".join))
def test_counting_takes_any_text(text: str) -> None:
    parts = split_commands(text)
    assert parts and (len(parts) == 1 or all(parts))


CLEAN = {
    "= 3 passed in 0.12s =": "= 3 passed in 0.00s =",
    "1 failed, 2 passed, 1 warning in 12.34s": "1 failed, 2 passed, 1 warning in 0.00s",
    "======= 1 failed in 61.20s (0:01:01) =======": "============ 1 failed in 0.00s =============",
    "no tests ran in 0.01s": "no tests ran in 0.00s",
    "Ran 5 tests in 1.234s": "Ran 5 tests in 0.000s",
    "0.52s call     tests/test_a.py::test_b": "0.00s call     tests/test_a.py::test_b",
    "real\t0m1.234s": "real\t0m0.000s",
    "[1] 4711": "[1] 1",
    "bash: line 3:  4711 Killed                  python x.py": (
        "bash: line 3:  1 Killed                  python x.py"
    ),
    "-rw-r--r-- 1 root root  120 Nov 30 23:59 setup.py": "-rw-r--r-- 1 root root  120 Jan  1 00:00 setup.py",
    "drwxr-xr-x 2 a b 4096 Mar  3  2024 d": "drwxr-xr-x 2 a b 4096 Jan  1 00:00 d",
    "<a.B object at 0x7f3a5c0d1e80>": "<a.B object at 0x7f0000000001>",
    "/tmp/tmpab12_x9z/file": "/tmp/tmp00000001/file",
    "/tmp/tmp.Ab12Cd34Ef": "/tmp/tmp.0000000001",
}
KEPT = (
    "x = 0x7f3a5c0d1e80",
    "at 0x7f3a5c0d1e80",
    "in 0.12s",
    "it passed in 0.12s",
    "timeout = 3.5s",
    "[1] 4711 more",
    "a = [1] 4711",
    "/tmp/tmpfile /tmp/tmp /tmp/tmpabcd12345 /tmp/tmpabcd1234x.py /var/tmpabcd1234",
    "Nov 30 23:59 -rw-r--r--",
    "Ran 5 tests",
    "line 3: 4711 Killed them",
)


@pytest.mark.parametrize(("output", "text"), CLEAN.items())
def test_what_differs_between_runs_is_made_equal(output: str, text: str) -> None:
    for before, after in (("", ""), ("first\n", "\nlast\n")):
        assert Normaliser().clean(before + output + after) == before + text + after
    assert len(Normaliser().clean(output)) == len(output) or "=" not in output or " =" not in output


@pytest.mark.parametrize("text", KEPT)
def test_what_merely_looks_alike_is_kept(text: str) -> None:
    assert Normaliser().clean(text) == text


def test_honest_source_code_comes_out_as_it_went_in() -> None:
    files = [
        path for folder in ("sandbox", "jaxrl", "kernels", "tools") for path in (ROOT / folder).rglob("*.py")
    ]
    files += [Path(ast.__file__), Path(random.__file__), Path(subprocess.__file__)]
    assert len(files) > 60
    for path in files:
        text = path.read_text(encoding="utf-8")
        if path.name != "normalise.py":
            assert Normaliser().clean(text) == text, path


PIECES = st.sampled_from([*CLEAN, *CLEAN.values(), *KEPT]) | st.text("ab 01=[]<>/.:\n", max_size=12)


@given(st.lists(PIECES, max_size=8).map("\n".join))
def test_normalising_twice_is_normalising_once(text: str) -> None:
    normaliser = Normaliser()
    once = normaliser.clean(text)
    assert normaliser.clean(once) == once
    assert once.count("\n") == text.count("\n")


def test_equal_addresses_and_names_stay_equal_and_names_lead_back() -> None:
    normaliser = Normaliser()
    text = "<A at 0x7f3a5c0d1e80> <B at 0x55aa5c0d1e80> <A at 0x7f3a5c0d1e80>"
    assert normaliser.clean(text) == "<A at 0x7f0000000001> <B at 0x7f0000000002> <A at 0x7f0000000001>"
    assert normaliser.clean("/tmp/tmpab12_x9z /tmp/tmpzz12_x9z") == "/tmp/tmp00000001 /tmp/tmp00000002"
    assert normaliser.clean("/tmp/tmpzz12_x9z/a") == "/tmp/tmp00000002/a"
    assert normaliser.restore("cd /tmp/tmp00000002/a && ls") == "cd /tmp/tmpzz12_x9z/a && ls"
    assert normaliser.restore("ls /tmp/tmp00000003") == "ls /tmp/tmp00000003"


LINES = st.text("ab \t\x0c\u2028é", max_size=5)
TEXTS = st.builds(
    lambda lines, end: "\n".join(lines) + end, st.lists(LINES, max_size=8), st.sampled_from(["", "\n"])
)


@given(TEXTS, st.integers(-1, 10), TEXTS)
def test_insert_is_list_insertion(text: str, after: int, new: str) -> None:
    lines = text.split("\n")[: line_count(text)]
    if not 0 <= after <= len(lines):
        with pytest.raises(EditError, match="insert_line"):
            insert(text, after, new)
        return
    made = insert(text, after, new)
    wanted = [*lines[:after], *new.split("\n"), *lines[after:]]
    assert made.removesuffix("\n").split("\n") == wanted if wanted != [""] else made == "\n"


@given(TEXTS, TEXTS, TEXTS)
def test_replace_changes_the_only_place_or_nothing(text: str, old: str, new: str) -> None:
    try:
        made, line = replace(text, old, new)
    except EditError:
        unique = old and old != new and sum(text.startswith(old, at) for at in range(len(text))) == 1
        assert not unique
        return
    used = old if old in text else old.strip()
    assert text.count(used) == 1 and made == text.replace(used, new)
    assert line == text[: text.index(used)].count("\n") + 1


def test_replace_says_what_is_wrong() -> None:
    for old, new, message in (
        ("", "x", "empty"),
        ("a", "a", "equal"),
        ("zz", "a", "does not occur"),
        ("  ", "a", "does not occur"),
        ("a\n", "", "3 times, in lines 1, 2, 3"),
    ):
        with pytest.raises(EditError, match=message):
            replace("a\na\na\n", old, new)
    assert replace("  f(x)\n", "f(x)   ", "g(x)") == ("  g(x)\n", 1)


@given(TEXTS, st.integers(1, 9), st.integers(1, 9))
def test_numbers_and_excerpts(text: str, first: int, last: int) -> None:
    lines = text.split("\n")[: line_count(text)]
    assert numbered(text) == "".join(f"{n:6}\t{line}\n" for n, line in enumerate(lines, 1))
    part = excerpt(text, first, last)
    assert numbered(part, first) == "".join(
        f"{n:6}\t{line}\n" for n, line in enumerate(lines, 1) if first <= n <= last
    )


def test_clip_says_that_something_is_missing() -> None:
    assert clip("x" * 16_000, "h") == "x" * 16_000
    cut = clip("x" * 16_001, "view less")
    assert cut.startswith("x" * 16_000 + "<response clipped>") and "view less" in cut


@given(
    st.binary(max_size=40)
    | st.lists(st.sampled_from([b"a", b"\r\n", b"\n", b"\xff", b"\r"]), max_size=30).map(b"".join)
)
def test_a_text_file_is_written_back_as_it_was(content: bytes) -> None:
    try:
        file = TextFile.parse(content)
    except NotTextError:
        assert b"\0" in content or any(byte > 127 for byte in content)
        return
    assert file.content(file.text) == content
    assert not (file.crlf and "\r" in file.text)


def test_binary_and_huge_files_are_no_texts() -> None:
    for content, why in ((b"\x7fELF\0", "binary"), (b"\xff\xfe", "binary"), (b"x" * (MAX_SIZE + 1), "bytes")):
        with pytest.raises(NotTextError, match=why):
            TextFile.parse(content)
    assert TextFile.parse(b"caf\xe9 au lait, un texte").text.startswith("caf\udce9")
