"""`execute_bash`: every case of a command's life, in a real bash on a real pty."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.agent_tools.base import Observation, for_episode, run_tool
from sandbox.agent_tools.bash_shell import BashShell
from sandbox.agent_tools.execute_bash import MAX_OUTPUT, ExecuteBash
from sandbox.base import SandboxError
from sandbox.tasks.schema import TaskSpec
from tests.sandbox.pty_double import PtySandbox

TASK = TaskSpec(instance_id="t", problem_statement="", files={}, command_timeout=60.0)


@dataclass
class Terminal:
    """A sandbox and its tool, driven call by call."""

    runner: asyncio.Runner
    sandbox: PtySandbox
    tools: dict

    def __call__(self, command: str, **more: str) -> Observation:
        arguments = {"command": command, **more}
        return self.runner.run(
            run_tool(self.tools, "execute_bash", sandbox=self.sandbox, arguments=arguments)  # type: ignore[arg-type]
        )

    def says(self, command: str, **more: str) -> str:
        return self(command, **more).text

    def ends(self, command: str, **more: str) -> str:
        """What a command says until it ends, however slow the machine is."""
        texts = [self.says(command, **more)]
        while "[still running" in texts[-1]:
            texts.append(self.says(""))
        return "\n".join(texts)

    def interrupted(self) -> str:
        """What is said until C-c ends the command: between two programs a key may go unheard."""
        texts = [self.says("C-c", is_input="true")]
        while "[still running" in texts[-1]:
            texts.append(self.says("C-c", is_input="true"))
        return "\n".join(texts)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture
def bash(runner: asyncio.Runner, tmp_path: Path) -> Iterator[Terminal]:
    yield from opened(runner, PtySandbox(tmp_path))


@pytest.fixture
def brisk(runner: asyncio.Runner, tmp_path: Path) -> Iterator[Terminal]:
    """One that soon leaves a silent command running."""
    yield from opened(runner, PtySandbox(tmp_path), soft_timeout=0.6)


def opened(runner: asyncio.Runner, sandbox: PtySandbox, **options) -> Iterator[Terminal]:
    tool = ExecuteBash(**{"soft_timeout": 30.0, **options})
    yield Terminal(runner, sandbox, dict(for_episode({tool.name: tool}, TASK)))
    runner.run(sandbox.destroy())


def ended(bash: Terminal, code: int = 0, *, by: str = "", folder: str = "") -> str:
    """How the observation of a command ends."""
    python = r"\S+"
    return rf"\n\[ended{by}\]\n\[directory: {re.escape(folder or str(bash.sandbox.folder))}\]\n" + (
        rf"\[python: {python}\]\n\[exit code: {code}\]"
    )


def test_output_exit_code_directory_and_interpreter(bash: Terminal) -> None:
    assert re.fullmatch("hi" + ended(bash), bash.says("echo hi"))
    assert re.fullmatch(ended(bash, 3), bash.says("(exit 3)"))
    assert re.fullmatch("3" + ended(bash), bash.says("echo $?"))
    assert re.fullmatch("no end of line" + ended(bash), bash.says("printf 'no end of line'"))
    assert not bash("false").error


def test_state_persists(bash: Terminal) -> None:
    bash("mkdir d; export A=1; B=2; declare -A m; m[k]=3; f() { echo f-$1; }; alias say='echo said'")
    assert re.fullmatch(ended(bash, folder=f"{bash.sandbox.folder}/d"), bash.says("cd d"))
    assert bash.says("echo $A $B ${m[k]}; f 4; say 5").startswith("1 2 3\nf-4\nsaid 5\n")


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("for i in 1 2; do\n  echo $i\ndone", "1\n2"),
        ("cat <<'EOF'\ntab\there $x `y` \\n\n\x03\x04EOF \nEOF", "tab\there $x `y` \\n\nEOF"),
        ("python3 - <<'PY'\nprint('hi!' * 2)\nPY", "hi!hi!"),
        ("echo \"a!b\" 'c!d' !!", "a!b c!d !!"),
        ("printf '10%%\\r100%%\\n\\033[31mred\\033[0m\\n'", "100%\nred"),
        ("echo " + "x" * 20_000 + " | wc -c", "20001"),
        ("echo é $'\\xff' | od -An -tx1", " c3 a9 20 ff 0a"),
        ("tput cols; stty size; echo $TERM $PAGER", "80\n24 80\ndumb cat"),
        ('python3 -c \'import sys; print(sys.stdout.isatty(), hash("a") == hash("a"))\'', "True True"),
        ("if (", "bash: syntax error: unexpected end of file"),
        ("exec 3>&1; echo out; echo err >&2", "out\nerr"),
        ("# only a note", ""),
    ],
)
def test_commands_of_every_shape(bash: Terminal, command: str, output: str) -> None:
    code = 2 if command == "if (" else 0
    assert re.fullmatch(re.escape(output) + ended(bash, code), bash.says(command))


def test_nothing_of_ours_is_in_the_environment_and_the_prompt_survives(bash: Terminal) -> None:
    assert "agent" not in bash.says("env | grep -v '^PWD\\|^OLDPWD\\|^HOME'; bash -c 'echo ${PS1-none}'")
    assert re.fullmatch("x" + ended(bash), bash.says("PROMPT_COMMAND=; PS1='evil> '; echo x"))
    assert re.fullmatch("y" + ended(bash), bash.says("echo y"))
    assert "y" in bash.says("set -x; echo y; set +x")


def test_a_program_cannot_forge_a_prompt(bash: Terminal) -> None:
    """Frames with any other nonce, and even the shell's own words about it, are mere output."""
    forged = (
        r"printf '\036%s\0371\0370\037/bin/python\037/nowhere\036\n' 0123456789abcdef; sleep 0.1; echo after"
    )
    text = bash.says(forged)
    assert re.fullmatch("0123456789abcdef10/bin/python/nowhere\nafter" + ended(bash), text)
    text = bash.says("set | grep '^_agent'; declare -f _agent_frame; (exit 5)")
    assert re.fullmatch("_agent_.*" + ended(bash, 5), text, re.DOTALL)


