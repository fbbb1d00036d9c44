"""Low-rank adapters (LoRA, arXiv:2106.09685): W + alpha / rank * A B, of which only A and B are trained."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxrl.model.spec import ModelSpec
from jaxrl.rl.parameters import ParameterFilter

LoRATarget = Literal["attention", "gdn", "mlp", "experts"]

MATRICES: dict[LoRATarget, frozenset[str]] = {
    "attention": frozenset({"q", "k", "v", "out"}),
    "gdn": frozenset({"qkv", "z", "b", "a", "out"}),
    "mlp": frozenset({"gate", "up", "down"}),
    "experts": frozenset({"gate_up", "down"}),
}
"""Names of the matrices in each part of a layer: mixers, MLPs with the shared expert, routed experts."""


def projections(spec: ModelSpec, targets: Collection[LoRATarget]) -> ParameterFilter:
    """Chooses the matrices of the parts `targets` in every decoder layer of a `Transformer`."""

    def part(path: tuple[Any, ...]) -> LoRATarget | None:
        if path[0] != "layers" or len(path) < 4:
            return None
        if path[2] == "mixer":
            return "gdn" if spec.layer_types[path[1]] == "linear_attention" else "attention"
        return "experts" if spec.is_moe and len(path) == 4 else "mlp"

    def chosen(path: tuple[Any, ...], variable: Any) -> bool:
        del variable
        return (of := part(path)) in targets and of is not None and path[-1] in MATRICES[of]

    return chosen


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """The parametrisation of a model whose own weights stay as they are.

    A is random and B zero, so the model starts as it is. Both are at least float32 whatever the weights
    are; the sum is rounded to the dtype of the weight, and it is this rounded weight that the trainer
    differentiates, the engine samples with and an export holds. Experts [E, in, out] have an A and a B each.

    adapts: (path, variable) -> whether this matrix [.., in, out] gets an adapter.
    seed: of the A's.
    """

    rank: int
    alpha: float
    adapts: ParameterFilter
    seed: int = 0

    def split(self, state: Any) -> tuple[Any, Any]:
        """Adapters by the name of their matrix, and the whole model.

        Raises:
            ValueError: `adapts` chooses no matrix.
        """
        chosen = [(path, v) for path, v in _flat(state) if isinstance(v, nnx.Param) and self.adapts(path, v)]
        if not chosen:
            raise ValueError("expected at least one matrix to adapt, got none: the model has no such part")
        keys = jax.random.split(jax.random.key(self.seed), len(chosen))
        made = {_name(path): self._adapter(v[...], key) for (path, v), key in zip(chosen, keys, strict=True)}
        return made, state

    def merge(self, trained: Any, fixed: Any) -> Any:
        """The model with its adapters added in."""
        scale = self.alpha / self.rank

        def merged(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
            adapter = trained.get(_name(path))
            if adapter is None:
                return variable
            return variable.replace(_adapted(variable[...], adapter["A"], adapter["B"], scale))

        return nnx.from_flat_state([(path, merged(path, variable)) for path, variable in _flat(fixed)])

    def saved(self, fixed: Any) -> Any:
        """A fingerprint of the model: the mean size of each parameter."""
        return {"base": jnp.stack([_size(v[...]) for _, v in _flat(fixed) if isinstance(v, nnx.Param)])}

    def restored(self, saved: Any, fixed: Any) -> Any:
        """The model at hand. Raises `ValueError` if the adapters were trained on another."""
        # Sums are rounded differently on other devices; another model differs by far more.
        if not np.allclose(saved["base"], self.saved(fixed)["base"], rtol=1e-4, atol=0):
            raise ValueError(
                "expected the weights that the checkpoint's adapters were trained on, got others: start from "
                "the same model.checkpoint"
            )
        return fixed

    def _adapter(self, weight: Float[Array, "*E I O"], key: Array) -> dict[str, Array]:
        *experts, rows, columns = weight.shape
        dtype = jnp.promote_types(weight.dtype, jnp.float32)
        A = jax.random.normal(key, (*experts, rows, self.rank), dtype) * rows**-0.5
        made = {"A": A, "B": jnp.zeros((*experts, self.rank, columns), dtype)}
        if isinstance(weight.sharding, NamedSharding):  # small enough to lie whole on every device
            return jax.device_put(made, NamedSharding(weight.sharding.mesh, PartitionSpec()))
        return made


@jax.jit
def _adapted(weight: Array, A: Array, B: Array, scale: float | Array) -> Array:
    return (weight.astype(A.dtype) + scale * (A @ B)).astype(weight.dtype)


@jax.jit
def _size(weight: Array) -> Array:
    return jnp.abs(weight.astype(jnp.float32)).mean()


def _flat(state: Any) -> list[tuple[tuple[Any, ...], nnx.Variable]]:
    flat: Any = nnx.to_flat_state(state)
    return list(flat)


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
