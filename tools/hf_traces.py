"""Traces of random Qwen3.5 models from Hugging Face transformers: what tools/parity.py compares with.

Runs in the environment of tools/hf_reference.py:

    python tools/hf_traces.py --out DIR --seed 123             for `make parity`
    python tools/hf_traces.py --out tests/data/hf/small --seed 5 --small    the committed ones, without f32

Per kind (dense, moe) it writes the same weights in two layouts, KIND_hub/ (published: nested config, fused
experts, multi-token prediction with its experts one by one) and KIND_hf/ (`save_pretrained` of the text-only
class), and KIND_{f64,f32,bf16}.npz:

    ids0, ids1, ids2      three sequences of LENGTHS tokens
    single{0,1,2}         logits of each alone, [T, V]
    hidden                residual stream after each layer for the first, [L, T, D]
    left, right           logits of the padded batches, real tokens only, [sum of lengths, V]
    forced, decode        eight forced tokens per row behind the left-padded batch, their logits [3, 8, V]
    pieces, chunked       lengths of the pieces in which the first was prefilled, and its logits
    prompts, short        rows of six tokens, fed as a prompt of two and one by one; logits [rows * 6, V]
    positions, mrope      three equal rows of text positions with gaps, and the first's logits at them
    mtp                   logits of the multi-token-prediction block for the first, [T - 1, V]
    ce, aux, grad.NAME    losses of the right-padded batch, gradients of ce + 0.01 aux (not in bf16)
"""

import argparse
import contextlib
import json
from pathlib import Path

import numpy as np
import torch
from hf_reference import (
    AUX_WEIGHT,
    ROPE,
    float32_means_float64,
    hub_name,
    load,
    random_state,
    random_weight,
    save_weights,
)
from transformers import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

LENGTHS = (150, 97, 5)
PIECES = (70, 40, 2, 1, 37)
# In bfloat16 one expert chosen otherwise shows in the mean over a few tokens: 30 rows make it one of many.
PROMPTS = (30, 6)
SMALL_LENGTHS = (40, 17, 5)
SMALL_PIECES = (18, 10, 2, 1, 9)
COMMON = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": dict(ROPE, partial_rotary_factor=0.5, mrope_section=[3, 3, 2]),
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
KINDS = {
    "dense": dict(COMMON, intermediate_size=112, tie_word_embeddings=True),
    "moe": dict(
        COMMON,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=56,
        tie_word_embeddings=False,
    ),
}

SMALL = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "layer_types": COMMON["layer_types"][:4],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": dict(ROPE, partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
}
SMALL_MLP = {
    "dense": {"intermediate_size": 32},
    "moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
    },
}


def batch(sequences: list[torch.Tensor], *, left: bool) -> dict[str, torch.Tensor]:
    """Keyword arguments of the model; positions count from the first real token."""
    width = max(map(len, sequences))
    ids, mask = (torch.zeros((len(sequences), width), dtype=torch.long) for _ in range(2))
    for row, tokens in enumerate(sequences):
        at = slice(width - len(tokens), width) if left else slice(0, len(tokens))
        ids[row, at], mask[row, at] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def array(x: torch.Tensor) -> np.ndarray:
    return (x.float() if x.dtype == torch.bfloat16 else x).detach().numpy()


def layer_outputs(model, ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    layers: list[np.ndarray] = []

    def keep(_, __, out):
        layers.append(array((out[0] if isinstance(out, tuple) else out)[0]))

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    logits = array(model(input_ids=ids[None]).logits[0])
    for hook in hooks:
        hook.remove()
    return logits, np.stack(layers)


def decode(model, prefill: dict[str, torch.Tensor], forced: torch.Tensor) -> np.ndarray:
    cache, mask, steps = DynamicCache(config=model.config), prefill["attention_mask"], []
    model(**prefill, cache=cache, use_cache=True)
    for column in forced.T:
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.long)], 1)
        at = {"attention_mask": mask, "position_ids": positions(mask)[:, -1:]}
        steps.append(array(model(input_ids=column[:, None], **at, cache=cache, use_cache=True).logits[:, 0]))
    return np.stack(steps, 1)


