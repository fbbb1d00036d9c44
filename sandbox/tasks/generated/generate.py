"""Training, validation and test sets that share no repair, not even up to renaming."""

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Literal, get_args

from sandbox.tasks.generated.families import FAMILIES, Bug, bugs
from sandbox.tasks.generated.instances import Instance, detectable, instantiate
from sandbox.tasks.taskset import TaskSet

Split = Literal["train", "validation", "test"]
# Dealt in this order within each right line, so that every right line is seen in training.
DEAL: Sequence[Split] = ("train", "validation", "train", "test", "train")
VERBS = (
    "get", "make", "find", "take", "pick", "read", "load", "send", "move", "keep", "show", "call", "turn",
    "put", "set", "give", "build", "fetch", "scan", "track", "check", "draw", "pull", "use",
)  # fmt: skip
NOUNS = (
    "data", "part", "rate", "node", "cell", "unit", "page", "row", "slot", "code", "note", "step", "task",
    "box", "card", "file", "form", "job", "key", "lead", "mark", "path", "plan", "record",
)  # fmt: skip


def generate(split: Split, count: int, seed: int) -> TaskSet:
    """`count` tasks of a split, balanced over families; the same arguments give the same digest.

    Raises `ValueError` for an unknown split or more tasks than the split can hold.
    """
    made = instances(split, count, seed)
    return TaskSet([each.spec for each in made], [each.hidden for each in made])


def instances(split: Split, count: int, seed: int) -> Sequence[Instance]:
    """What `generate` returns, in the same order, with the repairs beside.

    Raises `ValueError` for an unknown split or more tasks than the split can hold.
    """
    if split not in get_args(Split):
        raise ValueError(f"expected a split of {get_args(Split)}, got {split!r}")
    streams = [_stream(split, family, seed) for family in FAMILIES]
    made: dict[str, Instance] = {}
    for position in range(count):
        instance = _fresh(streams[position % len(streams)], made, split)
        made[instance.spec.instance_id] = instance
    ordered = list(made.values())
    random.Random(f"{seed}/{split}/order").shuffle(ordered)
    return ordered


def _fresh(stream: Iterator[Instance], made: Mapping[str, Instance], split: Split) -> Instance:
    for _ in range(1_000):
        instance = next(stream)
        if instance.spec.instance_id not in made:
            return instance
    raise ValueError(f"expected a smaller count, got {len(made)} distinct tasks of {split!r}: ask for fewer")


def _stream(split: Split, family: str, seed: int) -> Iterator[Instance]:
    """Endless tasks of a family: the pairs in turn, everything else drawn."""
    rng = random.Random(f"{seed}/{split}/{family}")
    pairs = [group for name, group in _pairs(split) if name == family]
    while True:
        for group in rng.sample(pairs, len(pairs)):
            yield instantiate(rng.choice(group), rng.choice(function_names(split)), rng)


@cache
def _pairs(split: Split) -> Sequence[tuple[str, Sequence[Bug]]]:
    """(family, its bugs with one same (wrong, right) pair) for every pair of a split."""
    return [
        (family, group)
        for family in FAMILIES
        for group, owner in zip(_groups(family), _deal(len(_groups(family))), strict=True)
        if owner == split
    ]


@cache
def _groups(family: str) -> Sequence[Sequence[Bug]]:
    """Bugs by pair; pairs by right line, then by hash, which is what the deal follows."""
    groups: dict[tuple[str, str], list[Bug]] = defaultdict(list)
    for bug in bugs(family):
        if detectable(bug):
            groups[bug.pair].append(bug)
    return [groups[pair] for pair in sorted(groups, key=lambda pair: (pair[1], _hash(*pair)))]


def _deal(count: int) -> list[Split]:
    return [DEAL[position % len(DEAL)] for position in range(count)]


@cache
def function_names(split: Split) -> Sequence[str]:
    """The function names that only this split uses."""
    names = sorted((f"{verb}_{noun}" for verb, noun in product(VERBS, NOUNS)), key=_hash)
    return [name for name, owner in zip(names, _deal(len(names)), strict=True) if owner == split]


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
