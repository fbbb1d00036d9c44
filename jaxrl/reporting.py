"""What a step writes to the feed and shows in the terminal. Only entry points import this."""

import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.assembly import Parts
from jaxrl.contracts import OUTCOME_RULES, Trajectory, TrajectoryGroup
from jaxrl.feed.schema import series
from jaxrl.feed.writer import RunWriter, Value
from jaxrl.progress import StepLine
from jaxrl.rl.learner import UpdateReport
from jaxrl.rollout.renderer import Renderer
from jaxrl.statistics import bootstrap_mean
from jaxrl.stepping import StepResult


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds: wall clock of a step, its hand-over of weights, device time of generation meanwhile."""

    total: float
    sync: float
    engine: float

    def idle(self, training: float) -> float:
        """Seconds in which the device thread had neither a job of the engine's nor of the learner's.

        Microbatches are started without waiting for them; who waits for them next is charged: the engine's
        next job or the update. Where nobody does for a while, that time counts as idle.
        """
        return max(0.0, self.total - self.engine - training)


def rollout_row(trajectory: Trajectory) -> dict:
    """A trajectory's row in the feed: identity, result, sizes, versions, seconds."""
    sampled = trajectory.versions[trajectory.loss_mask]
    return {
        "task": trajectory.task,
        "epoch": trajectory.epoch,
        "sample": trajectory.sample,
        "outcome": trajectory.outcome.value,
        "reward": trajectory.reward,
        "detail": trajectory.detail,
        "turns": sum(turn.role == "assistant" for turn in trajectory.turns),
        "tokens": len(trajectory.tokens),
        "sampled": len(sampled),
        "versions": [int(sampled.min()), int(sampled.max())] if len(sampled) else None,
        "seconds": {part: round(value, 4) for part, value in trajectory.timings.items()},
    }


def write_rollouts(feed: RunWriter, step: int, groups: Sequence[TrajectoryGroup], renderer: Renderer) -> None:
    """A row and a transcript for every rollout of the step."""
    for group in groups:
        for trajectory in group.trajectories:
            text = renderer.tokenizer.decode(trajectory.tokens.tolist())
            feed.rollout(step, rollout_row(trajectory), text)


def step_metrics(
    result: StepResult, parts: Parts, *, times: StepTimes, ages: Mapping[int, int], lost: int
) -> dict[str, Value]:
    """All metrics of a step; `ages` counts its trained tokens by their age in weight versions."""
    idle = times.idle(result.training_seconds)
    return {
        "time/step": times.total,
        "time/generation": result.generation_seconds,
        "time/engine": times.engine,
        "time/training": result.training_seconds,
        "time/sync": times.sync,
        "time/idle": idle,
        "time/idle_share": (idle, times.total),
        "tokens/packing": (result.packed_tokens, result.packed_positions),
        "process/memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "feed/lost_rows": lost,
        **_sampled(result.groups),
        **_groups(result),
        **_updates(result.reports),
        **_staleness(ages),
        **({} if any(ages) else _agreement(result)),  # stale tokens are of other weights
        **_services(parts),
    }


def no_signal(step: int, result: StepResult) -> str:
    """Says that a step had nothing to learn from, and how its rollouts ended; "" if a group was mixed."""
    if any(group.mixed for group in result.examples):
        return ""
    rollouts = [trajectory for group in result.groups for trajectory in group.trajectories]
    outcomes = Counter(t.outcome.value for t in rollouts)
    ended = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    skipped = [f"; update skipped: {report.skipped}" for report in result.reports if report.skipped]
    return (
        f"step {step}: rewards are equal within each group, so every advantage is 0 and nothing can be "
        f"learnt ({len(rollouts)} rollouts: {ended}){''.join(dict.fromkeys(skipped))}"
    )


def trained_ages(result: StepResult, *, version: int) -> Counter[int]:
    """Tokens in the loss by their age: `version`, that of the step's start, minus the one that sampled."""
    ages: Counter[int] = Counter()
    for group, examples in zip(result.groups, result.examples, strict=True):
        for trajectory in (group.trajectories[sample] for sample in examples.samples):
            values, counts = np.unique(
                version - trajectory.versions[trajectory.loss_mask], return_counts=True
            )
            ages.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    return ages


def _staleness(ages: Mapping[int, int]) -> dict[str, Value]:
    if not ages:
        return {}
    total = sum(age * count for age, count in ages.items())
    return {"train/staleness": (total, sum(ages.values())), "train/staleness_max": max(ages)}