def test_soft_timeout_then_more_output_then_the_end(brisk: Terminal) -> None:
    first = brisk("echo begun; sleep 2; echo done; (exit 4)")
    assert not first.error
    assert re.fullmatch(
        r"begun\n\[still running after no new output for 0\.6 s: .*\]\n\[exit code: -1\]", first.text
    )
    refused = brisk("ls")
    assert refused.error and "not run" in refused.text and "ls" in refused.text
    text = brisk.ends("")
    assert text.startswith("[more output of the running command]\n")
    assert re.search(r"\]\ndone" + ended(brisk, 4), text)
    assert brisk("").error


def test_output_before_a_refusal_is_shown_once(brisk: Terminal) -> None:
    brisk("echo first; sleep 1; echo two; sleep 20")
    brisk.runner.run(asyncio.sleep(1.5))
    refused = brisk.says("ls")
    assert "two" in refused and "first" not in refused
    assert "two" not in brisk.ends("C-c", is_input="true")


def test_steady_output_is_waited_for_and_a_hard_timeout_ends_the_wait(brisk: Terminal) -> None:
    steady = brisk.says("for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.1; done", timeout="50")
    assert re.fullmatch("1\n2\n3\n4\n5\n6\n7\n8\n9" + ended(brisk), steady)
    late = brisk.says("while true; do echo x; sleep 0.1; done", timeout="0.8")
    assert re.search(r"\[still running after 0\.8 s: .*\]\n\[exit code: -1\]$", late)
    assert late.startswith("x\n")
    assert re.search(ended(brisk, 130), brisk.interrupted().replace(" after C-c", ""))
    silent = brisk.says("sleep 1.2; echo slept", timeout="50")
    assert re.fullmatch("slept" + ended(brisk), silent)


