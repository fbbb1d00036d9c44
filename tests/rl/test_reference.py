"""Every option of the algorithm against the independent reference: advantages, loss, gradient, in float64.

A case is a whole step: groups with all kinds of endings, packed into microbatches of two rows.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxrl.algorithm import group_options, policy_loss
from jaxrl.config import Config
from jaxrl.contracts import Outcome, Trajectory, TrajectoryGroup
from jaxrl.rl.examples import group_examples
from jaxrl.rl.loss import Scores
from jaxrl.rl.packing import pack
from jaxrl.rl.presets import PRESETS

ROW, MOST_TOKENS = 16, 400
AUX = 0.37
ENDINGS = list(reference.OUTCOMES)
KINDS = {
    "any": None,
    "equal": ["resolved"] * 4,
    "all masked": ["infra_error", "cancelled", "suspected_tampering", "infra_error"],
    "one success": ["resolved", "unresolved", "unresolved", "unresolved"],
    "one failure": ["resolved", "resolved", "unresolved", "resolved"],
    "a fault among them": ["resolved", "infra_error", "unresolved", "unresolved"],
    "a masked success": ["unresolved", "suspected_tampering", "unresolved", "resolved"],
}


@pytest.fixture(autouse=True, scope="module")
def x64():
    with jax.enable_x64(True):
        yield


@dataclass(frozen=True)
class Case:
    """Endings of each group's rollouts, the seed of all numbers, and the section `rl`."""

    endings: list[list[str]]
    seed: int
    rl: dict[str, Any]


@st.composite
def endings(draw):
    kind = KINDS[draw(st.sampled_from(list(KINDS)))]
    return kind or draw(st.lists(st.sampled_from(ENDINGS), min_size=2, max_size=5))


@st.composite
def algorithms(draw):
    """Sections `rl` whose pieces go together."""
    ratio = draw(st.sampled_from(["on_policy", "sampler", "recomputed"]))
    objective = draw(st.sampled_from(["ppo", "gspo", "gspo_token", "cispo"]))
    normalisations = ["token", "sequence", "constant"]
    corrections = [{"kind": "none"}, {"kind": "truncated", "high": 1.1}]
    corrections.append({"kind": "sequence_mask", "low": 0.93, "high": 1.08})
    drawn = {
        "baseline": st.sampled_from(["leave_one_out", "mean"]),
        "normalise_std": st.booleans(),
        "masked_vote": st.booleans(),
        "masked_outcomes": st.sampled_from([[], ["context_full"], ["context_full", "unresolved"]]),
        "overlong": st.sampled_from([{}, {"penalty": 0.5, "length": 10, "cache": 4}]),
        "clip_low": st.sampled_from([0.1, 1.0, 3e-4]),
        "clip_high": st.sampled_from([0.15, 4.0, 4e-4]),
        "clip_c": st.sampled_from([None, 1.2]) if objective == "ppo" else st.none(),
        "importance": st.sampled_from(corrections if ratio != "sampler" else corrections[:1]),
        "sequence_error_limit": st.sampled_from([None, 1.3]),
        "normalisation": st.sampled_from(["sequence"] if objective.startswith("gspo") else normalisations),
        "drop_equal_groups": st.booleans(),
        "kl": st.fixed_dictionaries(
            {
                "coefficient": st.sampled_from([0.0, 0.3]),
                "estimator": st.sampled_from(["k1", "k2", "k3"]),
                "reference": st.just("start"),
            }
        ),
        "aux_loss_coefficient": st.sampled_from([0.0, 0.5]),
        "z_loss_coefficient": st.sampled_from([0.0, 0.01]),
    }
    rl = draw(st.fixed_dictionaries(drawn)) | {"ratio": ratio, "objective": objective}
    if rl["normalisation"] == "constant":
        rl["constant_length"] = draw(st.sampled_from([None, 7]))
    return rl


CASES = st.builds(
    Case,
    endings=st.lists(endings(), max_size=4),
    seed=st.integers(0, 2**16),
    rl=st.one_of(algorithms(), st.sampled_from([{"preset": name} for name in PRESETS])),
)


