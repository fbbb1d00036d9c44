"""What `python -m kernels.bench` measures: every public op, its implementations and a peer.

Letters besides the common ones: J value head dim, W convolution width, F an expert's inner width,
X experts per token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels import roofline
from kernels.attention import attention, paged_attention
from kernels.causal_conv1d import causal_conv1d
from kernels.gated_delta_rule import gated_delta_rule
from kernels.grouped_matmul import expert_mlp
from kernels.roofline import Work


@dataclass(frozen=True)
class Variant:
    """One way to run a case. With `unavailable`, the reason why there is nothing to run here."""

    name: str
    run: Callable[..., Any] | None = None
    on_host: bool = False
    unavailable: str = ""


@dataclass(frozen=True)
class Case:
    """Variants over the same arguments; the last variant is the peer.

    `carried` arguments (the last ones) are donated and replaced by as many last results.
    """

    op: str
    mode: str
    shape: str
    dtype: str
    tokens: int
    work: Work
    args: tuple[Any, ...]
    variants: tuple[Variant, ...]
    carried: int = 0


@dataclass(frozen=True)
class Setting:
    """Where and how large: `size` is "quick", "cpu" or "accelerator"."""

    platform: str
    size: str
    dtype: Any


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """Cases of one of `OPS`, built one at a time so that only one's arrays are alive."""
    yield from OPS[op](setting)


