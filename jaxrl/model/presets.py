"""The eight published sizes, and the small model of the quickstart."""

from collections.abc import Mapping
from typing import Any

from jaxrl.model.spec import ModelSpec, hybrid_layers


def _published(
    hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int, **rest: Any
) -> ModelSpec:
    return ModelSpec(
        vocab_size=248_320,
        hidden_size=hidden,
        layer_types=hybrid_layers(layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        gdn_key_heads=16,
        gdn_value_heads=value_heads,
        gdn_key_dim=128,
        gdn_value_dim=128,
        dtype="bfloat16",
        **rest,
    )


def _experts(count: int, chosen: int, width: int) -> dict[str, int]:
    return {
        "num_experts": count,
        "experts_per_token": chosen,
        "expert_dim": width,
        "shared_expert_dim": width,
    }


PRESETS: Mapping[str, ModelSpec] = {
    "quickstart": ModelSpec(
        vocab_size=768,
        hidden_size=128,
        layer_types=hybrid_layers(4),
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rotary_dim=8,
        rope_theta=1e7,
        gdn_key_heads=2,
        gdn_value_heads=2,
        gdn_key_dim=32,
        gdn_value_dim=64,
        num_experts=8,
        experts_per_token=2,
        expert_dim=32,
        shared_expert_dim=64,
    ),
    "qwen3.5-0.8b": _published(1024, 24, 8, 2, 16, mlp_dim=3584, tie_embeddings=True),
    "qwen3.5-2b": _published(2048, 24, 8, 2, 16, mlp_dim=6144, tie_embeddings=True),
    "qwen3.5-4b": _published(2560, 32, 16, 4, 32, mlp_dim=9216, tie_embeddings=True),
    "qwen3.5-9b": _published(4096, 32, 16, 4, 32, mlp_dim=12_288),
    "qwen3.5-27b": _published(5120, 64, 24, 4, 48, mlp_dim=17_408),
    "qwen3.5-35b-a3b": _published(2048, 40, 16, 2, 32, **_experts(256, 8, 512)),
    "qwen3.5-122b-a10b": _published(3072, 48, 32, 2, 64, **_experts(256, 8, 1024)),
    "qwen3.5-397b-a17b": _published(4096, 60, 32, 2, 64, **_experts(512, 10, 1024)),
}
