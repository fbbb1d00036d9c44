"""The Hugging Face side of tools/bench_model.py and bench_engine.py: answers JSON requests, one a line.

Runs in the environment of tools/hf_reference.py. Requests:

    {"op": "rule", "inputs": "x.npz"}                 forward and backward of the chunked rule
    {"op": "step", "model": DIR, "inputs": "t.npz"}   a training step
    {"op": "run"}                                     one sample of the last of these
    {"op": "generate", "model": DIR, "new_tokens": N} sampling that many tokens for every prompt
    {"op": "generate_run", "prompts": "p.json"}       one sample of it for a list of prompts

Settings that are fastest here, found by trying: attention `sdpa`, experts `eager` (a loop over the experts
that have tokens; `grouped_mm` is as fast, `batched_mm` five times slower), AdamW `fused`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0


def rule(inputs: str) -> Callable[[], float]:
    """Forward and backward of sum(weights * output); the value is that sum."""
    arrays = {name: torch.from_numpy(value) for name, value in np.load(inputs).items()}
    weights = arrays.pop("weights")
    for value in arrays.values():
        value.requires_grad_()

    def run() -> float:
        for value in arrays.values():
            value.grad = None
        out, _ = torch_chunk_gated_delta_rule(
            arrays["q"], arrays["k"], arrays["v"], arrays["g"], arrays["beta"], output_final_state=True
        )
        loss = (out * weights).sum()
        loss.backward()
        return loss.item()

    return run


def step(model: str, inputs: str) -> Callable[[], float]:
    """Loss, gradients, clipping and AdamW of all next-token predictions; the value is the loss."""
    options = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    policy = transformers.Qwen3_5MoeForCausalLM.from_pretrained(model, dtype=torch.float32, **options).train()
    tokens = torch.from_numpy(np.load(inputs)["tokens"]).long()
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )

    def run() -> float:
        loss = policy(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run


def generate(model: str, new_tokens: int) -> Callable[[str], float]:
    """Samples for all prompts of a file at once, padded on the left; the value is the number of tokens."""
    config = transformers.AutoConfig.from_pretrained(model)
    mixture = hasattr(config, "num_experts")
    kind = transformers.Qwen3_5MoeForCausalLM if mixture else transformers.Qwen3_5ForCausalLM
    options = {"attn_implementation": "sdpa"} | ({"experts_implementation": "eager"} if mixture else {})
    policy = kind.from_pretrained(model, dtype=torch.float32, **options).eval()
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    settings |= {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "eos_token_id": None}

    def run(prompts: str) -> float:
        rows = json.loads(Path(prompts).read_text())
        longest = max(map(len, rows))
        tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        with torch.inference_mode():
            out = policy.generate(tokens, attention_mask=mask, **settings)
        return float(out.shape[0] * (out.shape[1] - longest))

    return run


def sample(run: Callable[[], float]) -> dict[str, float]:
    """Seconds of wall and of processor time of one call, and its value."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = run()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "value": value}


def main() -> None:
    """Serves requests until standard input closes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, required=True)
    torch.set_num_threads(parser.parse_args().threads)
    transformers.utils.logging.disable_progress_bar()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions), flush=True)
    run: Callable[[], float] | None = None
    generator: Callable[[str], float] | None = None
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        match request.pop("op"):
            case "rule":
                run, answer = rule(**request), {}
            case "step":
                run, answer = step(**request), {}
            case "generate":
                generator, answer = generate(**request), {}
            case "generate_run":
                assert generator is not None, "expected a case before the first run"
                answer = sample(partial(generator, **request))
            case _:
                assert run is not None, "expected a case before the first run"
                answer = sample(run)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
