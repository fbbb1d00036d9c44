"""GRPO, from the first rollout to the last evaluation.

    python -m jaxrl.train [file.yaml] [section.key=value ...]

Without a file: the quickstart. The same run name goes on where it stopped. Ctrl-C finishes the step,
saves and stops; a second one stops at once.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from pathlib import Path

from flax import nnx

from jaxrl.assembly import (
    Parts,
    build_model,
    build_sampling,
    build_tasks,
    check_prompts,
    check_sizes,
    check_step,
    export_model,
    learner_options,
    open_parts,
)
from jaxrl.config import Config, explained, from_command_line
from jaxrl.contracts import Sampling
from jaxrl.evaluation import Evaluation, evaluate, record
from jaxrl.model.transformer import Transformer
from jaxrl.progress import Progress
from jaxrl.reporting import step_line, step_metrics, write_rollouts
from jaxrl.rl.advantage import AdvantageOptions
from jaxrl.rl.examples import GroupOptions
from jaxrl.rl.learner import Learner
from jaxrl.rl.loss import PolicyLoss
from jaxrl.rl.scoring import TransformerScorer
from jaxrl.rollout.collector import Collector, CollectorOptions, Retry
from jaxrl.rollout.cursor import TaskCursor
from jaxrl.runs import OpenRun, evaluations, open_run
from jaxrl.stepping import StepOptions, StepResult, StepTrainer
from jaxrl.summary import gains
from jaxrl.tasksets import First

COMMAND = "python -m jaxrl.train"
STOPPED_AT_ONCE = 130  # what shells report for a program that Ctrl-C ended


def main(argv: Sequence[str]) -> None:
    """Entry point of `python -m jaxrl.train`."""
    config = from_command_line(argv, command=COMMAND)
    with explained(COMMAND):
        try:
            asyncio.run(train(config))
        except asyncio.CancelledError:  # by a second Ctrl-C
            sys.exit(STOPPED_AT_ONCE)


async def train(config: Config) -> None:
    """Trains the run of `config` to its last step, from its newest checkpoint if it has one."""
    run = Path(config.run.output_dir) / config.run.run_name
    check_sizes(config)
    with ExitStack() as stack:
        device = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="device"))
        model = build_model(config)
        learner = build_learner(config, model)
        opened = stack.enter_context(open_run(run, config, learner))
        progress = stack.enter_context(Progress(config.run.run_name, steps=config.run.steps))
        progress.note(opened.greeting)
        async with open_parts(config, model, device) as parts:
            await Trainer(config, opened, learner, parts, progress, device).run()
        for line in gains(evaluations(run)):
            progress.note(line)


def build_learner(config: Config, model: Transformer) -> Learner[Transformer]:
    """The learner with the settings' loss and optimizer."""
    return Learner(
        model,
        score=TransformerScorer(temperature=config.sampling.temperature),
        loss=PolicyLoss(
            ratio="sampler",
            clip_low=config.rl.clip_low,
            clip_high=config.rl.clip_high,
            aux_coefficient=config.rl.aux_loss_coefficient,
            z_coefficient=config.rl.z_loss_coefficient,
        ),
        options=learner_options(config, total_steps=config.run.steps * config.rl.updates_per_step),
    )


