"""Times the model and the gated delta rule against Hugging Face transformers on this CPU, in one run.

    make bench-model [ARGS="--threads 2 --rounds 7 --only step"]
    python tools/bench_model.py --hf-python PYTHON

Both sides get the same float32 weights and inputs, the same processors and number of threads, and take
turns; the first two samples of each (compilation, warm-up) are dropped. Values must agree, or the command
fails: the rule's weighted sum, and a training step's loss in every round, so after as many updates. Rows are
full, nothing is padded; transformers then needs no mask. Ratios are medians of transformers' time over ours.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0  # as in tools/hf_bench.py
COMMON = {"rope_theta": 1e7, "vocab_size": 4096, "num_kv_heads": 2}
STEPS = {
    # name: (sizes, rows, tokens of a row)
    "quickstart": (None, 32, 160),
    "8 layers, d 256, 32 experts top-4": (
        dict(hidden_size=256, num_heads=8, head_dim=64, rotary_dim=16, gdn_key_heads=4, gdn_value_heads=8)
        | dict(gdn_key_dim=64, gdn_value_dim=64, num_experts=32, experts_per_token=4)
        | dict(expert_dim=128, shared_expert_dim=128, layers=8),
        4,
        512,
    ),
    "4 layers, d 256, 64 experts top-8": (
        dict(hidden_size=256, num_heads=4, head_dim=64, rotary_dim=16, gdn_key_heads=4, gdn_value_heads=8)
        | dict(gdn_key_dim=64, gdn_value_dim=64, num_experts=64, experts_per_token=8)
        | dict(expert_dim=64, shared_expert_dim=64, layers=4),
        2,
        1024,
    ),
}
# tokens, key heads, value heads, dim of a head
RULES = [(4096, 4, 8, 128), (4096, 4, 8, 64), (1024, 4, 8, 64), (2048, 4, 8, 64), (8192, 4, 8, 64)]
RULES += [(16384, 4, 8, 64)]


@dataclass(frozen=True)
class Sample:
    """Seconds of one call and what it returned."""

    wall: float
    cpu: float
    value: float


class Peer:
    """The process that runs a script of this folder in an environment of its own."""

    def __init__(self, python: Path, threads: int, *, script: str = "hf_bench.py") -> None:
        self._script = script
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [str(python), str(ROOT / "tools" / script), "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | quiet,
            text=True,
        )
        self.versions = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request; ends the program if the peer failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            sys.exit(f"tools/{self._script} ended with status {self._process.wait()}: see above")
        return json.loads(line)


def rule_case(
    shape: tuple[int, int, int, int], directory: Path
) -> tuple[dict[str, str], Callable[[], float]]:
    """The peer's request, and our own run."""
    import jax

    from kernels.gated_delta_rule import gated_delta_rule

    inputs = rule_inputs(*shape)
    np.savez(directory / "rule.npz", **inputs)  # pyright: ignore[reportArgumentType]
    weights = inputs.pop("weights")
    scale = shape[3] ** -0.5  # transformers scales queries itself

    def loss(x):
        out, _ = gated_delta_rule(x["q"] * scale, x["k"], v_BTNJ=x["v"], g_BTN=x["g"], beta_BTN=x["beta"])
        return (out * weights).sum()

    compiled = jax.jit(jax.value_and_grad(loss)).lower(inputs).compile()
    return {"op": "rule", "inputs": str(directory / "rule.npz")}, lambda: float(
        jax.block_until_ready(compiled(inputs))[0]
    )


def rule_inputs(tokens: int, key_heads: int, value_heads: int, dim: int) -> dict[str, np.ndarray]:
    """Normalised keys and queries, decays and write strengths as a fresh model has them."""
    rng = np.random.default_rng(0)
    heads = {"q": key_heads, "k": key_heads, "v": value_heads, "weights": value_heads}
    made = {name: rng.standard_normal((1, tokens, n, dim)) for name, n in heads.items()}
    for name in ("q", "k"):
        made[name] /= np.linalg.norm(made[name], axis=-1, keepdims=True)
    made["g"] = -np.exp(rng.uniform(-6, 1, (1, tokens, value_heads)))
    made["beta"] = rng.uniform(0, 1, (1, tokens, value_heads))
    return {name: value.astype(np.float32) for name, value in made.items()}


