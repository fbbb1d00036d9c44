"""Which processes a grading runs, on which files, and what each test must do in it. Pure.

First every file has a run of all its expected ids. Then, in another sandbox, comes the challenge: the
fail-to-pass tests of a file, with a few pass-to-pass ones beside them, run in two processes. Each test that
can be falsified is so in exactly one of the two, drawn at random: there it must fail, in the other it must
pass. What to answer is a secret of about as many bits as there are such tests, which no process inside a
sandbox knows. Where they are few, it could be guessed: then more challenges follow, each in its own sandbox.

The stages share nothing: what the first one learned of right answers would give the challenge away. Of a
file's two processes in the challenge the first is blind; that the second may know what it said is no help.
"""

import ast
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, comb, log2
from random import Random

from sandbox.grading.variants import Unit, falsified, units
from sandbox.tasks.schema import SuiteTests

_COMPANIONS = 8  # falsified functions per file, pass-to-pass ones included where fail-to-pass ones are fewer
_BITS = 4  # of the secret that all challenges together are
_CANARIES = 2  # functions of our own per run
_WORDS = ("again", "empty", "nested", "twice", "unicode", "default", "roundtrip", "edge", "order", "none")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process: the tests of one file."""

    path: str
    nonce: str
    content: bytes | None  # of `path`; None: as the hidden tests have it
    passing: frozenset[str]
    failing: frozenset[str]  # falsified tests and canaries

    @property
    def ids(self) -> list[str]:
        return sorted(self.passing | self.failing)


Stages = list[list[Run]]  # all tests, then one challenge or more


def plan(hidden: SuiteTests, *, unfit: Collection[str] = ()) -> Stages:
    """The stages of one grading; different at every call. `unfit`: ids that must not be falsified.

    Raises `ValueError` for a suite without fail-to-pass tests, or an id that names no file.
    """
    if not hidden.fail_to_pass:
        raise ValueError(f"{hidden.instance_id}: expected at least one fail-to-pass test, got none")
    random, wanted = Random(secrets.randbits(256)), frozenset(hidden.fail_to_pass)
    whole: list[Run] = []
    challenged: list[tuple[str, bytes, frozenset[str], list[Unit]]] = []
    for path, ids in by_file([*hidden.fail_to_pass, *hidden.pass_to_pass]).items():
        content = hidden.files.get(path)
        whole.append(_run(path, content, frozenset(ids), (), random))
        if content is not None and not wanted.isdisjoint(ids):
            fit = [unit for unit in units(content, ids) if not set(unit.ids) & set(unfit)]
            challenged.append((path, content, wanted.intersection(ids), fit))
    return [whole, *(_round(challenged, random) for _ in range(_rounds(challenged)))]


Challenged = Sequence[tuple[str, bytes, frozenset[str], list[Unit]]]  # path, content, wanted ids, units


def _rounds(challenged: Challenged) -> int:
    """How many challenges there are until together they hold enough bits to be guessed."""
    bits = 0.0
    for _, _, wanted, fit in challenged:
        count = sum(not wanted.isdisjoint(unit.ids) for unit in fit)
        bits += max(log2(comb(count, count // 2)), 1.0) if count else 0.0
    return ceil(_BITS / bits) if bits else 1


def _round(challenged: Challenged, random: Random) -> list[Run]:
    """One challenge: the first runs of all files, then the second ones."""
    pairs = [
        _challenge(path, content, wanted, _chosen(fit, wanted, random), random)
        for path, content, wanted, fit in challenged
    ]
    return [run for half in zip(*filter(None, pairs), strict=True) for run in half]


def by_file(ids: Iterable[str]) -> Mapping[str, list[str]]:
    """Node ids by their file, in order. Raises `ValueError` for a text that is no node id."""
    found: dict[str, list[str]] = {}
    for each in dict.fromkeys(ids):
        path, separator, _ = each.partition("::")
        if not path or not separator:
            raise ValueError(f"expected node ids such as tests/test_a.py::test_b, got {each!r}")
        found.setdefault(path, []).append(each)
    return found


def _challenge(
    path: str, content: bytes, wanted: frozenset[str], chosen: Sequence[Unit], random: Random
) -> list[Run]:
    """Two runs of the wanted tests and the chosen ones, of which each has one half falsified."""
    if not chosen:
        return []
    half = (len(chosen) + random.randint(0, 1)) // 2
    ids = wanted.union(*(unit.ids for unit in chosen))
    return [_run(path, content, ids, part, random) for part in (chosen[:half], chosen[half:])]


def _chosen(fit: Sequence[Unit], wanted: Collection[str], random: Random) -> list[Unit]:
    """Every unit with a fail-to-pass test, and others up to a number, in random order."""
    needed = [unit for unit in fit if set(unit.ids) & set(wanted)]
    spare = [unit for unit in fit if not set(unit.ids) & set(wanted)]
    if needed:
        needed += random.sample(spare, min(len(spare), max(_COMPANIONS - len(needed), 0)))
    random.shuffle(needed)
    return needed


def _run(
    path: str, content: bytes | None, ids: frozenset[str], turned: Sequence[Unit], random: Random
) -> Run:
    failing = {each for unit in turned for each in unit.ids}
    if content is not None and turned:
        content = falsified(content, turned, random)
    if content is not None:
        content, canaries = _with_canaries(path, content, ids, random)
        failing |= canaries
    nonce = secrets.token_hex(16)
    return Run(path=path, nonce=nonce, content=content, passing=ids - failing, failing=frozenset(failing))


def _with_canaries(
    path: str, content: bytes, ids: Iterable[str], random: Random
) -> tuple[bytes, frozenset[str]]:
    """Functions at the end of the file that fail whatever is tested, named as its own are."""
    names = sorted({part for each in ids for part in re.findall(r"::(test\w*)", each)})
    if not path.endswith(".py") or not names or not _readable(content):
        return content, frozenset()
    made: dict[str, str] = {}
    while len(made) < _CANARIES:
        name = f"{random.choice(names)}_{random.choice(_WORDS)}"
        name = name if name.encode() not in content else f"{name}_{random.randrange(100)}"
        left, right = random.randint(2, 99), random.randint(2, 99)
        made[name] = f"def {name}():\n    assert {left} * {right} == {left * right + random.randint(1, 9)}\n"
    text = "\n\n" + "\n\n".join(made.values())
    return content + text.encode(), frozenset(f"{path}::{name}" for name in made)


def _readable(content: bytes) -> bool:
    try:
        ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True