def _sampled(groups: Sequence[TrajectoryGroup]) -> dict[str, Value]:
    rollouts = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [t.reward for t in rollouts if t.reward is not None]
    sampled = sum(int(t.loss_mask.sum()) for t in rollouts)
    total = sum(len(t.tokens) for t in rollouts)
    outcomes = Counter(t.outcome.value for t in rollouts)
    voting = sum(OUTCOME_RULES[t.outcome].votes for t in rollouts)
    return {
        "reward/mean": (sum(rewards), len(rewards)),
        "reward/pass_rate": (outcomes["resolved"], voting),
        "rollouts/turns": (sum(row["turns"] for row in map(rollout_row, rollouts)), len(rollouts)),
        "rollouts/length": (total, len(rollouts)),
        "tokens/sampled": sampled,
        "tokens/context": total - sampled,
        "time/tools": sum(t.timings.get("tools", 0.0) for t in rollouts),
        "time/grading": sum(t.timings.get("grading", 0.0) for t in rollouts),
        **{series("rollouts/outcome", outcome=name): count for name, count in outcomes.items()},
    }


def _groups(result: StepResult) -> dict[str, Value]:
    rates = [pass_rate(group) for group in result.groups]
    trained = [example for group in result.examples for example in group.examples]
    return {
        "groups/mixed": (sum(group.mixed for group in result.examples), len(rates)),
        "groups/drawn": len(rates),
        "groups/all_pass": (rates.count(1.0), len(rates)),
        "groups/all_fail": (rates.count(0.0), len(rates)),
        "reward/overlong": (sum(group.penalty for group in result.examples), len(rates)),
        "train/advantage_size": (sum(abs(each.advantage) for each in trained), len(trained)),
    }


def pass_rate(group: TrajectoryGroup) -> float:
    """Share of a group's rollouts that repaired the task."""
    return float(np.mean([t.outcome.value == "resolved" for t in group.trajectories]))


def _updates(reports: Sequence[UpdateReport]) -> dict[str, Value]:
    applied = [report for report in reports if report.applied]
    values: dict[str, Value] = {"train/updates": len(applied), "train/version": reports[-1].version}
    if not applied:
        return values
    tokens = sum(report.metrics["tokens"] for report in applied)
    mean = {
        "train/entropy": "entropy",
        "train/ratio": "ratio",
        "train/importance_zero": "importance_zero_share",
        "train/kl": "kl",
    }
    clips = ("clip_low_share", "clip_high_share", "clip_c_share")
    last = applied[-1].metrics
    return values | {
        "tokens/trained": tokens,
        "train/loss": last["loss"],
        "train/aux_loss": last["aux_loss"],
        "train/grad_norm": last["grad_norm"],
        "train/learning_rate": last["learning_rate"],
        "train/dropped": sum(report.metrics["dropped_tokens"] for report in applied),
        "train/clipped": (sum(_total(applied, clip) for clip in clips), tokens),
        **{name: (_total(applied, key), tokens) for name, key in mean.items() if key in last},
    }


def _agreement(result: StepResult) -> dict[str, Value]:
    """How far the trainer's log-probs are from the sampler's, under the weights that sampled."""
    if result.logprob_errors:
        errors_T = np.concatenate(result.logprob_errors)
        total, tokens, largest = float(errors_T.sum()), len(errors_T), float(errors_T.max(initial=0.0))
    else:  # a single update sees those weights itself
        applied = [report for report in result.reports if report.applied]
        total, tokens = _total(applied, "logprob_error"), sum(r.metrics["tokens"] for r in applied)
        largest = max((report.metrics["logprob_error_max"] for report in applied), default=0.0)
    if not tokens:
        return {}
    return {"train/logprob_error_mean": (total, tokens), "train/logprob_error_max": largest}


def _total(reports: Sequence[UpdateReport], key: str) -> float:
    return sum(report.metrics[key] * report.metrics["tokens"] for report in reports)


def _services(parts: Parts) -> dict[str, Value]:
    stats = parts.engine.stats
    return {
        "engine/decoded": stats.sampled_tokens,
        "engine/prefilled": stats.prefilled_tokens,
        "engine/dispatches": stats.decode_dispatches + stats.prefill_dispatches,
        "grader/verdicts": parts.grader.hits + parts.grader.misses,
        "grader/cached": parts.grader.hits,
    }


def step_line(step: int, result: StepResult, metrics: Mapping[str, Value]) -> StepLine:
    """The step as the terminal shows it."""
    rates = np.array([pass_rate(group) for group in result.groups])
    return StepLine(
        step=step,
        pass_rate=bootstrap_mean(rates),
        mixed=sum(group.mixed for group in result.examples),
        groups=len(result.groups),
        loss=float(_number(metrics.get("train/loss", 0.0))),
        grad_norm=float(_number(metrics.get("train/grad_norm", 0.0))),
        seconds=float(_number(metrics["time/step"])),
        parts={
            "generation": result.generation_seconds,
            "training": result.training_seconds,
            "idle": float(_number(metrics["time/idle"])),
        },
    )


def _number(value: Value) -> float:
    assert not isinstance(value, tuple)
    return value