def _normal(seed: int, dtype: Any, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def _work(flops: int, run: Callable[..., Any], args: tuple[Any, ...]) -> Work:
    return Work(flops, roofline.bytes_once(run, *args))


def with_gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    """(cotangent, *args) -> the result of `run` and the gradients of all args; `run` returns one array."""

    def both(cotangent, *args):
        out, pull = jax.vjp(run, *args)
        return out, pull(cotangent.astype(out.dtype))

    return both


def _backward(case: Case, cotangent: jax.Array, differentiated: int) -> Case:
    """The case with gradients of its first `differentiated` arguments."""

    def variant(each: Variant) -> Variant:
        if each.run is None or each.on_host:
            return replace(each, run=None, unavailable=each.unavailable or "has no gradient")
        return replace(each, run=partial(_split_gradients, each.run, differentiated))

    variants = tuple(map(variant, case.variants))
    args = (cotangent, *case.args)
    flops = case.work.flops * roofline.FORWARD_AND_BACKWARD
    first = next(each.run for each in variants if each.run is not None)
    mode = "forward+backward"
    return replace(case, mode=mode, variants=variants, args=args, work=_work(flops, first, args))


def _split_gradients(run, differentiated, cotangent, *args):
    fixed = args[differentiated:]
    return with_gradients(lambda *free: run(*free, *fixed))(cotangent, *args[:differentiated])


def _delta_rule_inputs(setting: Setting, B: int, T: int, K: int, N: int, H: int) -> tuple[jax.Array, ...]:
    q, k = (_normal(seed, jnp.float32, B, T, K, H) for seed in (0, 1))
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -jax.nn.softplus(_normal(3, jnp.float32, B, T, N))
    beta = jax.nn.sigmoid(_normal(4, jnp.float32, B, T, N))
    low = (
        (q * H**-0.5).astype(setting.dtype),
        k.astype(setting.dtype),
        _normal(2, setting.dtype, B, T, N, H),
    )
    return (*low, g, beta)


def _delta_rule(q, k, v, g, beta, *state, implementation):
    return gated_delta_rule(
        q,
        k,
        v_BTNJ=v,
        g_BTN=g,
        beta_BTN=beta,
        initial_state_BNHJ=state[0] if state else None,
        implementation=implementation,
    )


def _delta_rule_output(*args, implementation):
    return _delta_rule(*args, implementation=implementation)[0]


# Autodiff of the recurrence keeps every token's state.
LONGEST_RECURRENT_BACKWARD = 1024


def _delta_rule_cases(setting: Setting) -> Iterator[Case]:
    K, N, H = {"quick": (1, 2, 16), "cpu": (1, 2, 128), "accelerator": (16, 64, 128)}[setting.size]
    for T in (64, 128) if setting.size == "quick" else (1024, 2048, 4096, 8192):
        forward = _delta_rule_case(setting, T, K, N, H)
        yield forward
        trained = forward
        if T > LONGEST_RECURRENT_BACKWARD:
            reason = f"keeps T states of N H J for its backward; skipped above T {LONGEST_RECURRENT_BACKWARD}"
            peer = replace(forward.variants[-1], run=None, unavailable=reason)
            trained = replace(forward, variants=(*forward.variants[:-1], peer))
        yield _backward(trained, _normal(5, jnp.float32, 1, T, N, H), 5)
    yield _delta_rule_decode(setting, K, N, H)


def _delta_rule_case(setting: Setting, T: int, K: int, N: int, H: int) -> Case:
    args = _delta_rule_inputs(setting, 1, T, K, N, H)
    xla, peer = (partial(_delta_rule_output, implementation=name) for name in ("xla", "recurrent"))
    flops = roofline.gated_delta_rule_flops(B=1, T=T, N=N, H=H, J=H)
    return Case(
        op="gated_delta_rule",
        mode="forward",
        shape=f"B1 T{T} K{K} N{N} H{H} J{H}",
        dtype=jnp.dtype(setting.dtype).name,
        tokens=T,
        work=_work(flops, xla, args),
        args=args,
        variants=(Variant("xla (chunked)", xla), Variant("recurrent (peer)", peer)),
    )


def _delta_rule_decode(setting: Setting, K: int, N: int, H: int) -> Case:
    B = {"quick": 2, "cpu": 64, "accelerator": 256}[setting.size]
    args = (*_delta_rule_inputs(setting, B, 1, K, N, H), _normal(6, jnp.float32, B, N, H, H))
    xla, peer = (partial(_delta_rule, implementation=name) for name in ("xla", "recurrent"))
    flops = roofline.gated_delta_rule_flops(B=B, T=1, N=N, H=H, J=H)
    return Case(
        op="gated_delta_rule",
        mode="decode",
        shape=f"B{B} T1 K{K} N{N} H{H} J{H}",
        dtype=jnp.dtype(setting.dtype).name,
        tokens=B,
        work=_work(flops, xla, args),
        args=args,
        variants=(Variant("xla (step)", xla), Variant("recurrent (peer)", peer)),
        carried=1,
    )


def _conv_cases(setting: Setting) -> Iterator[Case]:
    T, D = {"quick": (64, 32), "cpu": (2048, 1024), "accelerator": (65536, 12288)}[setting.size]
    W = 4
    args = (_normal(0, setting.dtype, 1, T, D), _normal(1, setting.dtype, W, D))

    def xla(x_BTD, weight_WD):
        return causal_conv1d(x_BTD, weight_WD)[0]

    def peer(x_BTD, weight_WD):
        layout = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(
            x_BTD, weight_WD[:, None], (1,), [(W - 1, 0)], dimension_numbers=layout, feature_group_count=D
        )

    case = Case(
        op="causal_conv1d",
        mode="forward",
        shape=f"B1 T{T} D{D} W{W}",
        dtype=jnp.dtype(setting.dtype).name,
        tokens=T,
        work=_work(roofline.causal_conv1d_flops(B=1, T=T, D=D, W=W), xla, args),
        args=args,
        variants=(Variant("xla", xla), Variant("lax.conv_general_dilated (peer)", peer)),
    )
    yield case
    yield _backward(case, _normal(2, setting.dtype, 1, T, D), 2)


# (T, D, F, E, X)
EXPERT_SHAPES = {
    "quick": ((32, 16, 8, 4, 2),),
    "cpu": ((4096, 128, 32, 8, 2), (1024, 512, 256, 8, 2), (512, 256, 64, 64, 8), (32, 256, 64, 64, 8)),
    "accelerator": ((65536, 4096, 1024, 8, 2), (65536, 2048, 512, 64, 8)),
}


def _expert_cases(setting: Setting) -> Iterator[Case]:
    for T, D, F, E, X in EXPERT_SHAPES[setting.size]:
        case = _expert_case(setting, T, D, F, E, X)
        yield case
        yield _backward(case, _normal(4, setting.dtype, T, D), 3)


def _expert_case(setting: Setting, T: int, D: int, F: int, E: int, X: int) -> Case:
    chosen, index_TX = lax.top_k(jax.nn.softmax(_normal(3, jnp.float32, T, E)), X)
    combine_TE = (jax.nn.one_hot(index_TX, E) * chosen[..., None]).sum(1)
    gate_up_EDF = _normal(1, setting.dtype, E, D, 2 * F) * D**-0.5
    args = (
        _normal(0, setting.dtype, T, D),
        gate_up_EDF,
        _normal(2, setting.dtype, E, F, D) * F**-0.5,
        combine_TE,
    )

    def run(x_TD, gate_up_EDF, down_EFD, combine_TE, *, implementation):
        return expert_mlp(
            x_TD,
            combine_TE,
            gate_up_EDF=gate_up_EDF,
            down_EFD=down_EFD,
            experts_per_token=X,
            implementation=implementation,
        )

    ours = [Variant(name, partial(run, implementation=name)) for name in ("tiled", "dense_masked")]
    ragged = Variant("ragged (lax.ragged_dot)", partial(run, implementation="ragged"))
    return Case(
        op="expert_mlp",
        mode="forward",
        shape=f"T{T} D{D} F{F} E{E} top-{X}",
        dtype=jnp.dtype(setting.dtype).name,
        tokens=T,
        work=_work(
            roofline.expert_mlp_flops(T=T, D=D, F=F, experts_per_token=X),
            partial(run, implementation="ragged"),
            args,
        ),
        args=args,
        variants=(*ours, ragged, *_expert_peers(setting, args)),
    )


def _expert_peers(setting: Setting, args: tuple[Any, ...]) -> tuple[Variant, Variant]:
    host = Variant("NumPy loop over experts", partial(loop_numpy, *map(np.asarray, args)), on_host=True)
    if setting.platform != "cpu" or setting.dtype != jnp.float32:
        reason = "runs on the host in float32; compared on cpu only"
        host = Variant(host.name, unavailable=reason)
    return host, Variant("lax.scan over experts (peer)", loop_scan)


def loop_numpy(
    x_TD: np.ndarray, gate_up_EDF: np.ndarray, down_EFD: np.ndarray, combine_TE: np.ndarray
) -> np.ndarray:
    """Each expert on the rows that chose it; no wasted product, one BLAS call after another."""
    out_TD = np.zeros_like(x_TD)
    for e in range(combine_TE.shape[1]):
        rows = np.flatnonzero(combine_TE[:, e])
        gate, up = np.split(x_TD[rows] @ gate_up_EDF[e], 2, axis=-1)
        out_TD[rows] += combine_TE[rows, e, None] * ((gate / (1 + np.exp(-gate)) * up) @ down_EFD[e])
    return out_TD


def loop_scan(
    x_TD: jax.Array, gate_up_EDF: jax.Array, down_EFD: jax.Array, combine_TE: jax.Array
) -> jax.Array:
    """Each expert on all rows, one after another: the loop that shapes known in advance allow."""

    def body(out_TD, expert):
        gate_up_DF, down_FD, combine_T = expert
        gate_TF, up_TF = jnp.split(x_TD @ gate_up_DF, 2, axis=-1)
        weight_T1 = combine_T[:, None].astype(x_TD.dtype)
        return out_TD + (jax.nn.silu(gate_TF) * up_TF * weight_T1) @ down_FD, None

    return lax.scan(body, jnp.zeros_like(x_TD), (gate_up_EDF, down_EFD, combine_TE.T))[0]


def _attention_cases(setting: Setting) -> Iterator[Case]:
    N, K, H = (2, 1, 16) if setting.size == "quick" else (8, 2, 256)
    T = {"quick": 32, "cpu": 1024, "accelerator": 4096}[setting.size]
    B = {"quick": 2, "cpu": 32, "accelerator": 256}[setting.size]
    causal = jnp.tri(T, dtype=bool)[None]
    yield _attention_case(setting, "forward", (1, T, T, N, K, H), causal)
    yield _attention_case(setting, "decode", (B, 1, T, N, K, H), jnp.ones((B, 1, T), bool))


def _attention_case(setting: Setting, mode: str, sizes: tuple[int, ...], mask_BTS: jax.Array) -> Case:
    B, T, S, N, K, H = sizes
    q, k, v = (
        _normal(i, setting.dtype, B, *rest) for i, rest in enumerate(((T, N, H), (S, K, H), (S, K, H)))
    )

    def xla(q, k, v, mask):
        return attention(q, k, v_BSKH=v, mask_BTS=mask, scale=H**-0.5)

    def peer(q, k, v, mask):
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=H**-0.5)

    args = (q, k, v, mask_BTS)
    flops = roofline.attention_flops(pairs=int(mask_BTS.sum()), N=N, H=H)
    return Case(
        op="attention",
        mode=mode,
        shape=f"B{B} T{T} S{S} N{N} K{K} H{H}" + (" causal" if T > 1 else ""),
        dtype=jnp.dtype(setting.dtype).name,
        tokens=B * T,
        work=_work(flops, xla, args),
        args=args,
        variants=(Variant("xla", xla), Variant("jax.nn.dot_product_attention (peer)", peer)),
    )