def in_pieces(model, ids_BT: torch.Tensor, sizes: tuple[int, ...]) -> np.ndarray:
    cache = DynamicCache(config=model.config)
    parts = torch.split(ids_BT, sizes, dim=1)
    logits = [array(model(input_ids=part, cache=cache, use_cache=True).logits) for part in parts]
    return np.concatenate(logits, 1).reshape(ids_BT.numel(), -1)


@torch.no_grad()
def forwards(model, sequences: list[torch.Tensor], forced: torch.Tensor, seed: int) -> dict[str, np.ndarray]:
    """Everything without gradients."""
    record = {f"single{i}": array(model(input_ids=ids[None]).logits[0]) for i, ids in enumerate(sequences)}
    _, record["hidden"] = layer_outputs(model, sequences[0])
    for side in ("left", "right"):
        inputs = batch(sequences, left=side == "left")
        record[side] = array(model(**inputs).logits[inputs["attention_mask"].bool()])
    record["forced"] = array(forced)
    record["decode"] = decode(model, batch(sequences, left=True), forced)
    pieces = PIECES if len(sequences[0]) == LENGTHS[0] else SMALL_PIECES
    record["pieces"], record["chunked"] = np.array(pieces), in_pieces(model, sequences[0][None], pieces)
    rng = np.random.default_rng(seed)
    gaps = rng.integers(1, 4, len(sequences[0]))
    record["prompts"] = rng.integers(2, model.config.vocab_size, PROMPTS)
    record["short"] = in_pieces(model, torch.from_numpy(record["prompts"]), (2, 1, 1, 1, 1))
    record["positions"] = np.cumsum(gaps)
    axes = torch.from_numpy(record["positions"]).expand(3, 1, -1)
    record["mrope"] = array(model(input_ids=sequences[0][None], position_ids=axes).logits[0])
    return record


def gradients(model, sequences: list[torch.Tensor], moe: bool) -> dict[str, np.ndarray]:
    """Losses and gradients of the right-padded batch, by hub names."""
    inputs = batch(sequences, left=False)
    out = model(**inputs, **({"output_router_logits": True} if moe else {}))
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)[:, 1:].reshape(-1)
    ce = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels, ignore_index=-100)
    (ce + AUX_WEIGHT * out.aux_loss if moe else ce).backward()
    record = {"ce": array(ce)} | ({"aux": array(out.aux_loss)} if moe else {})
    return record | {f"grad.{hub_name(name)}": array(p.grad) for name, p in model.named_parameters()}


