"""Which arrays of a model are trained, and how they and the others make the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from flax import nnx

type ParameterFilter = Callable[[tuple[Any, ...], Any], bool]


@runtime_checkable
class Parametrisation(Protocol):
    """Splits a model's whole nnx state into two trees of arrays, and makes it of them again."""

    def split(self, state: Any) -> tuple[Any, Any]:
        """(trained, fixed)."""
        ...

    def merge(self, trained: Any, fixed: Any) -> Any:
        """The model's state; differentiable in `trained`."""
        ...

    def saved(self, fixed: Any) -> Any:
        """What a checkpoint has to hold of the fixed arrays."""
        ...

    def restored(self, saved: Any, fixed: Any) -> Any:
        """The fixed arrays, from what a checkpoint held and those at hand. Raises `ValueError` if they do
        not belong together."""
        ...


@dataclass(frozen=True)
class Direct:
    """The model's own parameters are trained.

    trainable: (path, variable) -> whether to train it. None: every `nnx.Param`.
    """

    trainable: ParameterFilter | None = None

    def split(self, state: Any) -> tuple[Any, Any]:
        """The chosen parameters, and all other variables."""
        trained = nnx.Param if self.trainable is None else nnx.All(nnx.Param, self.trainable)
        chosen, others = nnx.split_state(state, trained, ...)
        return chosen, others

    def merge(self, trained: Any, fixed: Any) -> Any:
        """Both together."""
        return nnx.merge_state(trained, fixed)

    def saved(self, fixed: Any) -> Any:
        """All of it."""
        return fixed

    def restored(self, saved: Any, fixed: Any) -> Any:
        """The checkpoint's."""
        del fixed
        return saved


def without_router(path: tuple[Any, ...], variable: Any) -> bool:
    """Trains everything but the weights that choose experts."""
    del variable
    return "router" not in path
