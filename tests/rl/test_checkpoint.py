"""Checkpoints: bit-equal, verified, whole or absent."""

import errno
import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.rl import checkpoint as module
from jaxrl.rl.checkpoint import CheckpointStore
from jaxrl.rl.ledger import CheckpointDamagedError

PARAMS = {"layers": [{"w": jnp.arange(12.0).reshape(3, 4)}, {"w": jnp.full((2,), 1.5, jnp.bfloat16)}]}


def state(fill=0.0):
    params = jax.tree.map(lambda leaf: leaf + jnp.asarray(fill, leaf.dtype), PARAMS)
    return {"params": params, "rest": {}, "optimizer": optax.adamw(1e-3).init(params)}


@pytest.fixture
def events():
    return []


@pytest.fixture
def store(tmp_path, events):
    return CheckpointStore(tmp_path / "c", keep=3, report=lambda name, facts: events.append((name, facts)))


def save(store, step, **kwargs):
    store.save(
        state(step), step=step, version=2 * step, progress={"cursor": step, "rows": [1, "a"]}, **kwargs
    )


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_round_trip_is_bit_equal(store):
    save(store, 5)
    got = store.latest(state())
    assert (got.step, got.version, got.progress) == (5, 10, {"cursor": 5, "rows": [1, "a"]})
    assert_equal(got.state, state(5))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got.state))


def test_nan_and_negative_zero_survive(store):
    odd = {"params": {"x": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45])}}
    store.save(odd, step=1, version=1, progress={})
    assert_equal(store.latest(odd).state, odd)


def test_one_part_can_be_read_alone_from_abstract_shapes(store):
    save(store, 1)
    params = state(1)["params"]
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    assert_equal(store.latest({"params": abstract}).state, {"params": params})


def test_empty_store_has_no_latest(store, events):
    assert store.latest(state()) is None and events == []


def test_newest_are_kept(store):
    for step in range(1, 6):
        save(store, step)
    assert [path.name for path in store.paths()] == [f"checkpoint_{s:06d}_step_{s:08d}" for s in (3, 4, 5)]
    assert sorted(p.name for p in store.paths()) == sorted(
        p.name for p in (store.paths()[0].parent).iterdir()
    )


def test_newest_is_the_one_written_last_even_at_a_lower_step(store):
    for step in (10, 4):
        save(store, step)
    assert store.latest(state()).step == 4


def array_file(path: Path) -> Path:
    return max((file for file in path.glob("params/**/d/*")), key=lambda file: file.stat().st_size)


