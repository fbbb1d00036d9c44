"""Sizes of the Qwen3.5 family: what the hub's text config says, in one frozen, hashable dataclass."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

LayerType = Literal["linear_attention", "full_attention"]
Dtype = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model of the family. Either `mlp_dim` (dense) or all four expert sizes (MoE) are set.

    Raises:
      ValueError: sizes that do not fit together, named with their values.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[LayerType, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    conv_kernel: int = 4
    mlp_dim: int | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    expert_dim: int | None = None
    shared_expert_dim: int | None = None
    tie_embeddings: bool = False
    mtp: bool = False  # whether the model carries its multi-token-prediction block
    norm_eps: float = 1e-6
    dtype: Dtype = "float32"  # parameters and activations; sums that need more use at least float32

    def __post_init__(self) -> None:
        _require_multiple("num_heads", self.num_heads, of=self.num_kv_heads)
        _require_multiple("gdn_value_heads", self.gdn_value_heads, of=self.gdn_key_heads)
        _require_multiple("rotary_dim", self.rotary_dim, of=2)
        if self.rotary_dim > self.head_dim:
            raise ValueError(f"expected rotary_dim <= head_dim {self.head_dim}; got {self.rotary_dim}")
        if bad := set(self.layer_types) - {"linear_attention", "full_attention"}:
            raise ValueError(f"expected layer types linear_attention or full_attention; got {sorted(bad)}")
        self._check_mlp()

    def _check_mlp(self) -> None:
        sizes = (self.num_experts, self.experts_per_token, self.expert_dim, self.shared_expert_dim)
        dense = self.mlp_dim is not None and not any(sizes)
        mixture = self.mlp_dim is None and all(sizes)
        if not (dense or mixture):
            raise ValueError(
                "expected either mlp_dim or all of num_experts, experts_per_token, expert_dim, "
                f"shared_expert_dim; got mlp_dim={self.mlp_dim} and {sizes}"
            )

    @property
    def is_moe(self) -> bool:
        """Whether the MLP of every layer is a mixture of experts."""
        return self.num_experts is not None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_types)

    @property
    def gdn_qkv_dim(self) -> int:
        """Channels of a GDN layer's convolution: all q, all k, all v."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_inner_dim

    @property
    def gdn_inner_dim(self) -> int:
        """Width of a GDN layer's output before its last projection."""
        return self.gdn_value_heads * self.gdn_value_dim

    @classmethod
    def from_hub_config(
        cls, config: Mapping[str, Any], *, dtype: Dtype | None = None, mtp: bool = False
    ) -> "ModelSpec":
        """Reads a hub `config.json`, multimodal (sizes under `text_config`) or text-only.

        Args:
          mtp: take the multi-token-prediction block along; most uses of a model have none for it.

        Raises:
          KeyError: a size or the rope parameters are missing; nothing is guessed.
          ValueError: `mtp` is asked of a config without such a block.
        """
        text = config.get("text_config", config)
        if mtp and text.get("mtp_num_hidden_layers") != 1:
            got = text.get("mtp_num_hidden_layers")
            raise ValueError(f"expected mtp_num_hidden_layers = 1; got {got}: load without mtp")
        rope = text["rope_parameters"]
        moe = "num_experts" in text
        tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
        return cls(
            **{name: text[hub] for name, hub in _HUB_NAMES.items()},
            **{name: text[hub] for name, hub in (_HUB_MOE if moe else _HUB_DENSE).items()},
            layer_types=_layer_types(text),
            rotary_dim=round(text["head_dim"] * rope["partial_rotary_factor"]),
            rope_theta=rope["rope_theta"],
            tie_embeddings=tied,
            mtp=mtp,
            dtype=dtype or text.get("dtype") or config.get("dtype") or "bfloat16",
        )

    def to_hub_config(self) -> dict[str, Any]:
        """The text-only `config.json` that `from_hub_config` and transformers read."""
        kind = "qwen3_5_moe" if self.is_moe else "qwen3_5"
        head = "Qwen3_5MoeForCausalLM" if self.is_moe else "Qwen3_5ForCausalLM"
        names = _HUB_NAMES | (_HUB_MOE if self.is_moe else _HUB_DENSE)
        return {
            "architectures": [head],
            "model_type": f"{kind}_text",
            **{hub: getattr(self, name) for name, hub in names.items()},
            "num_hidden_layers": self.num_layers,
            "layer_types": list(self.layer_types),
            "rope_parameters": _rope_parameters(self),
            "tie_word_embeddings": self.tie_embeddings,
            **({"mtp_num_hidden_layers": 1} if self.mtp else {}),
            "dtype": self.dtype,
        }


_HUB_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "gdn_key_heads": "linear_num_key_heads",
    "gdn_value_heads": "linear_num_value_heads",
    "gdn_key_dim": "linear_key_head_dim",
    "gdn_value_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
    "norm_eps": "rms_norm_eps",
}
_HUB_DENSE = {"mlp_dim": "intermediate_size"}
_HUB_MOE = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "shared_expert_dim": "shared_expert_intermediate_size",
}


def _require_multiple(name: str, value: int, *, of: int) -> None:
    if value % of:
        raise ValueError(f"expected {name} to be a multiple of {of}; got {value}")


def _layer_types(text: Mapping[str, Any]) -> tuple[LayerType, ...]:
    if explicit := text.get("layer_types"):
        return tuple(explicit)
    return hybrid_layers(text["num_hidden_layers"], period=text["full_attention_interval"])


def hybrid_layers(layers: int, *, period: int = 4) -> tuple[LayerType, ...]:
    """Full attention in every `period`-th layer, GDN in the others."""
    return tuple("linear_attention" if i % period else "full_attention" for i in range(1, layers + 1))


def _rope_parameters(spec: ModelSpec) -> dict[str, Any]:
    frequencies = spec.rotary_dim // 2
    width = frequencies // 3
    height = (frequencies - width) // 2
    return {
        "rope_type": "default",
        "rope_theta": spec.rope_theta,
        "partial_rotary_factor": spec.rotary_dim / spec.head_dim,
        "mrope_section": [frequencies - height - width, height, width],
        "mrope_interleaved": True,
    }