# (B, N, K, H): decode steps of rows of 32 to 640 tokens
PAGED_SHAPES = {
    "quick": ((2, 2, 1, 16),),
    "cpu": ((64, 4, 2, 32), (64, 10, 2, 64)),
    "accelerator": ((256, 32, 2, 256),),
}
PAGE = 32


def _paged_cases(setting: Setting) -> Iterator[Case]:
    for B, N, K, H in PAGED_SHAPES[setting.size]:
        lengths_B = np.linspace(32, 640, B).astype(np.int32)
        # Pages in order, so that the peer can read the same pool as rows.
        pages_BX = np.arange(B * 640 // PAGE, dtype=np.int32).reshape(B, -1)
        q, k, v = (
            _normal(0, setting.dtype, B, 1, N, H),
            *(_normal(seed, setting.dtype, pages_BX.size, PAGE, K, H) for seed in (1, 2)),
        )
        args = (q, k, v, *map(jnp.asarray, (pages_BX, lengths_B - 1)))
        flops = roofline.attention_flops(pairs=int(lengths_B.sum()), N=N, H=H)
        yield Case(
            op="paged_attention",
            mode="decode",
            shape=f"B{B} T1 S32..640 N{N} K{K} H{H} pages of {PAGE}",
            dtype=jnp.dtype(setting.dtype).name,
            tokens=B,
            work=_work(flops, _paged, args),
            args=args,
            variants=(Variant("xla", _paged), Variant("attention over whole rows (peer)", _paged_as_rows)),
        )


def _paged(q, k, v, pages, lengths):
    scale, counts = q.shape[-1] ** -0.5, jnp.ones_like(lengths)
    return paged_attention(q, k, v_PSKH=v, pages_BX=pages, lengths_B=lengths, counts_B=counts, scale=scale)


def _paged_as_rows(q, k, v, pages, lengths):
    k, v = (x.reshape(q.shape[0], -1, *x.shape[2:]) for x in (k, v))
    mask = jnp.arange(k.shape[1]) <= lengths[:, None, None]
    return attention(q, k, v_BSKH=v, mask_BTS=mask, scale=q.shape[-1] ** -0.5)


OPS: dict[str, Callable[[Setting], Iterator[Case]]] = {
    "gated_delta_rule": _delta_rule_cases,
    "causal_conv1d": _conv_cases,
    "expert_mlp": _expert_cases,
    "attention": _attention_cases,
    "paged_attention": _paged_cases,
}
