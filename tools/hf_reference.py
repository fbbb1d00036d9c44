"""Golden traces of tiny Qwen3.5 models from Hugging Face transformers, for the parity tests.

Runs in an environment of its own (Python 3.11+, CPU torch, transformers >= 5.24, safetensors, numpy):

    python tools/hf_reference.py --out tests/data/hf

Per model kind (moe, dense) it writes KIND/model.safetensors, random weights that bfloat16 represents exactly
in the layout of the published repositories; KIND/config.json; and KIND/trace.npz:

    ids_BT, mask_BT   two right-padded rows
    logits.{f64,f32}  of the first row alone, [T, V]
    hidden.f64        residual stream after each layer of the first row, [L, T, D]
    short.f64         logits of the second row alone
    ce, aux           training losses of the padded batch in float64 (aux only for moe)
    probe.NAME        sum over grad * cos(flat index), of the gradient of ce + 0.01 aux in float64

float64 needs more than `model.double()`: the modelling code names float32 in many places. Here torch's own
names for it mean float64 while such a model is built and run.
"""

import argparse
import contextlib
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

SEED = 7
AUX_WEIGHT = 0.01
COMMON = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": True}
KINDS = {
    "moe": dict(
        COMMON,
        vocab_size=160,
        hidden_size=40,
        head_dim=24,
        rope_parameters=dict(ROPE, partial_rotary_factor=0.5, mrope_section=[2, 2, 2]),
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=28,
        tie_word_embeddings=False,
    ),
    "dense": dict(
        COMMON,
        vocab_size=96,
        hidden_size=32,
        head_dim=16,
        rope_parameters=dict(ROPE, partial_rotary_factor=0.25, mrope_section=[1, 1, 0]),
        intermediate_size=52,
        tie_word_embeddings=True,
    ),
}


@contextlib.contextmanager
def float32_means_float64():
    names = (torch, "float32"), (torch, "float"), (torch.Tensor, "float")
    saved = [getattr(owner, name) for owner, name in names]
    torch.set_default_dtype(torch.float64)
    try:
        for (owner, name), value in zip(
            names, (torch.float64, torch.float64, torch.Tensor.double), strict=True
        ):
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in zip(names, saved, strict=True):
            setattr(owner, name, value)
        torch.set_default_dtype(torch.float32)


def build(sizes: dict):
    """A text model of the given sizes, a mixture of experts if they name experts."""
    prefix = "Qwen3_5Moe" if "num_experts" in sizes else "Qwen3_5"
    config = getattr(transformers, f"{prefix}TextConfig")(**json.loads(json.dumps(sizes)))
    config._attn_implementation = config._experts_implementation = "eager"
    return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()


def random_weight(name: str, shape: torch.Size, rng: np.random.Generator) -> torch.Tensor:
    """Values that make every parameter matter; the published initialisation leaves norms at zero."""
    normal = rng.standard_normal(shape)
    if name.endswith("A_log"):
        value = np.log(rng.uniform(0.05, 16, shape))
    elif name.endswith("dt_bias"):
        value = -2 + 1.5 * normal
    elif name.endswith("linear_attn.norm.weight"):
        value = 1 + 0.2 * normal
    elif "norm" in name:
        value = 0.2 * normal
    elif "embed_tokens" in name:
        value = normal
    elif "conv1d" in name:
        value = 0.5 * normal
    else:
        writes_residual = any(part in name for part in ("out_proj", "o_proj", "down_proj"))
        value = normal * (0.4 if writes_residual else 0.8) / shape[-1] ** 0.5
    return torch.tensor(value, dtype=torch.float32).bfloat16().float()


def random_state(sizes: dict, seed: int) -> dict[str, torch.Tensor]:
    rng, shapes = np.random.default_rng(seed), build(sizes).state_dict()
    tied = sizes["tie_word_embeddings"]
    names = [name for name in sorted(shapes) if not (tied and name == "lm_head.weight")]
    return {name: random_weight(name, shapes[name].shape, rng) for name in names}


def load(sizes: dict, state: dict[str, torch.Tensor]):
    """A model with the given weights in torch's default dtype."""
    model = build(sizes)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.to(torch.get_default_dtype())


def forward(model, ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    layers: list[np.ndarray] = []
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out: layers.append((out[0] if isinstance(out, tuple) else out)[0].detach().numpy())
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits, np.stack(layers)


def losses_and_probes(model, ids_BT: torch.Tensor, mask_BT: torch.Tensor, moe: bool) -> dict[str, np.ndarray]:
    extra = {"output_router_logits": True} if moe else {}
    out = model(input_ids=ids_BT, attention_mask=mask_BT, **extra)
    labels = ids_BT.masked_fill(mask_BT == 0, -100)[:, 1:].reshape(-1)
    logits = out.logits[:, :-1].reshape(-1, out.logits.shape[-1])
    ce = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)
    loss = ce + AUX_WEIGHT * out.aux_loss if moe else ce
    loss.backward()
    record = {"ce": ce.detach().numpy()} | ({"aux": out.aux_loss.detach().numpy()} if moe else {})
    for name, parameter in model.named_parameters():
        weights = np.cos(np.arange(parameter.numel())).reshape(parameter.shape)
        record[f"probe.{hub_name(name)}"] = np.array((parameter.grad.numpy() * weights).sum())
    return record


def hub_name(name: str) -> str:
    return name if ".visual." in name else name.replace("model.", "model.language_model.", 1)


def save_weights(state: dict[str, torch.Tensor], path: Path) -> None:
    exact = ("A_log", "linear_attn.norm.weight")
    tensors = {
        hub_name(name): value if name.endswith(exact) else value.bfloat16() for name, value in state.items()
    }
    save_file({name: value.contiguous() for name, value in tensors.items()}, str(path), {"format": "pt"})


def trace(kind: str, out: Path) -> None:
    sizes = KINDS[kind]
    state, vocab = random_state(sizes, SEED), sizes["vocab_size"]
    rng = np.random.default_rng(SEED + 1)
    ids_BT, mask_BT = torch.zeros((2, 75), dtype=torch.long), torch.zeros((2, 75), dtype=torch.long)
    for row, length in enumerate((75, 9)):
        ids_BT[row, :length] = torch.from_numpy(rng.integers(2, vocab, length))
        mask_BT[row, :length] = 1
    record = {"ids_BT": ids_BT.numpy(), "mask_BT": mask_BT.numpy()}
    record["logits.f32"], _ = forward(load(sizes, state), ids_BT[0])
    with float32_means_float64():
        model = load(sizes, state)
        record["logits.f64"], record["hidden.f64"] = forward(model, ids_BT[0])
        record["short.f64"], _ = forward(model, ids_BT[1, :9])
        record |= losses_and_probes(model, ids_BT, mask_BT, kind == "moe")
    assert record["hidden.f64"].dtype == record["logits.f64"].dtype == np.float64
    gap = np.abs(record["logits.f32"] - record["logits.f64"]).max()
    print(
        f"{kind}: float32 differs from float64 by {gap:.1e}; logits have std {record['logits.f64'].std():.2f}"
    )
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "trace.npz", **record)
    save_weights(state, out / "model.safetensors")
    config = {
        "text_config": sizes,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    for kind in KINDS:
        trace(kind, out / kind)


if __name__ == "__main__":
    main()
