"""The cases in which the model is compared with traces of tools/hf_traces.py, and how far apart they are.

float64 is compared with the reference in float64, the arithmetic that counts; float32 with the same truth;
bfloat16 by the Kullback-Leibler divergence from it, which may be twice that of the reference's own bfloat16.

An expert whose logit differs from the next one's by less than rounding is chosen otherwise now and then, and
such a token counts as much as a hundred others. So a mean over less than some hundred tokens is no verdict
in bfloat16: its two cases of decoding, 24 and 180 tokens, are judged as one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl.model.block import Packing
from jaxrl.model.hub import flat_state, hub_name, load_hub
from jaxrl.model.logprob import target_logprobs
from jaxrl.model.moe import balancing_loss
from jaxrl.model.norms import rms_norm
from jaxrl.model.params import all_weights
from jaxrl.model.transformer import Transformer

KINDS = ("dense", "moe")
DTYPES = ("float64", "float32", "bfloat16")
FLOAT32_GATES = {"dense": 5e-4, "moe": 5e-5}
# Nats. Below it two distributions are the same for any use: where logits are far apart, as in a random tied
# model, the divergence of bfloat16 itself is about 1e-10 and its ratio to another run's is chance.
BFLOAT16_FLOOR = 1e-6
FLOAT64_GATE = 1e-9
GRADIENT_GATE = 2e-4

Trace = dict[str, np.ndarray]


@dataclass(frozen=True)
class Result:
    """One line of the table. `error` must not exceed `gate`."""

    case: str
    dtype: str
    error: float
    gate: float
    measure: str

    @property
    def holds(self) -> bool:
        """Whether the gate holds; a NaN does not."""
        return self.error <= self.gate


@dataclass(frozen=True)
class Rows:
    """Packed rows: tokens, segments and positions [B, T]."""

    tokens: np.ndarray
    segments: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, *rows: list[np.ndarray], width: int, left: bool = False) -> "Rows":
        """Each row holds its documents one behind the other, padded to `width`."""
        made = [np.zeros((len(rows), width), np.int32) for _ in range(3)]
        for b, documents in enumerate(rows):
            start = width - sum(map(len, documents)) if left else 0
            for segment, ids in enumerate(documents, start=1):
                at = slice(start, start := start + len(ids))
                for array, value in zip(made, (ids, segment, np.arange(len(ids))), strict=True):
                    array[b, at] = value
        return cls(*made)

    def __add__(self, other: "Rows") -> "Rows":
        return Rows(*(np.concatenate(pair) for pair in zip(self.arrays, other.arrays, strict=True)))

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As the model's arguments, in order."""
        return self.tokens, self.segments, self.positions


def hidden_and_logits(model: Transformer, tokens, segments, positions) -> tuple[Any, Any, Any]:
    """Residual stream after each layer [L, B, T, D], logits, and those of multi-token prediction."""
    packing = Packing.of(segments, positions, model.spec)
    x, layers = model.embed[...][tokens], []
    for block in model.layers:
        x, _ = block(x, packing)
        layers.append(x)
    hidden = rms_norm(x, model.norm[...], eps=model.spec.norm_eps)
    at = {"segment_ids_BT": segments, "positions_BT": positions}
    return jnp.stack(layers), model.logits(hidden), model.mtp_logits(hidden, tokens, **at)


def logits(model: Transformer, tokens, segments, positions) -> Any:
    """Of packed rows, [B, T, V]."""
    return model.logits(model(tokens, segment_ids_BT=segments, positions_BT=positions))


def losses(model: Transformer, tokens, segments, positions) -> tuple[Any, tuple[Any, Any]]:
    """ce + 0.01 aux over all documents, and both."""
    hidden, router = model.with_router(tokens, segment_ids_BT=segments, positions_BT=positions)
    logprob, *_ = target_logprobs(hidden[:, :-1], model.head_weight(), targets_B=tokens[:, 1:], chunk=64)
    real = (segments[:, 1:] != 0) & (segments[:, 1:] == segments[:, :-1])
    ce = -jnp.where(real, logprob, 0).sum() / real.sum()
    aux = jnp.zeros((), ce.dtype) if router is None else balancing_loss(router)
    return ce + 0.01 * aux, (ce, aux)


def extend(model: Transformer, tokens, cache, lengths, counts) -> tuple[Any, Any]:
    """Logits and cache behind some more tokens."""
    hidden, cache = model.extend(tokens, cache, lengths_B=lengths, counts_B=counts)
    return model.logits(hidden), cache


