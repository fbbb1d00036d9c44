"""Soft overlong punishment of DAPO (arXiv:2503.14476, equation 13). Pure NumPy, float64."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """What is added to the reward of an episode of y tokens, prompt and tool output among them:

        0                                          y <= length - cache
        scale * (length - cache - y) / cache       length - cache < y <= length
        -scale                                     y > length

    Raises:
        ValueError: a cache that is not between 1 and length, or a scale that is not positive.
    """

    length: int
    cache: int
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.length or self.scale <= 0:
            raise ValueError(f"expected a cache of 1 to length tokens and a positive scale, got {self}")

    def __call__(self, lengths_G: Int[np.ndarray, " G"]) -> Float64[np.ndarray, " G"]:
        """The penalty of each episode, 0 or below."""
        room_G = np.asarray(self.length - self.cache - lengths_G, np.float64)
        return self.scale * np.clip(room_G / self.cache, -1.0, 0.0)
