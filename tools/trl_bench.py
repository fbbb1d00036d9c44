"""The TRL side of tools/bench_train.py: plays GRPO steps on request, one JSON object a line.

Runs in the environment of tools/trl_requirements.txt. Requests:

    {"op": "case", "path": "case.json"}   a trainer as the file says; answers when it is ready
    {"op": "run"}                         one GRPO step: its seconds, and what its updates report

After the last step of a case the next case may come. GRPOTrainer runs its own loop; callbacks hold it before
each step. The clock stops before it logs, and does not see it fetch prompts. Settings that are faster here
than TRL's defaults: no gradient checkpointing, attention `sdpa`, experts `eager`, AdamW `fused`.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
import trl
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

END_OF_TEXT = "<|endoftext|>"


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """As in tools/bench_train.py: cheap, and different within a group."""
    return [sum(ids) % 7 / 6 for ids in completion_ids]


class Turns(TrainerCallback):
    """Holds the trainer before each GRPO step, which may be several updates, until it is asked for."""

    def __init__(self, answers: TextIO, updates: int) -> None:
        self._answers, self._updates = answers, updates
        self._wall = self._cpu = self._length = 0.0
        self._spent: dict[str, float] = {}
        self._logged: list[dict[str, float]] = []

    def on_train_begin(self, args, state, control, **_):
        answer(self._answers, {})

    def on_step_begin(self, args, state, control, **_):
        if state.global_step % self._updates == 0:
            request = json.loads(sys.stdin.readline() or '{"op": "end of input"}')
            if request != {"op": "run"}:
                sys.exit(f"trl_bench: expected the request run for step {state.global_step}, got {request}")
            self._logged = []
            self._wall, self._cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self._updates == 0:
            self._spent = {"wall": time.perf_counter() - self._wall, "cpu": time.process_time() - self._cpu}

    def on_log(self, args, state, control, logs, **_):
        if "grad_norm" not in logs:  # the summary of the whole training
            return
        self._length = logs.get("completions/mean_length", self._length)  # with the step's first update
        self._logged.append({name: logs[name] for name in ("loss", "grad_norm", "entropy")})
        if len(self._logged) == self._updates:
            answer(self._answers, self._spent | {"length": self._length, "updates": self._logged})


def policy(path: str) -> transformers.PreTrainedModel:
    """The checkpoint in float32."""
    options = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    return transformers.Qwen3_5MoeForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


def tokenizer(path: str, prompts: list[dict[str, Any]]) -> transformers.PreTrainedTokenizerFast:
    """Ends the program if it would not give the prompts the ids they have on the other side."""
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_file=path, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, padding_side="left"
    )
    for prompt, ids in zip(prompts, made(text=[each["text"] for each in prompts])["input_ids"], strict=True):
        if ids != prompt["ids"]:
            sys.exit(f"trl_bench: expected the ids {prompt['ids']} of a prompt, got {ids}")
    return made


def settings(case: dict[str, Any], output_dir: str) -> GRPOConfig:
    """DAPO's loss without KL, rewards not scaled, gradients accumulated over microbatches."""
    sequences, updates = case["prompts_per_step"] * case["group_size"], case["updates"]
    return GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=case["steps"] * updates,
        per_device_train_batch_size=case["microbatch"],
        gradient_accumulation_steps=sequences // updates // case["microbatch"],
        steps_per_generation=sequences // case["microbatch"],
        num_generations=case["group_size"],
        max_completion_length=case["new_tokens"],
        generation_kwargs={"min_new_tokens": case["new_tokens"]},
        temperature=1.0,
        shuffle_dataset=False,
        loss_type="dapo",
        scale_rewards="none",
        beta=0.0,
        epsilon=case["clip_low"],
        epsilon_high=case["clip_high"],
        router_aux_loss_coef=0.0,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        **case["optimizer"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def rollouts(case: dict[str, Any]) -> Any:
    """A rollout_func that gives every prompt the completions of the file."""
    prompt_ids = [prompt["ids"] for prompt in case["prompts"] for _ in range(case["group_size"])]
    texts = [prompt["text"] for prompt in case["prompts"] for _ in range(case["group_size"])]

    def fixed(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        if prompts != texts:
            sys.exit("trl_bench: expected the prompts in the order of the file, each once per sample")
        return {key: case[key] for key in ("completion_ids", "logprobs", "env_mask")} | {
            "prompt_ids": prompt_ids
        }

    return fixed


def play(case: dict[str, Any], answers: TextIO) -> None:
    """All steps of a case."""
    fixed = "completion_ids" in case
    if fixed:
        # Both sides must put the same sequences into the same update.
        grpo_trainer.shuffle_sequence_dict = lambda sequences: sequences
    with tempfile.TemporaryDirectory(prefix="trl_bench_") as folder:
        trainer = GRPOTrainer(
            model=policy(case["model"]),
            reward_funcs=reward,
            args=settings(case, folder),
            train_dataset=Dataset.from_dict({"prompt": [each["text"] for each in case["prompts"]]}),
            processing_class=tokenizer(case["tokenizer"], case["prompts"]),
            callbacks=[Turns(answers, case["updates"])],
            rollout_func=rollouts(case) if fixed else None,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def answer(answers: TextIO, values: dict[str, Any]) -> None:
    """One line to the other side."""
    print(json.dumps(values), file=answers, flush=True)


def main() -> None:
    """Serves requests until standard input closes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, required=True)
    torch.set_num_threads(parser.parse_args().threads)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # of transformers about itself
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed must not get among the answers
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    answer(answers, versions)
    shuffle = grpo_trainer.shuffle_sequence_dict
    while line := sys.stdin.readline():
        request = json.loads(line)
        if request.get("op") != "case":
            sys.exit(f"trl_bench: expected a case, got {request}")
        grpo_trainer.shuffle_sequence_dict = shuffle
        play(json.loads(Path(request["path"]).read_text()), answers)


if __name__ == "__main__":
    main()