class Comparison:
    """One kind in one dtype."""

    def __init__(self, directory: Path, kind: str, dtype: str):
        self.directory, self.kind, self.dtype = directory, kind, dtype
        self.truth = load_trace(directory / f"{kind}_f64.npz")
        if dtype == "bfloat16":
            self.peer = load_trace(directory / f"{kind}_bf16.npz")
        self.ids = [self.truth[f"ids{i}"] for i in range(3)]
        self.pieces = tuple(map(int, self.truth["pieces"]))
        self.widths = (1, 2, max(self.pieces))  # of the compiled prefill and decode steps
        self.width = sum(map(len, self.ids)) + 8  # of a packed row and of a cache
        self.model = load_hub(directory / f"{kind}_hub", dtype=dtype, mtp=True)  # pyright: ignore[reportArgumentType]
        self.graph, self.state = nnx.split(self.model)

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(model, *arrays)` compiled, without the model."""
        run = jax.jit(lambda state, *xs: function(nnx.merge(self.graph, state), *xs))
        return partial(run, self.state)

    def judge(
        self, case: str, got: np.ndarray, name: str, pick: Callable[[Any], Any] = lambda x: x
    ) -> Result:
        """Against the trace `name`, of which `pick` takes a part."""
        want, got = pick(self.truth[name]), np.asarray(got, np.float64)
        if got.shape != want.shape:
            raise ValueError(f"{self.kind} {case}: expected shape {want.shape}; got {got.shape}")
        if self.dtype == "bfloat16":
            peer = divergence(want, pick(self.peer[name]).astype(np.float64))
            # A case may hold fewer of the peer's flips than usual.
            usual = divergence(self.truth["right"], self.peer["right"].astype(np.float64))
            gate = max(2 * peer, 2 * usual, BFLOAT16_FLOOR)
            return Result(case, self.dtype, divergence(want, got), gate, "mean KL")
        gate = FLOAT64_GATE if self.dtype == "float64" else FLOAT32_GATES[self.kind]
        return Result(case, self.dtype, float(np.abs(got - want).max()), gate, "max abs")

    def results(self) -> Iterator[Result]:
        """All cases."""
        yield from self.alone()
        yield from self.rows()
        yield from self.cached()
        if self.dtype != "bfloat16":
            yield from self.gradients()
        if self.dtype == "float64":
            yield self.layouts()

    def alone(self) -> Iterator[Result]:
        """One sequence without any padding."""
        rows = Rows.of([self.ids[0]], width=len(self.ids[0]))
        layers, out, mtp = map(np.asarray, self.jit(hidden_and_logits)(*rows.arrays))
        yield self.judge("single", out[0], "single0")
        if self.dtype == "float64":
            yield self.judge("every layer", layers[:, 0], "hidden")
        yield self.judge("multi-token prediction", mtp[0, :-1], "mtp")

    def rows(self) -> Iterator[Result]:
        """Padding on either side, packing, text positions."""
        alone = [[ids] for ids in self.ids]
        of = partial(Rows.of, width=self.width)
        gaps = of([self.ids[0]])
        gaps.positions[0, : len(self.ids[0])] = self.truth["positions"]
        rows = of(*alone, left=True) + of(*alone) + of(list(self.ids)) + gaps
        out = np.asarray(self.jit(logits)(*rows.arrays))
        real = rows.segments != 0
        yield self.judge("left-padded", out[:3][real[:3]], "left")
        yield self.judge("right-padded", out[3:6][real[3:6]], "right")
        yield self.judge("packed", out[6][real[6]], "right")
        yield self.judge("mRoPE, text positions", out[7][real[7]], "mrope")

    def cached(self) -> Iterator[Result]:
        """Prefill in pieces and decode."""
        step = self.jit(extend)
        feed = partial(self.feed, step)
        for size in (1, 2):
            got = feed([pieces_of(ids, (size,) * len(self.ids[0])) for ids in self.ids])
            yield self.judge(f"chunks of {size}", np.concatenate(got), "right")
        got = feed([pieces_of(self.ids[0], self.pieces), [], []])
        yield self.judge("chunks of " + "+".join(map(str, self.pieces)), got[0], "chunked")
        forced = self.truth["forced"]
        prompts = (pieces_of(ids, (max(self.pieces),) * 3) for ids in self.ids)
        got = feed([prompt + list(more[:, None]) for prompt, more in zip(prompts, forced, strict=True)])
        decoded = np.stack([row[-forced.shape[1] :] for row in got])
        short = np.concatenate(feed([pieces_of(ids, (2, 1, 1, 1, 1)) for ids in self.truth["prompts"]]))
        if self.dtype == "bfloat16":
            steps = np.concatenate([decoded.reshape(-1, short.shape[-1]), short])
            yield self.judge("decode after padded prefill, prompts of 2", steps, "steps")
        else:
            yield self.judge("decode after padded prefill", decoded, "decode")
            yield self.judge("prompt of 2, then decode", short, "short")

    def feed(self, step: Callable[..., Any], pieces: list[list[np.ndarray]]) -> list[np.ndarray]:
        """Logits of each row's tokens, fed piece by piece; a row whose piece is empty stays as it is."""
        cache, lengths = self.model.init_cache(len(pieces), self.width), np.zeros(len(pieces), np.int32)
        out: list[list[np.ndarray]] = [[] for _ in pieces]
        for now in range(max(map(len, pieces))):
            parts = [row[now] if now < len(row) else np.zeros(0, np.int32) for row in pieces]
            counts = np.array([len(part) for part in parts], np.int32)
            width = next(width for width in self.widths if width >= counts.max())
            tokens = np.stack([np.pad(part, (0, width - len(part)), constant_values=3) for part in parts])
            got, cache = step(tokens.astype(np.int32), cache, lengths, counts)
            for row, logits_TV, count in zip(out, np.asarray(got), counts, strict=True):
                row.append(logits_TV[:count])
            lengths = lengths + counts
        return [np.concatenate(row) if row else np.zeros((0, 0)) for row in out]

    def gradients(self) -> Iterator[Result]:
        """Losses and every parameter's gradient, padded and packed."""
        run = self.jit_gradient()
        alone = [[ids] for ids in self.ids]
        of = partial(Rows.of, width=self.width)
        for case, rows in (("right-padded", of(*alone)), ("packed", of(list(self.ids), [], []))):
            (_, (ce, aux)), gradient = run(*rows.arrays)
            exact = self.dtype == "float64"
            for name, value in (("ce", ce), ("aux", aux)):
                if name in self.truth:
                    gate = FLOAT64_GATE if exact else 1e-5
                    yield Result(
                        f"{name} loss, {case}",
                        self.dtype,
                        relative(value, self.truth[name]),
                        gate,
                        "relative",
                    )
            worst = max(self.gradient_errors(gradient))
            gate = FLOAT64_GATE if exact else GRADIENT_GATE
            yield Result(f"gradients, {case} ({worst[1]})", self.dtype, worst[0], gate, "relative")

    def jit_gradient(self) -> Callable[..., Any]:
        """Losses and gradients of the parameters that the losses use."""
        function = jax.value_and_grad(
            lambda state, *xs: losses(nnx.merge(self.graph, state), *xs), has_aux=True
        )
        return partial(jax.jit(function), self.state)

    def gradient_errors(self, gradient: Any) -> Iterator[tuple[float, str]]:
        """Relative error of every parameter's gradient."""
        names, seen = all_weights(self.model.spec), set()
        for path, value in flat_state(gradient):
            if path[0] == "mtp":
                continue
            name = hub_name(path, names[path])
            seen.add(f"grad.{name}")
            yield relative(names[path].to_hub(np.asarray(value[...])), self.truth[f"grad.{name}"]), name
        if missing := {name for name in self.truth if name.startswith("grad.")} - seen:
            raise ValueError(
                f"expected a gradient for each of the reference's; got none for {sorted(missing)}"
            )

    def layouts(self) -> Result:
        """The `save_pretrained` layout holds the same parameters."""
        other = load_hub(self.directory / f"{self.kind}_hf", dtype="float64")
        mine = {path: value for path, value in nnx.to_flat_state(self.state) if path[0] != "mtp"}
        theirs = dict(nnx.to_flat_state(nnx.state(other)))
        if mine.keys() != theirs.keys():
            raise ValueError(
                f"expected the same parameters in both layouts; got {mine.keys() ^ theirs.keys()}"
            )
        error = max(float(np.abs(value[...] - theirs[path][...]).max()) for path, value in mine.items())
        return Result("hub layout = save_pretrained layout", "float64", error, 0.0, "max abs")


def load_trace(path: Path) -> Trace:
    """A trace, with the logits of all its decoding as `steps` [T, V]."""
    trace = dict(np.load(path))
    vocab = trace["short"].shape[-1]
    return trace | {"steps": np.concatenate([trace["decode"].reshape(-1, vocab), trace["short"]])}


def pieces_of(ids: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """One piece per size; the later ones are shorter or empty if the tokens run out."""
    return np.split(ids, np.cumsum(sizes))[: len(sizes)]


def relative(got: Any, want: np.ndarray) -> float:
    """Norm of the difference by the norm of the truth."""
    got = np.asarray(got, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"expected shape {want.shape}; got {got.shape}")
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def divergence(truth: np.ndarray, logits_TV: np.ndarray) -> float:
    """Mean KL(truth || logits) in nats over all tokens."""
    p, q = (np.asarray(jax.nn.log_softmax(jnp.asarray(x, jnp.float64))) for x in (truth, logits_TV))
    return float((np.exp(p) * (p - q)).sum(-1).mean())