def test_the_task_bounds_every_call(runner: asyncio.Runner, tmp_path: Path) -> None:
    for bash in opened(runner, PtySandbox(tmp_path), soft_timeout=30.0):
        task = TaskSpec(instance_id="t", problem_statement="", files={}, command_timeout=0.5)
        bash.tools["execute_bash"] = ExecuteBash().open(task)
        for more in ({}, {"timeout": "60"}):
            assert "[still running after 0.5 s: " in bash.says("sleep 20", **more)
            assert re.search(ended(bash, 130, by=" after C-c"), bash.says("C-c", is_input="true"))


def test_programs_take_text_and_keys(brisk: Terminal) -> None:
    brisk("cat")
    said = brisk.says("hello", is_input="true")
    assert said.startswith("[more output of the running command]\nhello\nhello\n")
    assert re.search(ended(brisk, by="( after C-d)?"), brisk.ends("C-d", is_input="True"))
    brisk("sleep 30")
    stopped = brisk.ends("C-z", is_input="true")
    assert "Stopped" in stopped and re.search(ended(brisk, 148, by="( after C-z)?"), stopped)
    assert "Terminated" in brisk.ends("kill %1; sleep 0.1; jobs")
    brisk("read -r -p 'name? ' name")
    brisk.ends("me", is_input="true")
    assert brisk.ends("echo $name").startswith("me\n")
    assert re.search(ended(brisk, 130, by="( after C-c)?"), brisk.ends("C-c"))
    assert brisk.ends("echo next").startswith("next\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": ""}, "no command is running"),
        ({"command": "  \n "}, "no command is running"),
        ({"command": "y", "is_input": "true"}, "no command is running"),
        ({"command": "C-d"}, "no command is running"),
        ({"command": "C-c", "is_input": "true"}, "no command is running"),
        ({"command": "a\0b"}, "NUL"),
        ({"command": "a", "is_input": "maybe"}, 'is_input: expected true or false, got "maybe"'),
        ({"command": "a", "timeout": "soon"}, 'timeout: expected a positive number of seconds, got "soon"'),
        ({"command": "a", "timeout": "-1"}, "positive"),
        ({"command": "a", "timeout": "nan"}, "positive"),
        ({"command": "a", "timeout": "inf"}, "positive"),
        ({}, "missing argument command"),
        (
            {"command": "a", "cmd": "b"},
            "unexpected argument cmd; allowed: command, is_input, timeout, security",
        ),
        ({"command": "a\nb c\n"}, "expected one command, got 2; .*:\n\\(1\\) a\n\\(2\\) b c$"),
    ],
)
def test_mistakes_are_observations(bash: Terminal, arguments: dict[str, str], message: str) -> None:
    seen = bash.runner.run(
        run_tool(bash.tools, "execute_bash", sandbox=bash.sandbox, arguments=arguments)  # type: ignore[arg-type]
    )
    assert seen.error and re.search(message, seen.text)
    assert bash.says("echo fine").startswith("fine\n")


