"""Estimates of the distance to a reference policy, from the tokens of the policy itself. Pure JAX."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_ratio_BT: Float[Array, "B T"], *, estimator: KLEstimator) -> Float[Array, "B T"]:
    """KL(policy || reference) of each token, estimated from log_ratio = log p - log p of the reference.

    k1 = log_ratio, k2 = log_ratio^2 / 2, k3 = exp(-log_ratio) - 1 + log_ratio (Schulman, "Approximating KL
    divergence", 2020; k3 is GRPO's, arXiv:2402.03300). As a term of the loss k1 has, on the policy's own
    tokens, an expected gradient of 0, and k2 that of the KL divergence.
    """
    match estimator:
        case "k1":
            return log_ratio_BT
        case "k2":
            return 0.5 * log_ratio_BT**2
        case "k3":
            return jnp.exp(-log_ratio_BT) - 1 + log_ratio_BT
