"""What the engine knows and holds of one conversation."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from jaxrl.engine.cache import HostCopy


class Place(StrEnum):
    """Where the cached prefix of a context lies (the diagram in `README.md`)."""

    NOWHERE = "nowhere"  # new, or dropped: its tokens have to be prefilled
    LIVE = "live"  # state in a slot, keys in pages: it can be extended
    PARKED = "parked"  # state in a spare row, keys in pages
    HOST = "host"  # state and keys in host memory


@dataclass
class Stored:
    """State and keys on their way to host memory, or there. Immutable once `copy` is set."""

    nbytes: int
    copy: HostCopy | None = None
    holders: int = 1


@dataclass(eq=False)
class Context:
    """A conversation's tokens and its hold on the cache.

    The cache covers tokens[:cached]. All but the last token are cached once a turn decodes; the last
    is fed by the next step.
    """

    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    oldest_version: int | None = None  # of the weights that made the cached prefix
    slot: int | None = None
    cleared: bool = False  # a slot taken for a new sequence holds another's state until its first piece
    row: int | None = None
    pages: list[int] = field(default_factory=list)
    stored: Stored | None = None
    furthest: int = 0  # most tokens that were ever cached: prefilling those again is recomputing
    routes: list[np.ndarray] = field(default_factory=list)  # [n, L, X] pieces that cover tokens[:cached]

    @property
    def place(self) -> Place:
        """Where the cached prefix lies."""
        if self.slot is not None:
            return Place.LIVE
        if self.row is not None:
            return Place.PARKED
        return Place.NOWHERE if self.stored is None else Place.HOST

    @property
    def ready(self) -> bool:
        """Whether the next step can feed its last token."""
        return self.slot is not None and self.missing == 0 and (self.cleared or self.cached > 0)

    @property
    def missing(self) -> int:
        """Tokens to prefill before the next one can be sampled."""
        return max(len(self.tokens) - 1 - self.cached, 0)