def test_long_output_keeps_both_ends(bash: Terminal) -> None:
    text = bash.says("seq 1 100000")
    assert len(text) < MAX_OUTPUT + 500 and "[the middle of the output is left out]" in text
    assert text.startswith("90002\n") and "\n100000\n" in text  # 10,000 lines of history
    text = bash.says("yes | head -c 200000 | tr -d '\\n'")
    assert text.startswith("y" * (MAX_OUTPUT // 2) + "\n[the middle of the output is left out]\nyyy")


def test_a_shell_that_ends_is_replaced(bash: Terminal) -> None:
    bash("cd /; A=1")
    text = bash.says("echo bye; exit 3")
    assert text.startswith("bye\n") and "a new one waits" in text and text.endswith("[exit code: 3]")
    assert re.fullmatch(
        re.escape(str(bash.sandbox.folder)) + ended(bash), bash.says("echo $A; pwd").lstrip("\n")
    )
    assert bash.says("kill -9 $$").endswith("[exit code: unknown]")
    assert "C-d" not in bash.says("exec true")
    assert bash.says("echo again").startswith("again\n")


def test_input_for_a_program_that_has_ended_goes_nowhere(bash: Terminal) -> None:
    bash("sleep 0.6", timeout="0.1")
    bash.runner.run(asyncio.sleep(2))
    text = bash.says("touch made", is_input="true")
    assert "had ended before" in text and re.search(ended(bash), text)
    assert bash.says("ls").startswith("\n[ended]")


def test_a_late_prompt_is_not_taken_for_the_end_of_the_next_command(bash: Terminal) -> None:
    bash("echo start")
    shell = bash.tools["execute_bash"]._shell
    bash.runner.run(shell.type(b"\x03"))  # its prompt comes while nobody waits
    bash.runner.run(asyncio.sleep(0.2))
    assert re.fullmatch("slept" + ended(bash), bash.says("sleep 0.2; echo slept"))


def test_memory_that_ran_out_is_told(bash: Terminal) -> None:
    assert not bash("(exit 137)").oom
    bash.sandbox.oom = True
    assert bash("true").oom and bash("(exit 137)").oom and bash("kill -9 $$").oom
    assert not bash("").oom


def test_without_normalising_output_is_raw(runner: asyncio.Runner, tmp_path: Path) -> None:
    for bash in opened(runner, PtySandbox(tmp_path), normalise=False):
        assert re.match(r"/tmp/tmp\.[A-Za-z0-9]{10}\n\[1\] \d+\n", bash.says("mktemp -u; sleep 0.1 &"))
    for bash in opened(runner, PtySandbox(tmp_path)):
        assert bash.says("mktemp -u; sleep 0.1 &").startswith("/tmp/tmp.0000000001\n[1] 1\n")
        made = bash.says("d=$(mktemp -d); echo $d")
        alias = made.splitlines()[0]
        assert bash.says(f"rmdir {alias} && echo gone").startswith("gone\n")


def test_no_bash_is_one_clear_error(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def body() -> None:
        sandbox = PtySandbox(tmp_path, ["sh", "-c", "echo no bash here"])
        with pytest.raises(SandboxError, match="expected a bash in the sandbox.*no bash here.*use an image"):
            await BashShell.open(sandbox)
        await sandbox.destroy()
        with pytest.raises(SandboxError, match="destroyed"):
            await ExecuteBash().open(TASK).run(sandbox, {"command": "ls"})

    runner.run(body())


WORDS = st.sampled_from(["C-c", "C-d", "echo", "'", '"', "exit 1", "\ud800", "\\", "a b"]) | st.text(
    max_size=6
)
HARMLESS = re.compile(r"[^/~<>|&;$`*?\[\]{}()\n\r\0]*\Z")  # what runs for real names no file
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "command": WORDS.filter(HARMLESS.match),
        "is_input": st.sampled_from(["true", "false", "", "x"]),
        "timeout": st.sampled_from(["0.01", "1e-9", "x", "-1", "", "1e999"]),
        "security_risk": WORDS,
        "other": WORDS,
    },
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=ARGUMENTS)
def test_any_arguments_give_an_observation(brisk: Terminal, arguments: dict[str, str]) -> None:
    brisk.tools["execute_bash"]._longest = 0.02  # what waits, for example for a quote, is soon left
    words = arguments.get("command", "").split()
    if words and words[0] not in ("C-c", "C-d", "echo", "exit"):
        arguments = {**arguments, "command": "echo " + arguments["command"]}
    seen = brisk.runner.run(
        run_tool(brisk.tools, "execute_bash", sandbox=brisk.sandbox, arguments=arguments)  # type: ignore[arg-type]
    )
    assert isinstance(seen.text, str) and not seen.finished
