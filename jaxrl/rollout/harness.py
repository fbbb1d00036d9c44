"""Harnesses as data: how the agent is asked, which tools it has, and how far it may go."""

from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.tasks.schema import TaskSpec


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Everything about an episode that is neither the task nor the policy.

    `prompt` is formatted with `paths` and `issue`. `assistant_prefix` follows every assistant
    header and is not sampled; "" leaves thinking out altogether.
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

    def ask(self, task: TaskSpec) -> str:
        """The user's first message."""
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
HARNESSES: Mapping[str, Harness] = {COMPACT.name: COMPACT}


def harness(name: str) -> Harness:
    """The harness of a name. Raises `ValueError` for an unknown one."""
    if name not in HARNESSES:
        raise ValueError(f"expected a harness of {sorted(HARNESSES)}, got {name!r}")
    return HARNESSES[name]
