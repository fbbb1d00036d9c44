"""What `jaxrl.rl` computes, a second time: Python floats, loops, the formulas of the papers.

It shares no code with jaxrl. Settings come as a dictionary with the names of the section `rl`. What a
formula holds constant (sg) is a value of its own, `frozen`, so that a difference quotient in `new` is the
gradient that the papers mean.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

Settings = dict[str, Any]

# (trained, votes, reward; None: as graded), from the table of outcomes.
OUTCOMES = {
    "resolved": (True, True, 1.0),
    "unresolved": (True, True, 0.0),
    "context_full": (True, True, None),
    "suspected_tampering": (False, True, 0.0),
    "infra_error": (False, False, None),
    "cancelled": (False, False, None),
}


@dataclass(frozen=True)
class Token:
    """A sampled token's log-probs: the policy's (to move, and held still) and those of the others."""

    new: float
    frozen: float
    sampler: float
    old: float
    reference: float
    norm: float


@dataclass(frozen=True)
class Rollout:
    outcome: str
    graded: float | None
    length: int  # tokens of the episode, the sampled ones among them
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Sequence:
    """A trained rollout with its advantage; `place` is its (group, sample)."""

    place: tuple[int, int]
    advantage: float
    tokens: tuple[Token, ...]


def advantages(
    rewards: list[float],
    trained: list[bool],
    votes: list[bool],
    *,
    baseline: str,
    normalise_std: bool,
    masked_vote: bool,
) -> list[float]:
    """A_i = r_i - b, divided by s + 1e-6 where the spread s is above 0; b and s over the voters, or over the
    other voters. Rollouts that are not trained get 0, and so do all where fewer than two vote."""
    if masked_vote:
        votes = [vote or not train for vote, train in zip(votes, trained, strict=True)]
    result = []
    for i, reward in enumerate(rewards):
        voters = [j for j in range(len(rewards)) if votes[j] and not (baseline == "leave_one_out" and j == i)]
        if not trained[i] or sum(votes) < 2:
            result.append(0.0)
            continue
        b = math.fsum(rewards[j] for j in voters) / len(voters)
        advantage = reward - b
        if normalise_std and len({rewards[j] for j in voters}) > 1:
            squares = math.fsum((rewards[j] - b) ** 2 for j in voters)
            advantage /= math.sqrt(squares / (len(voters) - 1)) + 1e-6
        result.append(advantage)
    return result


def overlong(length: int, rl: Settings, context: int) -> float:
    """R_length of DAPO, equation 13."""
    chosen = rl["overlong"]
    longest = chosen["length"] or context
    cache = chosen["cache"] or longest // 5
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return chosen["penalty"] * ((longest - cache) - length) / cache
    return -chosen["penalty"]


def sequences(groups: list[list[Rollout]], rl: Settings, context: int) -> list[Sequence]:
    """The trained rollouts of a step and their advantages."""
    result = []
    for g, group in enumerate(groups):
        rules = [OUTCOMES[rollout.outcome] for rollout in group]
        trained = [
            rule[0] and rollout.outcome not in rl["masked_outcomes"]
            for rule, rollout in zip(rules, group, strict=True)
        ]
        votes = [rule[1] for rule in rules]
        graded = [
            (rollout.graded if rule[2] is None else rule[2]) or 0.0
            for rule, rollout in zip(rules, group, strict=True)
        ]
        shaped = [
            reward + overlong(rollout.length, rl, context)
            for reward, rollout in zip(graded, group, strict=True)
        ]
        names = ("baseline", "normalise_std", "masked_vote")
        chosen = {name: rl[name] for name in names}
        plain = advantages(graded, trained, votes, **chosen)
        if rl["drop_equal_groups"] and all(advantage == 0 for advantage in plain):
            continue
        for i, advantage in enumerate(advantages(shaped, trained, votes, **chosen)):
            if trained[i] and group[i].tokens:
                result.append(Sequence((g, i), advantage, group[i].tokens))
    return result


def loss(parts: list[Sequence], rl: Settings, context: int, *, aux: float = 0.0) -> tuple[float, float]:
    """(numerator, denominator) of a step."""
    sums = [sequence_loss(part, rl, context) for part in parts]
    numerator, denominator = (math.fsum(column) for column in zip(*sums, strict=True)) if sums else (0.0, 0.0)
    return numerator + rl["aux_loss_coefficient"] * aux * denominator, denominator


def gradient(part: Sequence, rl: Settings, context: int, *, step: float = 1e-6) -> list[float]:
    """Difference quotients of a sequence's numerator by the log-prob of each of its tokens."""
    slopes = []
    for i, token in enumerate(part.tokens):
        ends = []
        for sign in (1, -1):
            moved = replace(token, new=token.new + sign * step)
            tokens = (*part.tokens[:i], moved, *part.tokens[i + 1 :])
            ends.append(sequence_loss(replace(part, tokens=tokens), rl, context)[0])
        slopes.append((ends[0] - ends[1]) / (2 * step))
    return slopes