def step_case(name: str, directory: Path) -> tuple[dict[str, str], Callable[[], float]]:
    """The peer's request, and our own training step."""
    from flax import nnx

    from jaxrl.model.hub import load_hub, save_hub
    from jaxrl.model.spec import ModelSpec, hybrid_layers
    from jaxrl.model.transformer import Transformer

    sizes, rows, length = STEPS[name]
    path = ROOT / "configs" / "quickstart" / "start"
    if sizes is not None:
        path = directory / "model"
        sizes = dict(sizes)
        spec = ModelSpec(layer_types=hybrid_layers(sizes.pop("layers")), **COMMON, **sizes)  # pyright: ignore
        save_hub(Transformer(spec, rngs=nnx.Rngs(0)), path)
    model = load_hub(path, dtype="float32")
    tokens = np.random.default_rng(0).integers(0, model.spec.vocab_size, (rows, length))
    np.savez(directory / "tokens.npz", tokens=tokens)
    return {"op": "step", "model": str(path), "inputs": str(directory / "tokens.npz")}, our_step(
        model, tokens
    )


def our_step(model: Any, tokens: np.ndarray) -> Callable[[], float]:
    """Loss, gradients, clipping and AdamW of all next-token predictions; returns the loss."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from jaxrl.model.logprob import target_logprobs

    graph, state = nnx.split(model)
    packing = {
        "segment_ids_BT": jnp.ones(tokens.shape, jnp.int32),
        "positions_BT": jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
    }
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    )

    def loss(state):
        model = nnx.merge(graph, state)
        hidden = model(jnp.asarray(tokens), **packing)
        scores = target_logprobs(hidden[:, :-1], model.head_weight(), targets_B=jnp.asarray(tokens[:, 1:]))
        return -scores.logprob_B.mean()

    @partial(jax.jit, donate_argnums=0)
    def step(carry):
        state, moments = carry
        value, gradient = jax.value_and_grad(loss)(state)
        updates, moments = optimizer.update(gradient, moments, state)
        return (optax.apply_updates(state, updates), moments), value

    carry = [(state, jax.jit(optimizer.init)(state))]

    def run() -> float:
        carry[0], value = step(carry[0])
        return float(jax.block_until_ready((carry[0], value))[1])

    return run


def measure(peer: Peer, request: dict[str, str], run: Callable[[], float], rounds: int) -> Iterator[tuple]:
    """Pairs (transformers, ours) of one sample each, taking turns; fails if their values part."""
    peer.ask(**request)
    for index in range(rounds + WARM_UP):
        theirs = Sample(**peer.ask(op="run"))
        wall, cpu = time.perf_counter(), time.process_time()
        value = run()
        ours = Sample(time.perf_counter() - wall, time.process_time() - cpu, value)
        if abs(ours.value - theirs.value) > 2e-3 * max(1.0, abs(theirs.value)):
            sys.exit(f"expected equal values in round {index}; got {ours.value} and {theirs.value}")
        if index >= WARM_UP:
            yield theirs, ours


def report(name: str, pairs: list[tuple[Sample, Sample]], tokens: int) -> None:
    """One line of the table."""
    theirs, ours = (list(side) for side in zip(*pairs, strict=True))
    wall, cpu = (
        statistics.median(getattr(a, kind) / getattr(b, kind) for a, b in pairs) for kind in ("wall", "cpu")
    )
    milliseconds = [1e3 * statistics.median(each.wall for each in side) for side in (theirs, ours)]
    per_token = 1e3 * milliseconds[1] / tokens
    times = f"{milliseconds[0]:10.1f} {milliseconds[1]:10.1f} {per_token:9.1f}"
    print(f"{name:44} {times} {wall:8.2f}x {cpu:8.2f}x", flush=True)


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """This process and its children on the first `threads` processors, before JAX counts them."""
    every = sorted(os.sched_getaffinity(0))
    if len(every) < threads:
        sys.exit(f"--threads: expected at most {len(every)}, the processors here; got {threads}")
    os.sched_setaffinity(0, every[:threads])
    yield
    os.sched_setaffinity(0, every)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hf-python", type=Path, required=True, help="interpreter with torch, transformers")
    parser.add_argument("--threads", type=int, default=1, help="for both sides (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each side (default: 5)")
    parser.add_argument("--only", choices=("rule", "step"), help="one half of the table")
    args = parser.parse_args()
    with pinned(args.threads), tempfile.TemporaryDirectory(prefix="bench_model_") as folder:
        peer = Peer(args.hf_python, args.threads)
        print(f"float32, {args.threads} thread(s), {args.rounds} rounds after {WARM_UP}; {peer.versions}")
        print(f"{'':44} {'HF ms':>10} {'jaxrl ms':>10} {'us/token':>9} {'wall':>9} {'CPU':>9}")
        if args.only != "step":
            for shape in RULES:
                name = "rule f+b, T {}, heads {}/{}, d {}".format(*shape)
                report(name, list(measure(peer, *rule_case(shape, Path(folder)), args.rounds)), shape[0])
        if args.only != "rule":
            for name, (_, rows, length) in STEPS.items():
                title = f"step {rows} x {length}, {name}"
                report(title, list(measure(peer, *step_case(name, Path(folder)), args.rounds)), rows * length)
        peer.close()


if __name__ == "__main__":
    main()