def mtp_state(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Random weights of the block in the published layout: experts one by one, in three matrices."""
    rng, width = np.random.default_rng(seed), state["model.norm.weight"].shape[0]
    shapes = {"mtp.fc.weight": (width, 2 * width)}
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"mtp.{norm}.weight"] = (width,)
    for name, value in state.items():
        if not name.startswith("model.layers.3."):
            continue
        name, shape = name.replace("model.layers.3.", "mtp.layers.0."), tuple(value.shape)
        if ".experts." not in name:
            shapes[name] = shape
            continue
        head, kind = name.rsplit(".", 1)
        for expert in range(shape[0]):
            if kind == "down_proj":
                shapes[f"{head}.{expert}.down_proj.weight"] = shape[1:]
            else:
                for half in ("gate_proj", "up_proj"):
                    shapes[f"{head}.{expert}.{half}.weight"] = (shape[1] // 2, shape[2])
    return {name: random_weight(name, torch.Size(shape), rng) for name, shape in sorted(shapes.items())}


def mtp_layer(model, mtp: dict[str, torch.Tensor], dtype: torch.dtype):
    """The block's decoder layer, and a function that applies one of its norms."""
    moe = "num_experts" in model.config.to_dict()
    module, prefix = (modeling_qwen3_5_moe, "Qwen3_5Moe") if moe else (modeling_qwen3_5, "Qwen3_5")
    sizes = model.config.to_dict() | {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    config = type(model.config)(**sizes)
    config._attn_implementation = config._experts_implementation = "eager"
    layer = getattr(module, f"{prefix}DecoderLayer")(config, 0).eval().to(dtype)
    head = "mtp.layers.0."
    state = {name[len(head) :]: value for name, value in mtp.items() if name.startswith(head)}
    if moe:
        experts = [
            [state.pop(f"mlp.experts.{e}.{kind}_proj.weight") for kind in ("gate", "up", "down")]
            for e in range(config.num_experts)
        ]
        state["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
        state["mlp.experts.down_proj"] = torch.stack([down for *_, down in experts])
    layer.load_state_dict(state)

    def norm(x, name):
        made = getattr(module, f"{prefix}RMSNorm")(x.shape[-1], config.rms_norm_eps).to(dtype)
        made.weight.data.copy_(mtp[f"mtp.{name}.weight"])
        return made(x)

    return layer, norm


@torch.no_grad()
def mtp_logits(model, mtp: dict[str, torch.Tensor], ids: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """At t: from the final-norm hidden state of token t and the embedding of token t + 1."""
    layer, norm = mtp_layer(model, mtp, dtype)
    hidden = norm(model.model(input_ids=ids[None]).last_hidden_state[:, :-1], "pre_fc_norm_hidden")
    embedded = norm(model.model.embed_tokens(ids[None, 1:]), "pre_fc_norm_embedding")
    x = torch.cat([embedded, hidden], -1) @ mtp["mtp.fc.weight"].to(dtype).T
    at = torch.arange(x.shape[1])[None]
    mask = torch.full((x.shape[1],) * 2, float("-inf"), dtype=dtype).triu(1)[None, None]
    angles = model.model.rotary_emb(x, at[None])
    x = layer(x, position_embeddings=angles, attention_mask=mask, position_ids=at)
    return array(model.lm_head(norm(x, "norm"))[0])


def trace(
    sizes: dict, state, mtp, dtype: torch.dtype, seed: int, lengths: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """One kind in one dtype; a float64 trace has to be made within `float32_means_float64`."""
    rng, moe = np.random.default_rng(seed + 1), "num_experts" in sizes
    sequences = [torch.from_numpy(rng.integers(2, sizes["vocab_size"], n)) for n in lengths]
    forced = torch.from_numpy(rng.integers(2, sizes["vocab_size"], (len(lengths), 8)))
    model = load(sizes, state)
    for parameter in model.parameters():  # not the buffers: rounded rotary frequencies are no model's
        parameter.data = parameter.data.to(dtype)
    record = {f"ids{i}": ids.numpy() for i, ids in enumerate(sequences)}
    record |= forwards(model, sequences, forced, seed)
    record["mtp"] = mtp_logits(model, mtp, sequences[0], dtype)
    return record if dtype == torch.bfloat16 else record | gradients(model, sequences, moe)


def save_layouts(kind: str, sizes: dict, state, mtp, out: Path) -> None:
    family = "qwen3_5_moe" if kind == "moe" else "qwen3_5"
    load(sizes, state).to(torch.bfloat16).save_pretrained(out / f"{kind}_hf")
    hub = out / f"{kind}_hub"
    hub.mkdir(exist_ok=True)
    save_weights(
        state | mtp | {"model.visual.pos_embed.weight": torch.zeros(4, 8)}, hub / "model.safetensors"
    )
    text = dict(sizes, model_type=f"{family}_text", dtype="bfloat16", mtp_num_hidden_layers=1)
    config = {"model_type": family, "text_config": text, "vision_config": {"depth": 1}}
    (hub / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, required=True, help="seed of weights and tokens")
    parser.add_argument("--small", action="store_true", help="sizes for committed files, without float32")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    lengths = SMALL_LENGTHS if args.small else LENGTHS
    for kind, sizes in KINDS.items():
        if args.small:
            sizes = sizes | SMALL | SMALL_MLP[kind]
        state = random_state(sizes, args.seed)
        mtp = mtp_state(state, args.seed + 2)
        save_layouts(kind, sizes, state, mtp, args.out)
        dtypes = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}
        for name, dtype in dtypes.items():
            if args.small and name == "f32":
                continue
            double = float32_means_float64() if name == "f64" else contextlib.nullcontext()
            with double:
                record = trace(sizes, state, mtp, dtype, args.seed, lengths)
            np.savez(args.out / f"{kind}_{name}.npz", **record)


if __name__ == "__main__":
    main()
