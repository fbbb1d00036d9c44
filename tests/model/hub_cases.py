"""Small hub repositories, spelled out by hand and written by the safetensors library."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

PREFIX = "model.language_model."
V, D, E, F, S = 24, 16, 4, 8, 12  # 2F == D: shapes cannot tell gate_up from down
Tensors = dict[str, np.ndarray]

SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5},
    "dtype": "bfloat16",
}
MOE_SIZES = {
    "num_experts": E,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": F,
    "shared_expert_intermediate_size": S,
}
GDN = {
    "in_proj_qkv.weight": (20, D),
    "in_proj_z.weight": (12, D),
    "in_proj_b.weight": (2, D),
    "in_proj_a.weight": (2, D),
    "conv1d.weight": (20, 1, 4),
    "A_log": (2,),
    "dt_bias": (2,),
    "norm.weight": (6,),
    "out_proj.weight": (D, 12),
}
ATTENTION = {
    "q_proj.weight": (32, D),
    "k_proj.weight": (16, D),
    "v_proj.weight": (16, D),
    "o_proj.weight": (D, 16),
    "q_norm.weight": (8,),
    "k_norm.weight": (8,),
}
DENSE = {"gate_proj.weight": (S, D), "up_proj.weight": (S, D), "down_proj.weight": (D, S)}
MOE = {
    "gate.weight": (E, D),
    "experts.gate_up_proj": (E, 2 * F, D),
    "experts.down_proj": (E, D, F),
    "shared_expert_gate.weight": (1, D),
    **{f"shared_expert.{name}": shape for name, shape in DENSE.items()},
}
EXACT = ("A_log", "linear_attn.norm.weight")


def config(*, moe: bool, tied: bool, nested: bool = True) -> dict:
    """As published (sizes under `text_config`), or that of the text-only class."""
    sizes = SIZES | (MOE_SIZES if moe else {"intermediate_size": S}) | {"tie_word_embeddings": tied}
    if not nested:
        return {"model_type": "qwen3_5_text", **sizes}
    return {"model_type": "qwen3_5", "text_config": sizes, "vision_config": {"depth": 1}}


def shapes(*, moe: bool, tied: bool) -> dict[str, tuple[int, ...]]:
    """The text model's tensors in the published layout."""
    mlp = {f"mlp.{name}": shape for name, shape in (MOE if moe else DENSE).items()}
    norms = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    gdn = {f"linear_attn.{name}": shape for name, shape in GDN.items()}
    attention = {f"self_attn.{name}": shape for name, shape in ATTENTION.items()}
    found = {f"{PREFIX}embed_tokens.weight": (V, D), f"{PREFIX}norm.weight": (D,)}
    for layer, mixer in enumerate((gdn, attention)):
        found |= {f"{PREFIX}layers.{layer}.{name}": s for name, s in (mixer | mlp | norms).items()}
    return found if tied else found | {"lm_head.weight": (V, D)}


def bits(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Any bit pattern at all, NaNs included."""
    kind = np.dtype({"BF16": ml_dtypes.bfloat16, "F32": np.float32}[dtype])
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape)


def text_tensors(*, moe: bool, tied: bool, seed: int, exact: str = "F32") -> Tensors:
    """Random bits in the published layout; `exact` is the dtype of A_log and the GDN norm."""
    rng, found = np.random.default_rng(seed), {}
    for name, shape in shapes(moe=moe, tied=tied).items():
        found[name] = bits(shape, exact if name.endswith(EXACT) else "BF16", rng)
        if name.endswith(EXACT) and exact == "BF16":  # held in float32: the bits of a NaN may change
            found[name] = rng.normal(size=shape).astype(ml_dtypes.bfloat16)
    return found


def carried_tensors(*, fused: bool, seed: int) -> Tensors:
    """Vision and multi-token-prediction tensors; the latter's experts fused or one by one."""
    rng = np.random.default_rng(seed + 1)
    mtp = {"mtp.layers.0.mlp.experts.gate_up_proj": bits((E, 2 * F, D), "BF16", rng)}
    mtp |= {"mtp.fc.weight": bits((D, 2 * D), "BF16", rng), "mtp.norm.weight": bits((D,), "BF16", rng)}
    scale = np.arange(3, dtype=np.int64)
    vision = {"model.visual.pos_embed.weight": bits((3, 5), "F32", rng), "model.visual.steps": scale}
    return (mtp if fused else one_by_one(mtp)) | vision


def one_by_one(tensors: Tensors) -> Tensors:
    """The same with one tensor per expert and matrix."""
    found: Tensors = {}
    for name, value in tensors.items():
        head, _, kind = name.partition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if parts is None:
            found[name] = value
            continue
        for e, expert in enumerate(value):
            for part, matrix in zip(parts, np.split(expert, len(parts)), strict=True):
                found[f"{head}.experts.{e}.{part}.weight"] = np.ascontiguousarray(matrix)
    return found


def text_only(tensors: Tensors) -> Tensors:
    """The same under the names of the text-only class."""
    return {name.replace(PREFIX, "model."): value for name, value in tensors.items()}


def write(directory: Path, tensors: Tensors, settings: dict, *, files: int = 1) -> Path:
    """A repository of one file, or of several with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings, indent=3))
    if files == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory
    places = {name: f"shard-{i % files}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({n: tensors[n] for n, f in places.items() if f == file}, directory / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def read(directory: Path) -> Tensors:
    """Every tensor of a repository, as the safetensors library reads it."""
    found: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_bytes(got: Tensors, expected: Tensors) -> None:
    """Names, dtypes, shapes and bytes of every tensor."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        assert got[name].tobytes() == value.tobytes(), name
