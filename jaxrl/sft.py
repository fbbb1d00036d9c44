"""Supervised fine-tuning on conversations.

    python -m jaxrl.sft [file.yaml] sft.data='[a.jsonl]' run.run_name=NAME ...

Each line of the data is a conversation as `jaxrl.rollout.conversation` writes it. The trained model is
written to OUTPUT_DIR/RUN_NAME/model in hub layout; metrics go to the run's feed.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxrl.assembly import (
    build_harness,
    build_model,
    build_tokenizer,
    export_model,
    learner_options,
    package_versions,
)
from jaxrl.config import Config, ConfigError, explained, from_command_line, to_json
from jaxrl.feed.writer import RunWriter
from jaxrl.rl.learner import Learner
from jaxrl.rl.loss import CrossEntropy
from jaxrl.rl.packing import Example, pack
from jaxrl.rl.scoring import TransformerScorer
from jaxrl.rollout.conversation import from_json
from jaxrl.rollout.renderer import Renderer

COMMAND = "python -m jaxrl.sft"
REPORT_EVERY = 20


def main(argv: Sequence[str]) -> None:
    """Entry point of `python -m jaxrl.sft`."""
    config = from_command_line(argv, command=COMMAND)
    with explained(COMMAND):
        train(config, Path(config.run.output_dir) / config.run.run_name)


def train(config: Config, run: Path) -> None:
    """Trains `config.sft.steps` updates and writes the model to `run`/model.

    Raises `ConfigError` for data that can't be read, or a `run` that holds another training.
    """
    if (run / "checkpoints").exists():
        raise ConfigError(f"{run} holds a run of jaxrl.train: choose another run.run_name")
    lines = read_lines(config.sft.data)
    model = build_model(config)
    learner = Learner(
        model,
        score=TransformerScorer(),
        loss=CrossEntropy(
            aux_coefficient=config.sft.aux_loss_coefficient, z_coefficient=config.sft.z_loss_coefficient
        ),
        options=learner_options(config, total_steps=config.sft.steps),
    )
    renderer = Renderer(build_tokenizer(config), build_harness(config))
    feed = RunWriter(run, config=config.model_dump(mode="json"), versions=package_versions())
    batches = pack(
        examples(lines, renderer, seed=config.run.seed),
        rows=config.sft.rows,
        row_length=config.sft.row_length,
    )
    for step, batch in zip(range(1, config.sft.steps + 1), batches, strict=False):
        report = learner.update([batch])
        feed.metrics(
            step, {"sft/loss": report.metrics["loss"], "train/grad_norm": report.metrics["grad_norm"]}
        )
        if step % REPORT_EVERY == 0 or step == config.sft.steps:
            print(f"step {step}/{config.sft.steps}  loss {report.metrics['loss']:.4f}", flush=True)
    export_model(config, learner.model(), run / "model")
    feed.event("stop", config.sft.steps, config=to_json(config))
    feed.close()


def read_lines(paths: Sequence[str]) -> list[str]:
    """All conversations of the files. Raises `ConfigError` where there is none, or another line."""
    lines = []
    for path in paths:
        try:
            lines += Path(path).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"sft.data: can't read {path}: {error}") from None
    lines = [line for line in lines if line]
    for line in lines:
        try:
            from_json(line)
        except ValueError as error:
            raise ConfigError(f"sft.data: {error}") from error
    if not lines:
        raise ConfigError(f"sft.data = {list(paths)}: expected at least one file with a conversation a line")
    return lines


def examples(lines: Sequence[str], renderer: Renderer, *, seed: int) -> Iterator[Example]:
    """Endless rounds over the conversations, each shuffled by `seed` and the round's number."""
    round_number = 0
    while True:
        for line in random.Random(f"{seed}/{round_number}").sample(lines, len(lines)):
            ids, weights = renderer.render_training(from_json(line))
            weights[0] = 0  # nothing predicts the first token
            yield Example(tokens_T=ids, weights_T=weights)
        round_number += 1


if __name__ == "__main__":
    main(sys.argv[1:])