def sequence_loss(part: Sequence, rl: Settings, context: int) -> tuple[float, float]:
    """What a sequence adds to numerator and denominator."""
    tokens, count = part.tokens, len(part.tokens)
    trainer = [token.old if rl["ratio"] == "recomputed" else token.frozen for token in tokens]
    gaps = [lp - token.sampler for lp, token in zip(trainer, tokens, strict=True)]
    limit = rl["sequence_error_limit"]
    if limit is not None and sum(math.exp(abs(gap)) for gap in gaps) / count > limit:
        return 0.0, 0.0
    weights = importance(gaps, rl["importance"])
    total = 0.0
    for i, token in enumerate(tokens):
        total -= weights[i] * surrogate(tokens, i, part.advantage, rl)
        total += rl["kl"]["coefficient"] * kl(token.new - token.reference, rl["kl"]["estimator"])
        total += rl["z_loss_coefficient"] * token.norm**2
    if rl["normalisation"] == "token":
        return total, float(count)
    if rl["normalisation"] == "sequence":
        return total / count, 1.0
    return total / (rl["constant_length"] or context), 1.0


def surrogate(tokens: tuple[Token, ...], i: int, advantage: float, rl: Settings) -> float:
    """The objective of token i, to be maximised."""
    moving = [token.new - _old(token, rl["ratio"]) for token in tokens]
    still = [token.frozen - _old(token, rl["ratio"]) for token in tokens]
    low, high = 1 - rl["clip_low"], 1 + rl["clip_high"]
    match rl["objective"]:
        case "cispo":
            return min(max(math.exp(still[i]), low), high) * advantage * tokens[i].new
        case "gspo":
            ratio = math.exp(sum(moving) / len(tokens))
        case "gspo_token":
            ratio = math.exp(sum(still) / len(tokens)) * math.exp(tokens[i].new - tokens[i].frozen)
        case "ppo":
            ratio = math.exp(moving[i])
        case other:
            raise AssertionError(other)
    value = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if rl["clip_c"] is not None and advantage < 0:
        value = max(value, rl["clip_c"] * advantage)
    return value


def importance(gaps: list[float], chosen: Settings) -> list[float]:
    """Weight of each token of a sequence for exp(gap)."""
    if chosen["kind"] == "none":
        return [1.0] * len(gaps)
    if chosen["kind"] == "truncated":
        return [min(math.exp(gap), chosen["high"]) for gap in gaps]
    geometric = math.exp(sum(gaps) / len(gaps))
    inside = chosen["low"] <= geometric <= chosen["high"]
    return [math.exp(gap) if inside else 0.0 for gap in gaps]


def kl(log_ratio: float, estimator: str) -> float:
    """Schulman's estimators, r being p of the reference / p of the policy."""
    r = math.exp(-log_ratio)
    return {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": (r - 1) - math.log(r)}[estimator]


def _old(token: Token, ratio: str) -> float:
    return {"on_policy": token.frozen, "sampler": token.sampler, "recomputed": token.old}[ratio]
