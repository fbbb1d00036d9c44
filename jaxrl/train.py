"""GRPO, from the first rollout to the last evaluation.

    python -m jaxrl.train [file.yaml] [section.key=value ...]

Without a file: the quickstart. The same run name goes on where it stopped. Ctrl-C finishes the step,
saves and stops; a second one stops at once.
"""

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from functools import partial
from pathlib import Path

from jaxrl.algorithm import build_learner, check_algorithm, group_options
from jaxrl.assembly import (
    Parts,
    build_model,
    build_tasks,
    check_prompts,
    check_sizes,
    check_step,
    export_model,
    open_parts,
)
from jaxrl.config import Config, explained, from_command_line
from jaxrl.contracts import Sampling, TrajectoryGroup
from jaxrl.devices import build_mesh
from jaxrl.evaluation import Evaluation, evaluate, record
from jaxrl.handover import WeightHandOver
from jaxrl.model.transformer import Transformer
from jaxrl.progress import Progress
from jaxrl.reporting import StepTimes, no_signal, step_line, step_metrics, trained_ages, write_rollouts
from jaxrl.rl.examples import group_examples
from jaxrl.rl.learner import Learner
from jaxrl.rollout.waves import waves
from jaxrl.runs import OpenRun, evaluations, open_run
from jaxrl.stepping import StepOptions, StepResult, StepTrainer
from jaxrl.summary import gains
from jaxrl.supply import Supply, bound
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
    bound(config)
    check_algorithm(config)
    with ExitStack() as stack:
        device = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="device"))
        mesh = build_mesh(config)
        model = build_model(config, mesh=mesh)
        learner = build_learner(config, model, mesh=mesh)
        opened = stack.enter_context(open_run(run, config, learner))
        progress = stack.enter_context(Progress(config.run.run_name, steps=config.run.steps))
        progress.note(opened.greeting)
        async with open_parts(config, model, device, mesh=mesh) as parts:
            await Trainer(config, opened, learner, parts, progress, device).run()
        for line in gains(evaluations(run)):
            progress.note(line)


class Trainer:
    """The loop: train on a step's groups, publish the weights, let generation move on.

    With `rl.max_staleness` 0 a step's groups are generated in that step; otherwise in earlier ones too.
    """

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
        self._supply = Supply(config, opened, parts.world)
        self._groups = self._supply.open(self._tasks)
        policy = config.rl.weight_update if config.rl.max_staleness else None
        self._weights = WeightHandOver(parts.engine, learner, policy=policy, device=device)
        self._stopping = False

    async def run(self) -> None:
        """Steps and evaluations until the last one, or until asked to stop."""
        self._listen_for_stop()
        async with self._groups:
            await self._steps()

    async def _steps(self) -> None:
        await self._weights.publish()
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
        stats, version = self._parts.engine.stats, self._learner.version
        started, generated = time.perf_counter(), stats.device_seconds
        self._progress.phase("training")
        self._supply.begin_step()
        self._groups.begin_step(version=version, left=self._config.run.steps - step + 1)
        trainer = StepTrainer(self._learner, options=self._stepping(step), device=self._device)
        async with aclosing(self._draw(version)) as groups:
            result = await trainer.train(groups)
        sync = await self._weights.publish()
        total, generating = time.perf_counter() - started, stats.device_seconds - generated
        times = StepTimes(total=total, sync=sync, engine=generating)
        self._report(step, result, times, trained_ages(result, version=version))

    def _draw(self, version: int) -> AsyncGenerator[TrajectoryGroup]:
        """The step's groups, and further ones for those that teach nothing, if the settings ask for them."""
        rl, options = self._config.rl, group_options(self._config)
        return waves(
            partial(self._groups.groups, version=version),
            wanted=rl.prompts_per_step,
            rounds=rl.dynamic_sampling_rounds,
            mixed=lambda group: group_examples(group, options=options).mixed,
        )

    def _report(self, step: int, result: StepResult, times: StepTimes, ages: Counter[int]) -> None:
        feed = self._opened.feed
        self._opened.ages = dict(Counter(self._opened.ages) + ages)
        write_rollouts(feed, step, result.groups, self._parts.world.renderer)
        metrics = step_metrics(result, self._parts, times=times, ages=ages, lost=feed.lost)
        feed.metrics(step, metrics | self._supply.metrics(self._groups))
        if self._config.rl.dynamic_sampling_rounds:
            mixed = sum(group.mixed for group in result.examples)
            feed.metrics(step, {"groups/missing": self._config.rl.prompts_per_step - mixed})
        feed.event("step", step, cursor=self._groups.position, version=self._learner.version)
        for report in result.reports:
            if not report.applied:
                feed.event("alert", step, reason=f"update skipped: {report.skipped}")
        self._progress.step(step_line(step, result, metrics))
        if told := no_signal(step, result):
            self._progress.note(told)

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
            slots=self._supply.slots,
        )
        record(self._opened.feed, made, split="validation")
        self._show(made)

    def _show(self, made: Evaluation) -> None:
        scores = {f"pass@{k}": made.pass_at(k) for k in sorted({1, made.samples})}
        self._progress.evaluation(made.step, f"{made.label} ({len(made.resolved)} tasks)", scores)

    def _checkpoint_due(self, step: int) -> bool:
        return step % self._config.checkpoint.every == 0 or step == self._config.run.steps

    async def _save(self, step: int) -> None:
        started, groups = time.perf_counter(), self._groups.finished()
        write = partial(self._opened.save, step, self._groups.position, self._learner, groups=groups)
        await asyncio.get_running_loop().run_in_executor(self._device, write)
        self._opened.feed.metrics(step, {"time/checkpoint": time.perf_counter() - started})

    def _stepping(self, step: int) -> StepOptions:
        chosen = self._config.rl
        return StepOptions(
            rows=chosen.rows_per_microbatch,
            row_length=chosen.row_length,
            updates=chosen.updates_per_step,
            group=group_options(self._config),
            shuffle_seed=self._config.run.seed * 1_000_000 + step if chosen.shuffle_rewards else None,
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
