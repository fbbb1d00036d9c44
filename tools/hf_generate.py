"""Greedy `generate` of Hugging Face transformers: what tools/parity_generate.py compares the engine with.

Runs in the environment of tools/hf_reference.py, on checkpoints as tools/hf_traces.py writes them:

    python tools/hf_generate.py --directory DIR --seed 123 --new-weights    for `make parity-generate`
    python tools/hf_generate.py --directory tests/data/hf/small --seed 6    the committed ones

Per kind (dense, moe) it reads KIND_hf/ and writes KIND_generate.npz beside it, in float64:

    prompts     all prompts one behind the other; lengths: how long each is [P]
    tokens      the new tokens of each prompt [P, T]
    logprobs    log-probability of each of them [P, T]
    gaps        by how much its logit exceeded the second-best one [P, T]
    embedding_scale  what the embedding was multiplied with: in a random model whose head is tied to it, every
                     token would predict itself; scaled down, the layers decide
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers
from hf_reference import float32_means_float64, random_state
from hf_traces import KINDS, mtp_state, save_layouts

LENGTHS = (1, 2, 3, 7, 16, 17, 33, 64, 65, 100, 150, 299, 300)
NEW_TOKENS = 40
TIED_EMBEDDING = 2**-5  # a power of two, exact in every dtype


def load(path: Path):
    """The checkpoint in float64; has to be called, and the model run, within `float32_means_float64`."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **plain).eval()


@torch.no_grad()
def greedy(model, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """New tokens, their log-probabilities, and by how much each led; nothing ends a text early."""
    settings = {"do_sample": False, "eos_token_id": None, "output_logits": True}
    out = model.generate(
        input_ids=torch.from_numpy(prompt)[None],
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        **settings,
    )
    tokens, logits = out.sequences[0, len(prompt) :], torch.stack(out.logits)[:, 0]
    assert logits.dtype == torch.float64 and len(tokens) == len(logits) == NEW_TOKENS
    best = logits.topk(2).values
    logprobs = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
    return tokens.numpy(), logprobs.numpy(), (best[:, 0] - best[:, 1]).numpy()


def trace(path: Path, seed: int) -> dict[str, np.ndarray]:
    """The record of one checkpoint."""
    with float32_means_float64():
        model, rng = load(path), np.random.default_rng(seed)
        scale = TIED_EMBEDDING if model.config.tie_word_embeddings else 1.0
        model.get_input_embeddings().weight.data *= scale
        prompts = [rng.integers(2, model.config.vocab_size, length) for length in LENGTHS]
        tokens, logprobs, gaps = map(np.stack, zip(*(greedy(model, each) for each in prompts), strict=True))
    small = {"prompts": np.concatenate(prompts), "lengths": np.array(LENGTHS), "tokens": tokens}
    record = {name: array.astype(np.int32) for name, array in small.items()}
    return record | {"logprobs": logprobs, "gaps": gaps, "embedding_scale": np.array(scale)}


def new_weights(kind: str, directory: Path, seed: int) -> None:
    """Random weights in KIND_hf/ and KIND_hub/."""
    state = random_state(KINDS[kind], seed)
    save_layouts(kind, KINDS[kind], state, mtp_state(state, seed + 2), directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="with KIND_hf/; the traces go there")
    parser.add_argument("--seed", type=int, required=True, help="seed of the prompts, and of new weights")
    parser.add_argument("--new-weights", action="store_true", help="write random checkpoints first")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for kind in KINDS:
        if args.new_weights:
            new_weights(kind, args.directory, args.seed)
        record = trace(args.directory / f"{kind}_hf", args.seed + 3)
        np.savez_compressed(args.directory / f"{kind}_generate.npz", **record)


if __name__ == "__main__":
    main()
