"""Whether what a caller asks for can be done: types and ranges, before anything changes. Every fault found
here is an `EngineError` that names what was expected; found later it would cost other sessions their turns.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.contracts import SampleKey, Sampling
from jaxrl.engine.errors import EngineError
from jaxrl.engine.sampling import key_words

_MOST = 2**31 - 1
TEMPERATURES = 1e-6, 1e6  # beyond them float32 logits overflow, or the draw is uniform


def check_count(name: str, value: Any, low: int, high: int = _MOST) -> None:
    """Raises: EngineError: not an integer from `low` to `high`."""
    if not _integer(value) or not low <= value <= high:
        bounds = f"of at least {low}" if high == _MOST else f"from {low} to {high}"
        raise EngineError(f"{name} = {value!r}: expected an integer {bounds}")


def check_ids(name: str, ids: Any, *, vocab: int) -> None:
    """Raises: EngineError: not a sequence of integers of the vocabulary."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence | np.ndarray):
        raise EngineError(f"{name}: expected a list of token ids, got {type(ids).__name__}")
    for one in ids:
        if not _integer(one):
            raise EngineError(f"{name}: expected integers, got {one!r} of type {type(one).__name__}")
        if not 0 <= one < vocab:
            raise EngineError(f"{name}: {one} is outside the vocabulary 0..{vocab - 1}")


def check_sampling(sampling: Any) -> None:
    """Raises: EngineError: not a `contracts.Sampling`, or a value out of its range."""
    if not isinstance(sampling, Sampling):
        raise EngineError(f"sampling: expected a contracts.Sampling, got {type(sampling).__name__}")
    check_count("sampling.top_k", sampling.top_k, 0)
    for name in ("temperature", "top_p", "min_p"):
        if not isinstance(getattr(sampling, name), int | float | np.integer | np.floating):
            raise EngineError(f"sampling.{name} = {getattr(sampling, name)!r}: expected a number")
    low, high = TEMPERATURES
    if not (sampling.temperature == 0 or low <= sampling.temperature <= high):
        raise EngineError(
            f"sampling.temperature = {sampling.temperature}: expected 0 (greedy) or {low} to {high:.0f}"
        )
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"sampling.top_p = {sampling.top_p}: expected more than 0, at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise EngineError(f"sampling.min_p = {sampling.min_p}: expected 0 to 1")


def check_strings(strings: Any) -> None:
    """Raises: EngineError: not a sequence of non-empty strings."""
    if isinstance(strings, str) or not isinstance(strings, Sequence):
        raise EngineError(f"stop_strings: expected a list of strings, got {strings!r}")
    for one in strings:
        if not isinstance(one, str) or not one:
            raise EngineError(f"stop_strings: expected non-empty strings, got {one!r}")


def checked_words(key: Any) -> np.ndarray:
    """The words of a sampling key. Raises: EngineError: not a `contracts.SampleKey` with integers."""
    if not isinstance(key, SampleKey) or not isinstance(key.task, str):
        raise EngineError(f"key: expected a contracts.SampleKey with a task name, got {key!r}")
    for name in ("seed", "epoch", "sample", "turn"):
        if not _integer(getattr(key, name)):
            raise EngineError(f"key.{name} = {getattr(key, name)!r}: expected an integer")
    try:
        return key_words(key)
    except UnicodeEncodeError as error:
        raise EngineError(f"key.task = {key.task!r}: expected text that UTF-8 can hold") from error


def check_weights(params: Any, like: Any, *, version: Any) -> None:
    """Raises: EngineError: weights of another tree, shape or dtype than `like`, or no integer version."""
    if not _integer(version):
        raise EngineError(f"version = {version!r}: expected an integer")
    got, want = (dict(jax.tree.leaves_with_path(tree)) for tree in (params, like))
    if got.keys() != want.keys():
        odd = sorted(map(jax.tree_util.keystr, got.keys() ^ want.keys()))[:3]
        raise EngineError(f"weights: expected the tree of the engine's model; it differs in {odd}")
    for path, leaf in want.items():
        kinds = [(each.shape, each.dtype) for each in (leaf, got[path])]
        if kinds[0] != kinds[1]:
            name = jax.tree_util.keystr(path)
            raise EngineError(f"weights{name}: expected shape and dtype {kinds[0]}, got {kinds[1]}")


def _integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
