"""Dense SwiGLU and the mixture of experts with its router and shared expert."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int16

from jaxrl.model.linear import project
from jaxrl.model.params import accumulation_dtype, create, mlp_weights, moe_weights
from jaxrl.model.spec import ModelSpec
from kernels.grouped_matmul import expert_mlp

# Up to here comparing all pairs of experts is cheaper than sorting them, and every expert can be afforded on
# every token: rows keep their places, so a document's gradients do not depend on its neighbours by a bit.
FEW_EXPERTS = 16


class RouterStats(NamedTuple):
    """Sums over real tokens, enough for the balancing loss and for load metrics."""

    counts_LE: Array  # tokens that chose the expert
    probability_LE: Array  # sum of the router's probabilities
    tokens: Array  # real tokens


class Mlp(nnx.Module):
    """down(silu(gate x) * up x)."""

    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param

    def __init__(self, spec: ModelSpec, *, width: int, hub: str, rngs: nnx.Rngs):
        create(self, mlp_weights(spec, width, hub), rngs)

    def __call__(
        self,
        x_BTD: Float[Array, "*B D"],
        valid_BT: Bool[Array, "*B"] | None = None,
        *,
        routes_BTX: Int16[Array, "*B X"] | None = None,
    ) -> tuple[Float[Array, "*B D"], None]:
        """Token by token; the second result stands where a mixture returns its router sums."""
        del valid_BT, routes_BTX
        gate_BTF, up_BTF = project(x_BTD, self.gate[...]), project(x_BTD, self.up[...])
        return project(jax.nn.silu(gate_BTF) * up_BTF, self.down[...]), None

    def routes(self, x_BTD: Float[Array, "*B D"]) -> Int16[Array, "*B 0"]:
        """No experts to choose from."""
        return jnp.zeros((*x_BTD.shape[:-1], 0), jnp.int16)


class MoE(nnx.Module):
    """Routed experts plus a gated shared expert; no capacity, nothing is dropped."""

    router: nnx.Param
    gate_up: nnx.Param
    down: nnx.Param
    shared_gate: nnx.Param

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
        assert spec.shared_expert_dim is not None
        self.spec = spec
        create(self, moe_weights(spec), rngs)
        self.shared = Mlp(spec, width=spec.shared_expert_dim, hub="mlp.shared_expert", rngs=rngs)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        valid_BT: Bool[Array, "B T"] | None = None,
        *,
        routes_BTX: Int16[Array, "B T X"] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[Array, Array] | None]:
        """Returns the output and, for training, (counts_E, probability_E) of the real tokens `valid_BT`.

        Args:
          routes_BTX: experts to use in place of the most probable ones, weighed by what the router thinks of
            them now; -1 leaves the choice to the router.
        """
        chosen, E = self.spec.experts_per_token, self.spec.num_experts
        assert chosen is not None and E is not None
        x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
        probability_TE = self.probabilities(x_TD)
        selected_TE = top_experts(probability_TE, chosen)
        if routes_BTX is not None:
            selected_TE = _replayed(routes_BTX.reshape(-1, chosen), selected_TE)
        combine_TE = jnp.where(selected_TE, probability_TE, 0)
        combine_TE = combine_TE / combine_TE.sum(-1, keepdims=True)
        routed_TD = expert_mlp(
            x_TD,
            combine_TE,
            gate_up_EDF=self.gate_up[...],
            down_EFD=self.down[...],
            experts_per_token=chosen,
            implementation="dense_masked" if E <= FEW_EXPERTS else "auto",
        )
        shared_TD = self.shared(x_TD)[0] * jax.nn.sigmoid(project(x_TD, self.shared_gate[...]))
        stats = None if valid_BT is None else _sums(selected_TE, probability_TE, valid_BT.reshape(-1, 1))
        return (routed_TD + shared_TD).reshape(x_BTD.shape), stats

    def routes(self, x_BTD: Float[Array, "*B D"]) -> Int16[Array, "*B X"]:
        """The experts of each token, the most probable first: those that `__call__` uses."""
        chosen = self.spec.experts_per_token
        assert chosen is not None
        return lax.top_k(self.probabilities(x_BTD), chosen)[1].astype(jnp.int16)

    def probabilities(self, x_TD: Float[Array, "*T D"]) -> Float[Array, "*T E"]:
        """Softmax over all experts, logits included in at least float32: rounding them flips routes."""
        dtype = accumulation_dtype(x_TD.dtype)
        return jax.nn.softmax(x_TD.astype(dtype) @ self.router[...].astype(dtype), axis=-1)


def top_experts(probability_TE: Float[Array, "T E"], chosen: int) -> Bool[Array, "T E"]:
    """Marks the `chosen` largest of each row; of equal ones the first, as `lax.top_k` does."""
    E = probability_TE.shape[-1]
    if E > FEW_EXPERTS:
        _, index_TX = lax.top_k(probability_TE, chosen)
        return jax.nn.one_hot(index_TX, E, dtype=bool).any(-2)
    # Counting the better ones is one fused pass over E^2 comparisons; a sort is far slower on CPU.
    mine, other = probability_TE[..., :, None], probability_TE[..., None, :]
    earlier = jnp.tri(E, k=-1, dtype=bool)
    return ((other > mine) | ((other == mine) & earlier)).sum(-1) < chosen


def _replayed(routes_TX: Array, selected_TE: Array) -> Array:
    """The recorded experts of each token, and the router's own where none are recorded."""
    recorded_TE = jax.nn.one_hot(routes_TX, selected_TE.shape[-1], dtype=bool).any(-2)
    return jnp.where(routes_TX[:, :1] >= 0, recorded_TE, selected_TE)


def balancing_loss(stats: RouterStats) -> Float[Array, ""]:
    """E sum_e f_e P_e with both factors pooled over all layers before the product.

    f_e is the number of choices of expert e per token, P_e its mean probability. A uniform router
    gives `experts_per_token`. Zero real tokens give 0.
    """
    layers, E = stats.counts_LE.shape
    rows = jnp.maximum(stats.tokens, 1) * layers
    f_E, P_E = stats.counts_LE.sum(0) / rows, stats.probability_LE.sum(0) / rows
    return E * (f_E * P_E).sum()


def _sums(selected_TE: Array, probability_TE: Array, valid_T1: Array) -> tuple[Array, Array]:
    counts_E = (selected_TE & valid_T1).sum(0).astype(probability_TE.dtype)
    return counts_E, jnp.where(valid_T1, probability_TE, 0).sum(0)
