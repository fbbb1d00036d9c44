"""The jaxrl side of tools/bench_train.py: prompts, rollouts by the engine, steps by the learner."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.algorithm import build_learner, group_options
from jaxrl.assembly import build_harness, build_model, build_tasks, build_tokenizer
from jaxrl.config import Config, load
from jaxrl.contracts import Outcome, SampleKey, Sampling, Trajectory, TrajectoryGroup
from jaxrl.engine.engine import Engine, EngineOptions
from jaxrl.handover import WeightHandOver
from jaxrl.rollout.renderer import Renderer
from jaxrl.stepping import StepOptions, StepResult, StepTrainer

TOOL_OUTPUT = "error: old_str: 0 matches in the file"

type Play = Callable[[int], Coroutine[Any, Any, StepResult]]


@dataclass(frozen=True)
class Prompt:
    """A task's prompt; the quickstart's tokenizer gives its text these ids."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Completion:
    """What follows a prompt, and which of its tokens are trained."""

    ids: list[int]
    mask: list[int]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of a step. `fixed`: completions are given, and only the update is measured."""

    updates: int
    fixed: bool
    prompts: int
    samples: int
    new_tokens: int
    rows: int
    row_samples: int  # the longest fit a packed row that often

    def config(self, *, longest: int = 1) -> Config:
        """The quickstart's model and optimizer with the recipe that both sides can play.

        longest: tokens of the longest sample with its prompt.
        """
        given = "recomputed" if self.updates > 1 else "on_policy"
        settings = {
            "rl.prompts_per_step": self.prompts,
            "rl.group_size": self.samples,
            "rl.updates_per_step": self.updates,
            "rl.rows_per_microbatch": self.rows,
            "rl.row_length": self.row_samples * longest,
            "rl.ratio": given if self.fixed else "sampler",
            "rl.baseline": "mean",
            "rl.drop_equal_groups": "false",
            "rl.z_loss_coefficient": 0,
            "optimizer.warmup_steps": 0,
        }
        return load(overrides=[f"{key}={value}" for key, value in settings.items()])


def prompts_of(count: int) -> list[Prompt]:
    """Those of the first training tasks. Raises `ConfigError` for more than there can be."""
    config = load(overrides=[f"tasks.train_count={count}"])
    tokenizer = build_tokenizer(config)
    renderer = Renderer(tokenizer, build_harness(config))
    texts = [tokenizer.decode(renderer.initial(task)) for task in build_tasks(config, "train").specs]
    return [Prompt(text, tokenizer.encode_markup(text)) for text in texts]


def reward(completion: Sequence[int]) -> float:
    """As in tools/trl_bench.py: cheap, and different within a group."""
    return sum(completion) % 7 / 6


@asynccontextmanager
async def sampling(case: Case, prompts: Sequence[Prompt]) -> AsyncIterator[Play]:
    """Plays whole steps: step i takes the prompts from i * case.prompts on."""
    config = case.config(longest=_longest_prompt(prompts) + case.new_tokens)
    with ThreadPoolExecutor(1, thread_name_prefix="device") as device:
        model = build_model(config)
        learner = build_learner(config, model)
        engine = Engine(model, _engine_options(case, prompts), device=device)
        trainer = StepTrainer(learner, options=_step_options(config), device=device)
        weights = WeightHandOver(engine, learner, policy=None, device=device)

        async def play(index: int) -> StepResult:
            chosen = prompts[index * case.prompts : (index + 1) * case.prompts]
            result = await trainer.train(_sampled(engine, case, chosen, step=index))
            await weights.publish()
            return result

        async with engine:
            await engine.warm_up()
            await weights.publish()
            yield play


@asynccontextmanager
async def updating(
    case: Case, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> AsyncIterator[Play]:
    """Plays updates on the same completions again and again; those of a prompt lie side by side."""
    longest = _longest_prompt(prompts) + max(len(each.ids) for each in completions)
    config = case.config(longest=longest)
    groups = [
        _group(str(p), prompt.ids, completions[p * case.samples : (p + 1) * case.samples])
        for p, prompt in enumerate(prompts)
    ]
    with ThreadPoolExecutor(1, thread_name_prefix="device") as device:
        learner = build_learner(config, build_model(config))
        trainer = StepTrainer(learner, options=_step_options(config), device=device)

        async def stored() -> AsyncIterator[TrajectoryGroup]:
            for group in groups:
                yield group

        yield lambda index: trainer.train(stored())


async def completions_of(case: Case, prompts: Sequence[Prompt]) -> list[Completion]:
    """Sampled by the starting checkpoint, with a tool's output in the middle.

    Up to 12 of the last tokens are not trained either: were it the same number for all, the loss would be 0
    like the sum of the advantages, whatever a side computes.
    """
    config = case.config()
    renderer = Renderer(build_tokenizer(config), build_harness(config))
    said, half = renderer.observation([TOOL_OUTPUT], closed=False), case.new_tokens // 2
    async with Engine(build_model(config), _engine_options(case, prompts)) as engine:
        groups = [group async for group in _sampled(engine, case, prompts, step=0)]
    made = []
    for group in groups:
        for trajectory in group.trajectories:
            ids, rest = trajectory.tokens[trajectory.loss_mask].tolist(), 7 * trajectory.sample % 13
            mask = [1] * half + [0] * len(said) + [1] * (len(ids) - half - rest) + [0] * rest
            made.append(Completion(ids[:half] + said + ids[half:], mask))
    return made


async def _sampled(
    engine: Engine, case: Case, prompts: Sequence[Prompt], *, step: int
) -> AsyncIterator[TrajectoryGroup]:
    """All groups at once, in the order of the prompts."""

    async def episode(prompt: int, sample: int) -> Completion:
        session, key = engine.open_session(), SampleKey(0, str(prompt), step, sample, 0)
        out = await session.generate(
            prompts[prompt].ids, key=key, sampling=Sampling(), max_tokens=case.new_tokens
        )
        session.close()
        logprobs[prompt, sample] = out.logprobs
        return Completion(list(out.tokens), [1] * len(out.tokens))

    logprobs = np.zeros((len(prompts), case.samples, case.new_tokens), np.float32)
    running = [asyncio.gather(*(episode(p, g) for g in range(case.samples))) for p in range(len(prompts))]
    for p, group in enumerate(running):
        yield _group(str(p), prompts[p].ids, await group, logprobs_GT=logprobs[p])


def _group(
    task: str, prompt: list[int], completions: Sequence[Completion], *, logprobs_GT: np.ndarray | None = None
) -> TrajectoryGroup:
    """The trajectories of one prompt; `logprobs_GT` of the tokens behind it, 0 where None."""
    made = []
    for sample, completion in enumerate(completions):
        logprobs_T = np.zeros(len(prompt) + len(completion.ids), np.float32)
        if logprobs_GT is not None:
            logprobs_T[len(prompt) :] = logprobs_GT[sample]
        mask_T = np.array([0] * len(prompt) + completion.mask, bool)
        made.append(
            Trajectory(
                task=task,
                epoch=0,
                sample=sample,
                tokens=np.array(prompt + completion.ids, np.int32),
                loss_mask=mask_T,
                logprobs=logprobs_T,
                full_logprobs=logprobs_T,
                versions=np.where(mask_T, 0, -1).astype(np.int32),
                turns=(),
                outcome=Outcome.CONTEXT_FULL,  # the one whose reward counts as it was given
                reward=reward(completion.ids),
            )
        )
    return TrajectoryGroup(task=task, epoch=0, trajectories=made)


def _longest_prompt(prompts: Sequence[Prompt]) -> int:
    return max(len(prompt.ids) for prompt in prompts)


def _engine_options(case: Case, prompts: Sequence[Prompt]) -> EngineOptions:
    return EngineOptions(
        slots=case.prompts * case.samples,
        context=_longest_prompt(prompts) + case.new_tokens,
        parked=case.prompts,
        decode_steps=8,
    )


def _step_options(config: Config) -> StepOptions:
    return StepOptions(
        rows=config.rl.rows_per_microbatch,
        row_length=config.rl.row_length,
        updates=config.rl.updates_per_step,
        group=group_options(config),
    )
