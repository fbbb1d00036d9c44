"""Plays the known fix of every task through the agent loop, which must earn reward 1.0 each time.

    python -m jaxrl.replay [file.yaml] [section.key=value ...]

No model: the calls of each turn are written beforehand from the known fix, and become token ids, tool calls
in a sandbox, a diff and a verdict as a policy's would. A line per task; the status is 1 if one earned less.
"""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial

from jaxrl.assembly import build_harness, build_tasks, build_tokenizer, open_world
from jaxrl.config import Config, ConfigError, explained, from_command_line
from jaxrl.contracts import Sampling, Trajectory
from jaxrl.progress import Seldom
from jaxrl.rollout.collector import Collector, CollectorOptions, Retry
from jaxrl.rollout.known_fix import Turn, fix_turns
from jaxrl.rollout.scripted import Scripted
from jaxrl.tasksets import Tasks
from sandbox.tasks.schema import Hidden, TaskSpec

COMMAND = "python -m jaxrl.replay"


def main(argv: Sequence[str]) -> None:
    """Entry point of `python -m jaxrl.replay`."""
    config = from_command_line(argv, command=COMMAND)
    with explained(COMMAND):
        sys.exit(0 if asyncio.run(replay(config)) else 1)


async def replay(config: Config) -> bool:
    """Plays the tasks of `replay.splits`; whether all earned 1.0. Raises `ConfigError`."""
    tell = Seldom(partial(print, flush=True))
    sets = [build_tasks(config, split, tell=tell) for split in dict.fromkeys(config.replay.splits)]
    generator = _generator(config, sets)
    options = CollectorOptions(
        seed=config.run.seed, group_size=1, sampling=Sampling(), episodes=config.sandbox.concurrency
    )
    played: list[Trajectory] = []
    started = time.perf_counter()
    async with open_world(config, generator) as world:
        collector = Collector(world, options=options, on_retry=_tell_retry)
        for tasks in sets:
            async with aclosing(collector.collect(tasks.specs, tasks.hidden, epoch=0)) as groups:
                async for group in groups:
                    played += group.trajectories
                    print(describe(played[-1]), flush=True)
    print(summary(played, seconds=time.perf_counter() - started), flush=True)
    return all(each.reward == 1.0 for each in played)


def describe(played: Trajectory) -> str:
    """A task's line: reward, id, turns, tokens of the whole episode, seconds, and why it failed."""
    turns = sum(turn.role == "assistant" for turn in played.turns)
    reward = "none" if played.reward is None else f"{played.reward:.1f}"
    sizes = f"{turns} turns, {len(played.tokens)} tokens, {played.timings['episode']:.1f} s"
    why = "" if played.reward == 1.0 else f": {played.outcome.value}: {' '.join(played.detail.split())[:300]}"
    return f"{reward:>4}  {played.task}  ({sizes}){why}"


def summary(played: Sequence[Trajectory], *, seconds: float) -> str:
    """The last line: how many earned 1.0, and how long the longest episode was."""
    earned = sum(each.reward == 1.0 for each in played)
    longest = max(len(each.tokens) for each in played)
    return f"{earned} of {len(played)} tasks earned 1.0 in {seconds:.0f} s; longest episode {longest} tokens"


def known_files(task: TaskSpec, hidden: Hidden) -> tuple[dict[str, bytes | None], dict[str, bytes | None]]:
    """What the agent finds at the paths of the known fix, and what the fix puts there.

    Raises `ConfigError` for a task without a known fix, or whose files lie within an image.
    """
    fixed = {p: text.encode() if isinstance(text, str) else text for p, text in hidden.reference.items()}
    if not fixed:
        raise ConfigError(f"{task.instance_id}: expected a known fix to replay; its definition holds none")
    return {path: _found(task, path) for path in fixed}, fixed


def _found(task: TaskSpec, path: str) -> bytes | None:
    if path in task.files:
        return task.files[path].encode()
    if task.image.source is None:
        raise ConfigError(
            f"{task.instance_id}: expected {path} in a folder of this machine, and it is in image "
            f"{task.image.name or task.image.root}: replay sets of generated or project tasks"
        )
    file = task.image.source / path
    return file.read_bytes() if file.is_file() else None


def _generator(config: Config, sets: Sequence[Tasks]) -> Scripted:
    turns: dict[str, Sequence[Turn]] = {}
    for tasks in sets:
        for task in tasks.specs:
            turns[task.instance_id] = _turns(config, task, tasks.hidden(task.instance_id))
    return _scripted(config, turns)


def _turns(config: Config, task: TaskSpec, hidden: Hidden) -> Sequence[Turn]:
    before, after = known_files(task, hidden)
    try:
        return fix_turns(before, after, harness=build_harness(config).name, workdir=task.workdir)
    except ValueError as error:
        raise ConfigError(
            f"harness.name = {config.harness.name}: {task.instance_id}: {error}; take openhands"
        ) from error


def _scripted(config: Config, turns: Mapping[str, Sequence[Turn]]) -> Scripted:
    try:
        return Scripted(turns, tokenizer=build_tokenizer(config))
    except ValueError as error:
        raise ConfigError(f"model.tokenizer = {config.model.tokenizer}: {error}") from error


def _tell_retry(retry: Retry) -> None:
    print(f"again: {retry.task}: {retry.outcome.value}: {retry.detail}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
