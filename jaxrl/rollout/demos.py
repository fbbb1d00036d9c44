"""Demonstrations for supervised training on the generated tasks, made without any sandbox.

What tools print is written here exactly as they print it: a test holds the two together.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxrl.rollout.calls import Call
from jaxrl.rollout.conversation import ACTION_WEIGHT, DOCUMENT_WEIGHT, Conversation, Message
from jaxrl.rollout.harness import Harness
from sandbox.tasks.generated.instances import VARIABLES, Instance, Repair

EDITED, NO_MATCH = "ok", "error: 0 matches"
Edit = Literal["right", "habit", "uniform"]


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Shares of a training stage. `right`, `habit` and `uniform` divide the demonstrations.

    A habit ignores the issue and tries the family's stock edit; uniform draws any known edit.
    `retry` is the share of demonstrations that first copy the old line wrongly and recover.
    """

    documents: float
    right: float
    habit: float
    uniform: float
    retry: float = 0.0

    def __post_init__(self) -> None:
        if abs(self.right + self.habit + self.uniform - 1) > 1e-6:
            raise ValueError(f"expected right + habit + uniform = 1, got {self}")


STAGE_1 = Mix(documents=0.35, right=0.45, habit=0.20, uniform=0.35, retry=0.1)
STAGE_2 = Mix(documents=0.30, right=0.06, habit=0.54, uniform=0.40, retry=0.1)


def conversations(
    instances: Sequence[Instance], *, mix: Mix, harness: Harness, seed: int
) -> Iterator[Conversation]:
    """Endless conversations over `instances` in shuffled rounds; equal arguments, equal stream."""
    if not instances:
        raise ValueError("expected at least one instance, got none")
    rng = random.Random(f"demos/{seed}")
    while True:
        for instance in rng.sample(instances, len(instances)):
            if rng.random() < mix.documents:
                yield document(instance)
            else:
                yield demonstrate(instance, mix=mix, harness=harness, rng=rng)


def document(instance: Instance) -> Conversation:
    """The issue followed by the right function: knowledge without behaviour."""
    text = f"{instance.spec.problem_statement}\n{instance.repair.fixed}"
    return (Message(role="document", content=text, weight=DOCUMENT_WEIGHT),)


def demonstrate(instance: Instance, *, mix: Mix, harness: Harness, rng: random.Random) -> Conversation:
    """view, str_replace, finish with an edit drawn from `mix`."""
    repair = instance.repair
    kinds: Sequence[Edit] = ("right", "habit", "uniform")
    (kind,) = rng.choices(kinds, weights=(mix.right, mix.habit, mix.uniform))
    new = _edit(repair, kind, rng)
    missed = _replace(repair, _miscopy(repair, rng), new, NO_MATCH, weight=0.0)
    return (
        Message(role="user", content=harness.ask(instance.spec)),
        *_action("view", {"path": repair.path}, repair.source),
        *(missed if rng.random() < mix.retry else ()),
        *_replace(repair, repair.wrong, new, EDITED, weight=ACTION_WEIGHT),
        _call("finish", {}, ACTION_WEIGHT),
    )


def _edit(repair: Repair, kind: Edit, rng: random.Random) -> str:
    match kind:
        case "right":
            return repair.right
        case "habit":
            return repair.habit
        case "uniform":
            return rng.choice(repair.candidates)


def _miscopy(repair: Repair, rng: random.Random) -> str:
    """A line like the wrong one that the file does not hold."""
    used = [name for name in VARIABLES if re.search(rf"\b{name}\b", repair.wrong)]
    renamed = [re.sub(rf"\b{old}\b", new, repair.wrong) for old in used for new in VARIABLES]
    return rng.choice([each for each in (*repair.candidates, *renamed) if each not in repair.source])


def _replace(repair: Repair, old: str, new: str, output: str, *, weight: float) -> Conversation:
    arguments = {"path": repair.path, "old_str": old, "new_str": new}
    return _action("str_replace", arguments, output, weight=weight)


def _action(
    name: str, arguments: dict[str, str], output: str, *, weight: float = ACTION_WEIGHT
) -> Conversation:
    return _call(name, arguments, weight), Message(role="tool", content=output)


def _call(name: str, arguments: dict[str, str], weight: float) -> Message:
    return Message(role="assistant", calls=(Call(name=name, arguments=arguments),), weight=weight)
