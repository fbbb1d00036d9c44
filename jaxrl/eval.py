"""Evaluates a model on held-out tasks.

    python -m jaxrl.eval model.checkpoint=runs/quickstart/model evaluation.split=test [section.key=value ...]

Prints pass rates with intervals for every sampling of `evaluation.sampling_sets`, and appends what was
measured to OUTPUT_DIR/RUN_NAME/evaluations.jsonl.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from jaxrl.assembly import build_model, build_tasks, check_prompts, open_parts, package_versions
from jaxrl.config import Config, explained, from_command_line
from jaxrl.contracts import Sampling
from jaxrl.devices import build_mesh
from jaxrl.evaluation import Evaluation, evaluate
from jaxrl.feed.jsonl import JsonlWriter
from jaxrl.progress import Seldom

COMMAND = "python -m jaxrl.eval"


def main(argv: Sequence[str]) -> None:
    """Entry point of `python -m jaxrl.eval`."""
    config = from_command_line(argv, command=COMMAND)
    with explained(COMMAND):
        asyncio.run(run(config))


async def run(config: Config) -> list[Evaluation]:
    """One evaluation per sampling, in their order."""
    tasks = build_tasks(config, config.evaluation.split, tell=Seldom(partial(print, flush=True)))
    made, mesh = [], build_mesh(config)
    with ThreadPoolExecutor(1, thread_name_prefix="device") as device:
        async with open_parts(config, build_model(config, mesh=mesh), device, mesh=mesh) as parts:
            check_prompts(parts.world, tasks)
            for temperature, top_p in config.evaluation.sampling_sets:
                each = await evaluate(
                    parts.world,
                    tasks,
                    step=0,
                    version=0,
                    sampling=Sampling(temperature=temperature, top_p=top_p),
                    samples=config.evaluation.samples,
                    seed=config.evaluation.seed,
                    episodes=config.sandbox.concurrency,
                )
                made.append(each)
                print(describe(each, config.evaluation.split), flush=True)
    _append(config, made, tasks.digest)
    return made


def describe(evaluation: Evaluation, split: str) -> str:
    """One line: tasks, sampling, pass rates, how rollouts ended."""
    rates = "  ".join(f"pass@{k} {evaluation.pass_at(k)}" for k in sorted({1, evaluation.samples}))
    outcomes = ", ".join(f"{name} {count}" for name, count in sorted(evaluation.outcomes.items()))
    size = f"{len(evaluation.resolved)} tasks x {evaluation.samples}"
    return f"{split}  {size}  {evaluation.label}  {rates}  ({outcomes}; {evaluation.seconds:.1f} s)"


def _append(config: Config, made: Sequence[Evaluation], digest: str) -> None:
    folder = Path(config.run.output_dir) / config.run.run_name
    writer = JsonlWriter(folder / "evaluations.jsonl")
    for each in made:
        row = {
            "v": 1,
            "t": time.time(),
            "split": config.evaluation.split,
            "tasks_digest": digest,
            "model": config.model.checkpoint,
            "seed": config.evaluation.seed,
            "versions": package_versions(),
            **asdict(each),
        }
        writer.write(row)
    writer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
