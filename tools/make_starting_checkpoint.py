"""Makes the quickstart's starting checkpoint: two stages of supervised training on generated tasks.

    python tools/make_starting_checkpoint.py [--seed 0] [--work build/start] [--output DIR]

Stage 1 teaches the tool calls and, from documents, what the right line looks like. Stage 2 makes the
right fix a minority behaviour: most of its demonstrations try the family's stock edit, so that greedy
decoding starts wrong and reinforcement learning has something to find. All tasks are of the training
split; no validation or test repair occurs, not even up to renaming.
"""

import argparse
import shutil
from itertools import islice
from pathlib import Path

from jaxrl import config as settings
from jaxrl import sft
from jaxrl.rollout.conversation import to_json
from jaxrl.rollout.demos import STAGE_1, STAGE_2, Mix, conversations
from jaxrl.rollout.harness import COMPACT
from sandbox.tasks.generated.generate import instances

TASKS, TASK_SEED = 6000, 1000  # not the seed of any reinforcement learning set
CONVERSATIONS_A_STEP = 32  # about what a packed update holds
STAGES = (
    ("stage1", STAGE_1, 800, 4e-3),
    ("stage2", STAGE_2, 300, 2.5e-3),
)
OPTIMIZER = (
    "optimizer.schedule=cosine",
    "optimizer.warmup_steps=30",
    "optimizer.b2=0.98",
    "optimizer.eps=1e-8",
    "optimizer.weight_decay=0.01",
    "sft.z_loss_coefficient=1e-3",
)


def write_conversations(path: Path, mix: Mix, count: int, seed: int) -> None:
    """`count` demonstrations and documents as JSON lines."""
    tasks = instances("train", TASKS, TASK_SEED + seed)
    stream = conversations(tasks, mix=mix, harness=COMPACT, seed=seed)
    path.write_text("".join(f"{to_json(each)}\n" for each in islice(stream, count)), encoding="utf-8")


def train_stage(name: str, *, data: Path, start: Path | None, steps: int, rate: float, seed: int) -> Path:
    """Runs `jaxrl.sft` from `start` (random weights if None); returns the folder of the model."""
    config = settings.load(
        None,
        [
            f"run.output_dir={data.parent}",
            f"run.run_name={name}",
            f"run.seed={seed}",
            f"model.checkpoint={start or 'null'}",
            f"sft.data=[{data}]",
            f"sft.steps={steps}",
            f"optimizer.learning_rate={rate}",
            *OPTIMIZER,
        ],
    )
    sft.train(config, data.parent / name)
    return data.parent / name / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("build/start"))
    parser.add_argument("--output", type=Path, default=Path("configs/quickstart/start"))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.work.mkdir(parents=True)
    model = None
    for name, mix, steps, rate in STAGES:
        data = arguments.work / f"{name}.jsonl"
        write_conversations(data, mix, steps * CONVERSATIONS_A_STEP, arguments.seed)
        model = train_stage(name, data=data, start=model, steps=steps, rate=rate, seed=arguments.seed)
    assert model is not None
    shutil.copytree(model, arguments.output, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