class Trainer:
    """The synchronous loop: collect a step's groups, train on them, publish the weights."""

    def __init__(
        self,
        config: Config,
        opened: OpenRun,
        learner: Learner[Transformer],
        parts: Parts,
        progress: Progress,
        device: Executor,
    ) -> None:
        self._config, self._opened, self._learner = config, opened, learner
        self._parts, self._progress, self._device = parts, progress, device
        self._tasks = build_tasks(config, "train", tell=progress.busy)
        self._held_out = build_tasks(config, "validation", tell=progress.busy)
        for tasks in (self._tasks, self._held_out):
            check_prompts(parts.world, tasks)
        check_step(config, self._tasks)
        self._cursor = TaskCursor(self._tasks.specs, position=opened.cursor)
        self._collector = Collector(parts.world, options=self._collecting(), on_retry=self._retried)
        self._retries = 0
        self._stopping = False

    async def run(self) -> None:
        """Steps and evaluations until the last one, or until asked to stop."""
        self._listen_for_stop()
        self._publish()
        step = self._opened.step
        if self._opened.fresh:
            await self._save(step)  # so that a run killed early keeps its first evaluation
        await self._evaluate_due(step)
        while step < self._config.run.steps and not self._stopping:
            step += 1
            await self._step(step)
            if self._checkpoint_due(step) or self._stopping:
                await self._save(step)
            await self._evaluate_due(step)
        export_model(self._config, self._learner.model(), self._opened.path / "model")
        self._opened.feed.event("stop", step, reason="asked to stop" if self._stopping else "finished")

    async def _step(self, step: int) -> None:
        started = time.perf_counter()
        self._progress.phase("training")
        self._retries = 0
        epoch, tasks = self._cursor.take(self._config.rl.prompts_per_step)
        trainer = StepTrainer(self._learner, options=self._stepping(step), device=self._device)
        async with aclosing(self._collector.collect(tasks, self._tasks.hidden, epoch=epoch)) as groups:
            result = await trainer.train(groups, [task.instance_id for task in tasks])
        self._publish()
        self._report(step, result, time.perf_counter() - started)

    def _report(self, step: int, result: StepResult, seconds: float) -> None:
        feed = self._opened.feed
        write_rollouts(feed, step, result.groups, self._parts.world.renderer)
        metrics = step_metrics(result, self._parts, seconds=seconds, lost=feed.lost)
        feed.metrics(step, metrics | {"rollouts/retried": self._retries})
        feed.event("step", step, cursor=self._cursor.position, version=self._learner.version)
        for report in result.reports:
            if not report.applied:
                feed.event("alert", step, reason=f"update skipped: {report.skipped}")
        self._progress.step(step_line(step, result, metrics))

    def _publish(self) -> None:
        """Hands the weights to the engine, which is drained between steps."""
        self._parts.engine.set_weights(nnx.state(self._learner.model()), version=self._learner.version)

    async def _evaluate_due(self, step: int) -> None:
        every, steps = self._config.evaluation.every, self._config.run.steps
        whole = step in (0, steps)
        if self._stopping or not (whole or (every and step % every == 0)):
            return
        for temperature, top_p in self._config.evaluation.sampling_sets:
            if self._stopping:
                return
            await self._evaluate(step, Sampling(temperature=temperature, top_p=top_p), whole=whole)

    async def _evaluate(self, step: int, sampling: Sampling, *, whole: bool) -> None:
        if any(done.step == step and done.sampling == sampling for done in evaluations(self._opened.path)):
            return
        chosen = self._config.evaluation
        tasks = self._held_out if whole else First(self._held_out, chosen.inline_tasks)
        self._progress.phase("evaluation")
        made = await evaluate(
            self._parts.world,
            tasks,
            step=step,
            version=self._learner.version,
            sampling=sampling,
            samples=chosen.samples,
            seed=chosen.seed,
            episodes=self._config.sandbox.concurrency,
            on_group=lambda done: self._progress.live(tasks=f"{done}/{len(tasks)}"),
        )
        record(self._opened.feed, made, split="validation")
        self._show(made)

    def _show(self, made: Evaluation) -> None:
        scores = {f"pass@{k}": made.pass_at(k) for k in sorted({1, made.samples})}
        self._progress.evaluation(made.step, f"{made.label} ({len(made.resolved)} tasks)", scores)

    def _checkpoint_due(self, step: int) -> bool:
        return step % self._config.checkpoint.every == 0 or step == self._config.run.steps

    async def _save(self, step: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(
            self._device, self._opened.save, step, self._cursor.position, self._learner
        )

    def _collecting(self) -> CollectorOptions:
        return CollectorOptions(
            seed=self._config.run.seed,
            group_size=self._config.rl.group_size,
            sampling=build_sampling(self._config),
            episodes=self._config.sandbox.concurrency,
        )

    def _stepping(self, step: int) -> StepOptions:
        chosen = self._config.rl
        advantage = AdvantageOptions(baseline=chosen.baseline, normalise_std=chosen.normalise_std)
        return StepOptions(
            rows=chosen.rows_per_microbatch,
            row_length=chosen.row_length,
            updates=chosen.updates_per_step,
            group=GroupOptions(advantage=advantage, drop_equal_groups=chosen.drop_equal_groups),
            shuffle_seed=self._config.run.seed * 1_000_000 + step if chosen.shuffle_rewards else None,
        )

    def _retried(self, retry: Retry) -> None:
        self._retries += 1
        self._opened.feed.event(
            "alert",
            reason=f"rollout retried after {retry.outcome.value}: {retry.detail}",
            task=retry.task,
            sample=retry.sample,
        )

    def _listen_for_stop(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            if self._stopping:
                task.cancel()
                return
            self._stopping = True
            self._progress.note("stopping after this step; Ctrl-C again stops at once")

        loop.add_signal_handler(signal.SIGINT, stop)


if __name__ == "__main__":
    main(sys.argv[1:])
