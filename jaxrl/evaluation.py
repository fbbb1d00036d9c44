"""Plays every task of a set a few times and says how many were repaired. Only entry points import this."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from jaxrl.contracts import Outcome, Sampling
from jaxrl.feed.schema import series
from jaxrl.feed.writer import RunWriter, Value
from jaxrl.rollout.agent import World
from jaxrl.rollout.collector import Collector, CollectorOptions
from jaxrl.statistics import Interval, bootstrap_mean, pass_at_k, pass_hat_k
from jaxrl.tasksets import Tasks


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Outcomes of `samples` rollouts of every task, under weights of `version`."""

    step: int
    version: int
    sampling: Sampling
    samples: int
    resolved: Mapping[str, int]  # by task, rollouts that repaired it
    outcomes: Mapping[str, int]
    seconds: float

    @property
    def label(self) -> str:
        return sampling_label(self.sampling)

    def per_task(self, k: int) -> dict[str, float]:
        """Unbiased pass@k of each task."""
        values = pass_at_k(np.array(list(self.resolved.values())), samples=self.samples, k=k)
        return dict(zip(self.resolved, values.tolist(), strict=True))

    def pass_at(self, k: int) -> Interval:
        """Unbiased pass@k, mean over tasks with its 95% interval."""
        return bootstrap_mean(np.array(list(self.per_task(k).values())))

    def pass_hat(self, k: int) -> Interval:
        """Unbiased pass^k: all of k draws resolve."""
        counts = np.array(list(self.resolved.values()))
        return bootstrap_mean(pass_hat_k(counts, samples=self.samples, k=k))

    @property
    def malformed(self) -> float:
        """Share of rollouts that ended malformed."""
        return self.outcomes.get(Outcome.MALFORMED, 0) / max(1, sum(self.outcomes.values()))


def sampling_label(sampling: Sampling) -> str:
    """How an evaluation's sampling is called in tables and events."""
    return f"T={sampling.temperature:g} top_p={sampling.top_p:g}"


async def evaluate(
    world: World,
    tasks: Tasks,
    *,
    step: int,
    version: int,
    sampling: Sampling,
    samples: int,
    seed: int,
    episodes: int,
    on_group: Callable[[int], None] = lambda done: None,
    slots: asyncio.Semaphore | None = None,
) -> Evaluation:
    """Plays `samples` rollouts of every task; equal seeds draw equal randomness at every step.

    `slots` bounds the episodes together with those of whoever shares it.
    """
    options = CollectorOptions(seed=seed, group_size=samples, sampling=sampling, episodes=episodes)
    collector = Collector(world, options=options, slots=slots)
    resolved = dict.fromkeys((spec.instance_id for spec in tasks.specs), 0)
    outcomes: Counter[str] = Counter()
    started = time.perf_counter()
    async with aclosing(collector.collect(tasks.specs, tasks.hidden, epoch=0)) as groups:
        done = 0
        async for group in groups:
            endings = [trajectory.outcome for trajectory in group.trajectories]
            resolved[group.task] = endings.count(Outcome.RESOLVED)
            outcomes.update(ending.value for ending in endings)
            on_group(done := done + 1)
    return Evaluation(
        step=step,
        version=version,
        sampling=sampling,
        samples=samples,
        resolved=resolved,
        outcomes=dict(outcomes),
        seconds=time.perf_counter() - started,
    )


def record(feed: RunWriter, evaluation: Evaluation, *, split: str) -> None:
    """Writes an evaluation to the feed: metrics with intervals, and an event with every task's result."""
    temperature, top_p = evaluation.sampling.temperature, evaluation.sampling.top_p
    values: dict[str, Value] = {"time/evaluation": evaluation.seconds}
    for k in sorted({1, evaluation.samples}):
        interval = evaluation.pass_at(k)
        labels = {"k": k, "temperature": temperature, "top_p": top_p}
        values |= {
            series("eval/pass_at", **labels): interval.mean,
            series("eval/pass_at_low", **labels): interval.low,
            series("eval/pass_at_high", **labels): interval.high,
        }
    for outcome, count in evaluation.outcomes.items():
        name = series("eval/rollouts", outcome=outcome, temperature=temperature, top_p=top_p)
        values[name] = count
    feed.metrics(evaluation.step, values)
    feed.event(
        "eval",
        evaluation.step,
        split=split,
        version=evaluation.version,
        sampling={"temperature": temperature, "top_p": top_p},
        samples=evaluation.samples,
        resolved=evaluation.resolved,
        outcomes=evaluation.outcomes,
        seconds=evaluation.seconds,
    )


def from_event(row: Mapping) -> Evaluation:
    """The evaluation that an `eval` event holds."""
    return Evaluation(
        step=row["step"],
        version=row["version"],
        sampling=Sampling(**row["sampling"]),
        samples=row["samples"],
        resolved=row["resolved"],
        outcomes=row["outcomes"],
        seconds=row["seconds"],
    )
