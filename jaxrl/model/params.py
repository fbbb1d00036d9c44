"""Every parameter of the family, declared once: shape, dtype, logical axes, initialisation, hub name.

Matrices are stored [in, out], the transpose of the hub's [out, in]. Logical axes are turned into mesh
axes by `jaxrl.mesh`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl.model.spec import LayerType, ModelSpec

Init = Literal["fan_in", "embedding", "zeros", "ones", "log_decay"]
EMBEDDING_STD = 0.02
DECAY_RANGE = (0.01, 16.0)


@dataclass(frozen=True)
class Weight:
    """One parameter. `hub` is its name on the hub without the prefix of its layer or of the text model
    (the head and the multi-token-prediction block have none).

    `swap` names the two axes that the hub stores in the other order, `unit` an axis of size 1 that only
    the hub's form has.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    hub: str
    dtype: Any
    swap: tuple[int, int] | None = None
    unit: int | None = None

    def to_hub(self, value: np.ndarray) -> np.ndarray:
        """The array as the hub stores it."""
        value = value if self.swap is None else np.swapaxes(value, *self.swap)
        return value if self.unit is None else np.expand_dims(value, self.unit)

    def from_hub(self, value: np.ndarray) -> np.ndarray:
        """The inverse of `to_hub`.

        Raises:
          ValueError: the shape is not the declared one; nothing is transposed by guess.
        """
        expected = self.to_hub(np.broadcast_to(np.zeros((), bool), self.shape)).shape
        if value.shape != expected:
            raise ValueError(
                f"{self.hub}: expected shape {expected}; got {value.shape}: is this the spec's model?"
            )
        value = value if self.unit is None else np.squeeze(value, self.unit)
        return value if self.swap is None else np.swapaxes(value, *self.swap)

    def create(self, rngs: nnx.Rngs) -> nnx.Param:
        """A freshly initialised parameter; `axes` travels with it as metadata."""
        return nnx.Param(_INITS[self.init](rngs.params(), self.shape, self.dtype), axes=self.axes)


def create(module: nnx.Module, weights: Mapping[str, Weight], rngs: nnx.Rngs) -> None:
    """Gives `module` one attribute per declared weight."""
    for name, weight in weights.items():
        setattr(module, name, weight.create(rngs))


def accumulation_dtype(dtype: Any) -> Any:
    """At least float32: the dtype of norms, softmaxes, recurrent state and log-probs."""
    return jnp.promote_types(dtype, jnp.float32)


def _fan_in(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-2] ** -0.5, dtype)


