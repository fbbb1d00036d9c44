"""Low-rank adapters against dense matrices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rl_helpers import random_examples, score, tiny_model
from test_scoring import SPEC

from jaxrl.model.transformer import Transformer
from jaxrl.rl.learner import Learner
from jaxrl.rl.lora import LowRank, projections
from jaxrl.rl.loss import PolicyLoss
from jaxrl.rl.optimizer import OptimizerOptions
from jaxrl.rl.packing import pack
from jaxrl.rl.trees import flat

OPTIONS = OptimizerOptions(learning_rate=1e-2, clip_norm=None)
BATCHES = list(pack(random_examples(12), rows=3, row_length=16))
RANK, ALPHA = 3, 6.0


def kernels(path, value):
    return path[-1] == "kernel"


LORA = LowRank(rank=RANK, alpha=ALPHA, adapts=kernels, seed=5)


def learner(seed=0) -> Learner:
    return Learner(tiny_model(seed), score=score, loss=PolicyLoss(), options=OPTIONS, parameters=LORA)


def arrays(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in flat(tree).items()}


def test_it_starts_as_the_model_it_adapts_by_the_bit():
    subject, plain = learner(), Learner(tiny_model(), score=score, loss=PolicyLoss(), options=OPTIONS)
    np.testing.assert_array_equal(subject.logprobs(BATCHES[0]), plain.logprobs(BATCHES[0]))
    own, base = arrays(nnx.state(subject.model())), arrays(nnx.state(tiny_model()))
    assert own.keys() == base.keys()
    for name, leaf in own.items():
        np.testing.assert_array_equal(leaf, base[name])


def test_merged_weights_are_the_base_and_the_scaled_product():
    subject = learner()
    for _ in range(3):
        subject.update(BATCHES)
    base, merged = arrays(nnx.state(tiny_model())), arrays(nnx.state(subject.model()))
    adapters = arrays(subject.state()["params"])
    assert {name.rpartition("/")[0] for name in adapters} == {"hidden/kernel", "head/kernel"}
    for name, leaf in merged.items():
        wanted = base[name].astype(np.float64)
        if f"{name}/A" in adapters:
            A, B = (adapters[f"{name}/{each}"].astype(np.float64) for each in "AB")
            assert A.shape == (wanted.shape[0], RANK) and B.shape == (RANK, wanted.shape[1])
            assert np.abs(B).max() > 0
            wanted = wanted + ALPHA / RANK * (A @ B)
            np.testing.assert_allclose(leaf, wanted, rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(leaf, base[name])


def test_the_gradient_is_the_dense_one_projected():
    subject = learner()
    subject.update(BATCHES)  # B is no longer 0
    adapters, dense = arrays(subject.state()["params"]), _dense_gradient(subject)
    for batch in BATCHES:
        subject.accumulate(batch)
    total = subject._accumulator
    assert total is not None
    got = arrays(total.gradients)
    for name in ("hidden/kernel", "head/kernel"):
        A, B, dW = adapters[f"{name}/A"], adapters[f"{name}/B"], dense[name]
        scale = ALPHA / RANK
        for each, wanted in (("A", scale * dW @ B.T), ("B", scale * A.T @ dW)):
            assert np.abs(wanted).max() > 1e-3
            np.testing.assert_allclose(got[f"{name}/{each}"], wanted, rtol=1e-4, atol=1e-5)


def _dense_gradient(subject: Learner) -> dict[str, np.ndarray]:
    """Of the summed loss by the merged weights themselves."""
    graph, state = nnx.split(subject.model())

    def value(state):
        model = nnx.merge(graph, state)
        return sum(PolicyLoss()(score(model, batch), batch).numerator for batch in BATCHES)

    return arrays(jax.jit(jax.grad(value))(state))


def test_only_adapters_are_trained_and_saved():
    subject = learner()
    subject.update(BATCHES)
    saved = subject.state()
    assert set(flat(saved["rest"])) == {"base"}
    sizes = sum(leaf.size for leaf in flat(saved["params"]).values())
    moments = sum(leaf.size for leaf in flat(saved["optimizer"]).values() if leaf.ndim)
    assert sizes == RANK * (8 + 16 + 16 + 11) and moments == 2 * sizes


def test_a_checkpoint_goes_on_bit_equal_and_only_with_its_base():
    first, second, other = learner(), learner(), learner(seed=1)
    first.update(BATCHES)
    saved = jax.tree.map(jnp.copy, first.state())
    first.update(BATCHES)
    second.load(saved, version=1)
    second.update(BATCHES)
    left, right = arrays(first.snapshot()), arrays(second.snapshot())
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])
    with pytest.raises(ValueError, match="weights that the checkpoint's adapters were trained on"):
        other.load(saved, version=1)


def test_adapters_learn():
    subject = learner()
    objective = [subject.update(BATCHES).metrics["loss"] for _ in range(30)]
    assert objective[-1] < objective[0] - 0.05


PARTS = {
    ("attention",): {"layers/1/mixer/" + name for name in ("q", "k", "v", "out")},
    ("gdn",): {"layers/0/mixer/" + name for name in ("qkv", "z", "b", "a", "out")},
    ("mlp",): {f"layers/{i}/mlp/shared/{name}" for i in (0, 1) for name in ("gate", "up", "down")},
    ("experts",): {f"layers/{i}/mlp/{name}" for i in (0, 1) for name in ("gate_up", "down")},
}


@pytest.mark.parametrize("targets", [*PARTS, ("gdn", "experts")])
def test_targets_are_the_matrices_of_their_parts(targets):
    state = nnx.state(nnx.eval_shape(lambda: Transformer(SPEC, rngs=nnx.Rngs(0))))
    chosen = projections(SPEC, targets)
    flat_state: list = list(nnx.to_flat_state(state))  # pyright: ignore[reportArgumentType]
    names = {"/".join(map(str, path)) for path, variable in flat_state if chosen(path, variable)}
    assert names == set().union(*(PARTS[(target,)] for target in targets))


def test_a_dense_layers_mlp_counts_as_one():
    sizes = dict.fromkeys(("num_experts", "experts_per_token", "expert_dim", "shared_expert_dim"))
    spec = replace(SPEC, mlp_dim=8, **sizes)  # pyright: ignore[reportArgumentType]
    assert projections(spec, ("mlp",))(("layers", 0, "mlp", "down"), None)
    assert not projections(spec, ("experts",))(("layers", 0, "mlp", "down"), None)


def test_every_expert_has_an_adapter_of_its_own_and_weights_keep_their_dtype():
    spec = replace(SPEC, dtype="bfloat16")
    state = nnx.state(Transformer(spec, rngs=nnx.Rngs(0)))
    lora = LowRank(rank=2, alpha=4.0, adapts=projections(spec, ("experts", "attention")))
    trained, fixed = lora.split(state)
    assert trained["layers/0/mlp/down"]["A"].shape == (4, 8, 2)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(trained))
    trained = jax.tree.map(lambda leaf: leaf + 0.1, trained)
    merged, base = arrays(lora.merge(trained, fixed)), arrays(state)
    A, B = (np.asarray(trained["layers/0/mlp/down"][each], np.float64) for each in "AB")
    wanted = base["layers/0/mlp/down"].astype(np.float64) + 2 * np.einsum("eir,ero->eio", A, B)
    got = merged["layers/0/mlp/down"]
    assert got.dtype == base["layers/0/mlp/down"].dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=2**-8, atol=1e-6)


def test_a_model_without_such_a_part_is_refused():
    with pytest.raises(ValueError, match="at least one matrix to adapt"):
        LowRank(rank=2, alpha=1.0, adapts=lambda path, value: False).split(nnx.state(tiny_model()))