class Step:
    """A case with its numbers: log-probs of the token with id i at place i of each table."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        self.config = Config.model_validate({"rl": case.rl})
        self.sampler = rng.normal(-2.0, 0.5, MOST_TOKENS).astype(np.float32).astype(np.float64)
        self.new, self.old, self.reference = (
            self.sampler + rng.normal(0, spread, MOST_TOKENS) for spread in (0.25, 0.1, 0.4)
        )
        self.norm = rng.normal(0, 2, MOST_TOKENS)
        ids = iter(range(1, MOST_TOKENS))
        self.groups = [
            [self._trajectory(rng, ids, task, sample, ending) for sample, ending in enumerate(group)]
            for task, group in enumerate(case.endings)
        ]

    def _trajectory(self, rng, ids, task: int, sample: int, ending: str) -> Trajectory:
        length = int(rng.integers(2, 13))
        tokens = np.array([next(ids) for _ in range(length)], np.int32)
        mask = rng.random(length) < rng.choice([0.0, 0.6, 0.9], p=[0.1, 0.6, 0.3])
        mask[0] = False
        return Trajectory(
            task=str(task),
            epoch=0,
            sample=sample,
            tokens=tokens,
            loss_mask=mask,
            logprobs=np.where(mask, self.sampler[tokens], 0).astype(np.float32),
            full_logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
            turns=(),
            outcome=Outcome(ending),
            reward={"context_full": float(rng.integers(0, 2)), "resolved": 1.0, "unresolved": 0.0}.get(
                ending
            ),
        )

    def rollouts(self) -> list[list[reference.Rollout]]:
        return [[self._rollout(member) for member in group] for group in self.groups]

    def _rollout(self, made: Trajectory) -> reference.Rollout:
        tokens = tuple(
            reference.Token(
                new=float(self.new[i]),
                frozen=float(self.new[i]),
                sampler=float(self.sampler[i]),
                old=float(self.old[i]),
                reference=float(self.reference[i]),
                norm=float(self.norm[i]),
            )
            for i in made.tokens[made.loss_mask]
        )
        return reference.Rollout(made.outcome.value, made.reward, len(made.tokens), tokens)

    def examples(self):
        options = group_options(self.config)
        for task, group in enumerate(self.groups):
            whole = TrajectoryGroup(task=str(task), epoch=0, trajectories=group)
            yield from group_examples(whole, options=options).examples

    def computed(self):
        """(advantage by id of a sequence's first token, numerator, denominator, gradient by token id)."""
        loss, examples = policy_loss(self.config), list(self.examples())
        advantages = np.zeros(MOST_TOKENS)
        for each in examples:
            advantages[each.tokens_T] = each.advantage
        numerator = denominator = 0.0
        slopes = np.zeros(MOST_TOKENS)
        for batch in pack(examples, rows=2, row_length=ROW):
            at = batch.targets_BT
            filled = batch._replace(
                weights_BT=batch.weights_BT.astype(np.float64),
                advantages_BT=advantages[at],
                sampler_logprobs_BT=self.sampler[at],
                old_logprobs_BT=self.old[at],
                reference_logprobs_BT=self.reference[at],
            )
            scores = Scores(
                *(jnp.asarray(x) for x in (self.new[at], 0 * self.new[at], self.norm[at], np.float64(AUX)))
            )

            def total(logprobs_BT, scores=scores, filled=filled):
                sums = loss(scores._replace(logprobs_BT=logprobs_BT), filled)
                return sums.numerator, sums.denominator

            (value, weight), slope_BT = jax.value_and_grad(total, has_aux=True)(scores.logprobs_BT)
            numerator, denominator = numerator + float(value), denominator + float(weight)
            trained = batch.weights_BT > 0
            assert (np.asarray(slope_BT)[~trained] == 0).all()
            slopes[at[trained]] = np.asarray(slope_BT)[trained]
        firsts = {int(each.tokens_T[0]): each.advantage for each in examples}
        return firsts, numerator, denominator, slopes


MLPERF = {"preset": "mlperf_v6_1"}


@settings(max_examples=100)
@given(CASES)
@example(Case([KINDS["one success"], KINDS["one failure"], KINDS["equal"]], 1, MLPERF))
@example(Case([KINDS["all masked"]], 2, MLPERF))
@example(Case([KINDS["a fault among them"]], 6, MLPERF))
@example(Case([KINDS["all masked"], KINDS["a fault among them"]], 3, {"preset": "dapo"}))
@example(Case([KINDS["a masked success"], KINDS["equal"]], 4, {"preset": "grpo"}))
@example(Case([], 5, {"preset": "gspo"}))
def test_a_step_equals_the_reference(case: Case):
    step = Step(case)
    rl, context = step.config.rl.model_dump(), step.config.engine.context
    wanted = reference.sequences(step.rollouts(), rl, context)
    firsts, numerator, denominator, slopes = step.computed()
    by_first = {int(step.groups[g][i].tokens[0]): each.advantage for each in wanted for g, i in [each.place]}
    assert firsts == pytest.approx(by_first, rel=1e-9, abs=1e-12)
    value, weight = reference.loss(wanted, rl, context, aux=AUX)
    assert numerator == pytest.approx(value, rel=1e-9, abs=1e-9)
    assert denominator == pytest.approx(weight, rel=1e-9)
    expected = np.zeros(MOST_TOKENS)
    for each in wanted:
        g, i = each.place
        made = step.groups[g][i]
        expected[made.tokens[made.loss_mask]] = reference.gradient(each, rl, context)
    np.testing.assert_allclose(slopes, expected, rtol=1e-6, atol=1e-8)


ENOUGH = [KINDS["one success"], KINDS["one failure"], KINDS["a fault among them"]]
TRAITS = {
    "objective": ["ppo", "gspo", "cispo"],  # gspo_token equals gspo where a sequence has one advantage
    "normalisation": ["token", "constant"],
    "clip_c": [None, 1.05],
    "sequence_error_limit": [None, 1.15],
    "masked_vote": [False, True],
    "kl.estimator": ["k1", "k2", "k3"],
    "importance.kind": ["none", "truncated", "sequence_mask"],
    "overlong.penalty": [0.0, 1.0],
}


@pytest.mark.parametrize("trait", TRAITS)
def test_every_option_changes_the_result(trait: str):
    """Else a test that compares the two sides would not see whether an option reaches the loss."""
    section, _, key = trait.rpartition(".")
    results = set()
    for value in TRAITS[trait]:
        base: dict[str, Any] = {
            "ratio": "recomputed" if section == "importance" else "sampler",
            "clip_high": 0.02,
            "normalisation": "sequence" if trait == "objective" else "token",
            "kl": {"coefficient": 0.3, "reference": "start"},
            "importance": {"low": 0.9, "high": 1.05},
            "overlong": {"length": 10, "cache": 4},
        }
        chosen = {section: base[section] | {key: value}} if section else {key: value}
        step = Step(Case(ENOUGH, 0, base | chosen))
        _, numerator, denominator, _ = step.computed()
        results.add((round(numerator, 9), denominator))
    assert len(results) == len(TRAITS[trait])