def _log_decay(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    low, high = DECAY_RANGE
    return jnp.log(jax.random.uniform(key, shape, dtype, low, high))


_INITS = {
    "fan_in": _fan_in,
    "embedding": lambda key, shape, dtype: jax.random.normal(key, shape, dtype) * EMBEDDING_STD,
    "zeros": lambda key, shape, dtype: jnp.zeros(shape, dtype),
    "ones": lambda key, shape, dtype: jnp.ones(shape, dtype),
    "log_decay": _log_decay,
}


def _matrix(rows: int, cols: int, axes: tuple[str | None, str | None], hub: str, dtype: Any) -> Weight:
    return Weight((rows, cols), axes, "fan_in", f"{hub}.weight", dtype, swap=(0, 1))


def _norm(size: int, hub: str, dtype: Any) -> Weight:
    """Zero-centred: the norm multiplies by 1 + w."""
    return Weight((size,), (None,), "zeros", f"{hub}.weight", dtype)


def gdn_weights(spec: ModelSpec) -> dict[str, Weight]:
    """A Gated DeltaNet mixer. The hub keeps A_log and the output norm in float32, and so do we."""
    D, N, dtype, exact = spec.hidden_size, spec.gdn_value_heads, spec.dtype, accumulation_dtype(spec.dtype)
    conv = (spec.conv_kernel, spec.gdn_qkv_dim)
    return {
        "qkv": _matrix(D, spec.gdn_qkv_dim, ("embed", "heads"), "linear_attn.in_proj_qkv", dtype),
        "z": _matrix(D, spec.gdn_inner_dim, ("embed", "heads"), "linear_attn.in_proj_z", dtype),
        "b": _matrix(D, N, ("embed", None), "linear_attn.in_proj_b", dtype),
        "a": _matrix(D, N, ("embed", None), "linear_attn.in_proj_a", dtype),
        "conv": Weight(conv, (None, "heads"), "fan_in", "linear_attn.conv1d.weight", dtype, (0, 1), unit=1),
        "A_log": Weight((N,), (None,), "log_decay", "linear_attn.A_log", exact),
        "dt_bias": Weight((N,), (None,), "ones", "linear_attn.dt_bias", dtype),
        "norm": Weight((spec.gdn_value_dim,), (None,), "ones", "linear_attn.norm.weight", exact),
        "out": _matrix(spec.gdn_inner_dim, D, ("heads", "embed"), "linear_attn.out_proj", dtype),
    }


def attention_weights(spec: ModelSpec) -> dict[str, Weight]:
    """A gated attention mixer; `q` holds query and gate side by side within each head."""
    D, H, dtype = spec.hidden_size, spec.head_dim, spec.dtype
    q_dim, kv_dim = spec.num_heads * H, spec.num_kv_heads * H
    return {
        "q": _matrix(D, 2 * q_dim, ("embed", "heads"), "self_attn.q_proj", dtype),
        "k": _matrix(D, kv_dim, ("embed", "kv_heads"), "self_attn.k_proj", dtype),
        "v": _matrix(D, kv_dim, ("embed", "kv_heads"), "self_attn.v_proj", dtype),
        "q_norm": _norm(H, "self_attn.q_norm", dtype),
        "k_norm": _norm(H, "self_attn.k_norm", dtype),
        "out": _matrix(q_dim, D, ("heads", "embed"), "self_attn.o_proj", dtype),
    }


def mlp_weights(spec: ModelSpec, width: int, hub: str) -> dict[str, Weight]:
    """A SwiGLU MLP: a dense layer's, or a mixture's shared expert."""
    D, dtype = spec.hidden_size, spec.dtype
    return {
        "gate": _matrix(D, width, ("embed", "mlp"), f"{hub}.gate_proj", dtype),
        "up": _matrix(D, width, ("embed", "mlp"), f"{hub}.up_proj", dtype),
        "down": _matrix(width, D, ("mlp", "embed"), f"{hub}.down_proj", dtype),
    }


def moe_weights(spec: ModelSpec) -> dict[str, Weight]:
    """A mixture's router and routed experts; the shared expert is a module of its own."""
    D, E, F, dtype = spec.hidden_size, spec.num_experts, spec.expert_dim, spec.dtype
    assert E is not None and F is not None
    axes_up, axes_down = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
    return {
        "router": _matrix(D, E, ("embed", None), "mlp.gate", dtype),
        "gate_up": Weight((E, D, 2 * F), axes_up, "fan_in", "mlp.experts.gate_up_proj", dtype, swap=(1, 2)),
        "down": Weight((E, F, D), axes_down, "fan_in", "mlp.experts.down_proj", dtype, swap=(1, 2)),
        "shared_gate": _matrix(D, 1, ("embed", None), "mlp.shared_expert_gate", dtype),
    }


def block_weights(spec: ModelSpec) -> dict[str, Weight]:
    """The two norms of a decoder layer."""
    return {
        "mixer_norm": _norm(spec.hidden_size, "input_layernorm", spec.dtype),
        "mlp_norm": _norm(spec.hidden_size, "post_attention_layernorm", spec.dtype),
    }


def top_weights(spec: ModelSpec) -> dict[str, Weight]:
    """Embedding, final norm and, unless tied, the head [D, V]."""
    V, D, dtype = spec.vocab_size, spec.hidden_size, spec.dtype
    top = {
        "embed": Weight((V, D), ("vocab", "embed"), "embedding", "embed_tokens.weight", dtype),
        "norm": _norm(D, "norm", dtype),
    }
    if not spec.tie_embeddings:
        top["head"] = _matrix(D, V, ("embed", "vocab"), "lm_head", dtype)
    return top


def mtp_weights(spec: ModelSpec) -> dict[str, Weight]:
    """What the multi-token-prediction block has beside its decoder layer; `hub` holds the full names."""
    D, dtype = spec.hidden_size, spec.dtype
    return {
        "fc": _matrix(2 * D, D, (None, "embed"), "mtp.fc", dtype),
        "embedding_norm": _norm(D, "mtp.pre_fc_norm_embedding", dtype),
        "hidden_norm": _norm(D, "mtp.pre_fc_norm_hidden", dtype),
        "norm": _norm(D, "mtp.norm", dtype),
    }


Path = tuple[str | int, ...]


def all_weights(spec: ModelSpec) -> dict[Path, Weight]:
    """Every weight by its path in the state of a `Transformer`."""
    table: dict[Path, Weight] = {(name,): weight for name, weight in top_weights(spec).items()}
    for layer, kind in enumerate(spec.layer_types):
        table |= {("layers", layer, *at): weight for at, weight in _layer_weights(spec, kind).items()}
    if spec.mtp:
        table |= {("mtp", name): weight for name, weight in mtp_weights(spec).items()}
        for at, weight in _layer_weights(spec, "full_attention").items():
            table["mtp", "layer", *at] = replace(weight, hub=f"mtp.layers.0.{weight.hub}")
    return table


def _layer_weights(spec: ModelSpec, kind: LayerType) -> dict[Path, Weight]:
    mixer = gdn_weights(spec) if kind == "linear_attention" else attention_weights(spec)
    parts: dict[Path, dict[str, Weight]] = {(): block_weights(spec), ("mixer",): mixer}
    if spec.mlp_dim is not None:
        parts["mlp",] = mlp_weights(spec, spec.mlp_dim, "mlp")
    if spec.shared_expert_dim is not None:
        parts["mlp",] = moe_weights(spec)
        parts["mlp", "shared"] = mlp_weights(spec, spec.shared_expert_dim, "mlp.shared_expert")
    return {(*at, name): weight for at, weights in parts.items() for name, weight in weights.items()}


def parameter_count(spec: ModelSpec) -> int:
    """Parameters of the model, a tied head counted once; `spec.mtp` adds the multi-token-prediction block."""
    return sum(math.prod(weight.shape) for weight in all_weights(spec).values())