def flip_bits(path: Path):
    file = array_file(path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def edit_ledger(path: Path):
    document = json.loads((path / "ledger.json").read_text())
    document["ledger"]["progress"]["cursor"] = 99
    (path / "ledger.json").write_text(json.dumps(document))


DAMAGES = {
    "bit flip": flip_bits,
    "truncated array": lambda path: array_file(path).write_bytes(array_file(path).read_bytes()[:-7]),
    "no array": lambda path: array_file(path).unlink(),
    "edited ledger": edit_ledger,
    "half ledger": lambda path: (path / "ledger.json").write_text((path / "ledger.json").read_text()[:50]),
    "no ledger": lambda path: (path / "ledger.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_newest_is_skipped_and_reported(store, events, damage):
    for step in (1, 2):
        save(store, step)
    newest = store.paths()[-1]
    damage(newest)
    got = store.latest(state())
    assert got.step == 1
    assert_equal(got.state, state(1))
    [(name, facts)] = events
    assert (name, facts["path"]) == ("checkpoint_skipped", str(newest))
    with pytest.raises(CheckpointDamagedError):
        store.load(newest, state())
    save(store, 2)
    assert store.latest(state()).step == 2


def test_swapped_equal_shapes_are_noticed(store):
    """Arrays that are whole but not those of the ledger."""
    for step in (1, 2):
        save(store, step)
    old, new = store.paths()
    (new / "params").rename(new / "gone")
    (old / "params").rename(new / "params")
    with pytest.raises(CheckpointDamagedError, match="as written"):
        store.load(new, state())


@pytest.mark.parametrize(
    "other",
    [
        {"layers": [{"w": jnp.zeros((3, 4))}]},
        {"layers": [{"w": jnp.zeros((4, 3))}, {"w": jnp.zeros((2,), jnp.bfloat16)}]},
        {"layers": [{"w": jnp.zeros((3, 4))}, {"w": jnp.zeros((2,), jnp.float32)}]},
    ],
    ids=["names", "shape", "dtype"],
)
def test_another_models_checkpoint_is_an_error_and_not_skipped(store, events, other):
    save(store, 1)
    with pytest.raises(ValueError, match="model"):
        store.latest({"params": other})
    assert events == []


def test_failed_write_leaves_the_earlier_ones(store, monkeypatch):
    save(store, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_ledger", full)
    with pytest.raises(OSError, match="No space"):
        save(store, 2)
    monkeypatch.undo()
    assert [path.name[:9] for path in store.paths()[0].parent.iterdir()] == ["checkpoin"]
    assert store.latest(state()).step == 1
    save(store, 3)
    assert store.latest(state()).step == 3


def test_what_is_written_is_verified(store, monkeypatch):
    write = module._write_draft

    def corrupting(draft, parts, files, ledger):
        parts = {
            part: {name: leaf + leaf.dtype.type(1) for name, leaf in leaves.items()}
            for part, leaves in parts.items()
        }
        write(draft, parts, files, ledger)

    monkeypatch.setattr(module, "_write_draft", corrupting)
    with pytest.raises(CheckpointDamagedError, match="as written"):
        save(store, 1)
    assert store.paths() == []


def test_files_come_back_and_are_verified(store, events):
    store.save(state(1), step=1, version=1, progress={}, files={"groups.npz": b"first"})
    store.save(state(2), step=2, version=2, progress={}, files={"groups.npz": b"second"})
    assert store.latest(state(), files=True).files == {"groups.npz": b"second"}
    assert store.latest(state()).files == {}
    (store.paths()[-1] / "files/groups.npz").write_bytes(b"secomd")
    assert store.latest(state(), files=True).files == {"groups.npz": b"first"}
    assert [name for name, _ in events] == ["checkpoint_skipped"]


def test_files_are_read_back_before_a_checkpoint_counts(store, monkeypatch):
    write = module._write_draft

    def corrupting(draft, parts, files, ledger):
        read = module._read_files
        monkeypatch.setattr(module, "_read_files", lambda *_: read(*_) | {"groups.npz": b"other"})
        write(draft, parts, files, ledger)

    monkeypatch.setattr(module, "_write_draft", corrupting)
    with pytest.raises(CheckpointDamagedError, match="files"):
        store.save(state(), step=1, version=1, progress={}, files={"groups.npz": b"first"})
    assert store.paths() == []


def test_background_write_copies_first_and_reports_its_error_later(store, monkeypatch):
    gate, write = threading.Event(), module._write_draft

    def slow(*args):
        gate.wait()
        write(*args)

    monkeypatch.setattr(module, "_write_draft", slow)
    host = {"params": {"x": np.arange(4.0)}}
    store.save(host, step=1, version=1, progress={}, block=False)
    host["params"]["x"][:] = -1
    assert store.paths() == []
    gate.set()
    store.wait()
    np.testing.assert_array_equal(store.latest(host).state["params"]["x"], np.arange(4.0))

    def broken(*_):
        raise OSError("broken disk")

    monkeypatch.setattr(module, "_write_draft", broken)
    store.save(host, step=2, version=2, progress={}, block=False)
    with pytest.raises(OSError, match="broken disk"):
        store.wait()
    store.wait()


def test_checkpoint_being_read_is_not_deleted(store):
    save(store, 1)
    oldest = store.paths()[0]
    with module.reading(oldest):
        for step in range(2, 6):
            save(store, step)
        assert oldest in store.paths()
        store.load(oldest, state())
    save(store, 6)
    assert oldest not in store.paths()


@pytest.mark.parametrize("progress", [{"x": float("nan")}, {"x": (1, 2)}, {1: "x"}, {"x": object()}])
def test_progress_must_be_json(store, progress):
    with pytest.raises((ValueError, TypeError)):
        store.save(state(), step=1, version=1, progress=progress)
    assert store.paths() == []


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep of at least 1"):
        CheckpointStore(tmp_path, keep=0, report=lambda *_: None)
