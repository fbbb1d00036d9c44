"""Harnesses as data: how the agent is asked, which tools it has, and how far it may go."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxrl.rollout.calls import BAD_CALL, NO_CALL
from jaxrl.rollout.prompts import DEFAULTS, check_prompt, render_prompt, tool_block
from sandbox.agent_tools.openhands import NAMES, load_texts
from sandbox.tasks.schema import TaskSpec


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Everything about an episode that is neither the task nor the policy.

    `prompt` is formatted with `paths` and `issue`, or is a Jinja template, as `system` then is,
    where `jinja` says so. `assistant_prefix` follows every assistant header and is not sampled;
    "" leaves thinking out altogether.
    """

    name: str
    system: str = ""  # "" means no system turn
    prompt: str
    tools: tuple[str, ...]
    max_turns: int
    turn_tokens: int  # most tokens sampled in one turn
    max_malformed: int  # turns in a row without a parsable call that end the episode
    observation_chars: int  # longer tool output keeps its two ends
    assistant_prefix: str = ""
    require_finish: bool = True  # reward only an episode that ended by a clean `finish`
    jinja: bool = False
    tool_block: str = ""  # what the system turn says of the tools, before `system`
    no_call: str = NO_CALL  # the answer to a turn without a call
    no_call_by_user: bool = False  # whether that answer is a user's turn, not a tool's
    bad_call: str = BAD_CALL  # the answer to a call that cannot be read
    detect_loops: bool = False  # end an episode that goes in circles

    def preface(self, task: TaskSpec) -> str:
        """The system turn after the tools; "" if there is nothing to say."""
        return render_prompt(self.system, task) if self.jinja else self.system

    def ask(self, task: TaskSpec) -> str:
        """The user's first message."""
        if self.jinja:
            return render_prompt(self.prompt, task)
        return self.prompt.format(paths=" ".join(sorted(task.files)), issue=task.problem_statement)

    def clip(self, text: str) -> str:
        """`text` within `observation_chars`, the middle cut out."""
        excess = len(text) - self.observation_chars
        if excess <= 0:
            return text
        half = self.observation_chars // 2
        return f"{text[:half]}\n[{excess} characters cut]\n{text[len(text) - half :]}"


COMPACT = Harness(
    name="compact",
    prompt="{paths}\n{issue}",
    tools=("view", "str_replace", "finish"),
    max_turns=6,
    turn_tokens=64,
    max_malformed=2,
    observation_chars=400,
)
OPENHANDS = Harness(
    name="openhands",
    system=(DEFAULTS / "openhands_system.j2").read_text(encoding="utf-8"),
    prompt=(DEFAULTS / "openhands_user.j2").read_text(encoding="utf-8"),
    tools=NAMES,
    max_turns=30,
    turn_tokens=65_536,  # the context is what bounds a turn
    max_malformed=30,
    observation_chars=150_000,  # the tools clip by themselves; a numbered file grows by its numbers
    assistant_prefix="<think>\n\n</think>\n\n",
    require_finish=False,
    jinja=True,
    tool_block=tool_block(load_texts()),
    no_call=(
        "Your last message held no tool call. Nobody answers questions here: go on with the task as you "
        "think best, and call finish when it is done or when you cannot get any further."
    ),
    no_call_by_user=True,
    bad_call=(
        "error: the tool call could not be read, so nothing was run. Write it as <tool_call>, "
        "<function=NAME>, one <parameter=NAME> with its value and </parameter> for each argument, "
        "</function> and </tool_call>, each parameter once."
    ),
    detect_loops=True,
)
HARNESSES: Mapping[str, Harness] = {each.name: each for each in (COMPACT, OPENHANDS)}


def harness(name: str) -> Harness:
    """The harness of a name. Raises `ValueError` for an unknown one."""
    if name not in HARNESSES:
        raise ValueError(f"expected a harness of {sorted(HARNESSES)}, got {name!r}")
    return HARNESSES[name]


def with_texts(
    base: Harness,
    *,
    system_prompt: Path | None = None,
    user_prompt: Path | None = None,
    tool_texts: Path | None = None,
) -> Harness:
    """`base` with prompt templates and tool descriptions from files; None keeps its own.

    Raises `ValueError` naming the file and what is wrong in it, or if `base` takes no files.
    """
    if not any((system_prompt, user_prompt, tool_texts)):
        return base
    if not base.jinja:
        raise ValueError(f"expected no prompt files with the harness {base.name}: its prompt is fixed")
    return replace(
        base,
        system=_template(system_prompt) if system_prompt else base.system,
        prompt=_template(user_prompt) if user_prompt else base.prompt,
        tool_block=tool_block(load_texts(tool_texts)) if tool_texts else base.tool_block,
    )


def _template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a text file with a Jinja template: {error}") from error
    check_prompt(text, path)
    return text
