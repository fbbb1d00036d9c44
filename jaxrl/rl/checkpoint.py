"""Checkpoints of a training run: complete or absent, verified when written and when read.

    root/checkpoint_000007_step_00000042/ledger.json    what it holds, with a digest of each array
                                         <part>/        one Orbax tree per part of the state
                                         files/         what else the trainer keeps, as it gave it

A checkpoint is written beside its final name and renamed at the end, so a process killed at any
moment leaves the earlier ones as they were. The first number counts checkpoints: the newest is
the one with the highest, whatever its step, since a run may go on from an older step.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl.rl.ledger import (
    CheckpointDamagedError,
    Ledger,
    check_files,
    deleting,
    file_digests,
    read_ledger,
    reading,
    write_ledger,
)
from jaxrl.rl.trees import describe, flat, host_copy, unflat

_NAME = re.compile(r"checkpoint_(\d{6,})_step_(\d{8,})")
_FILES = "files"

type Report = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint as read back. `progress` and `files` are what the trainer stored beside the arrays."""

    path: Path
    step: int
    version: int
    state: dict[str, Any]
    progress: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)


class CheckpointStore:
    """The checkpoints of one run, for one writing process and any number of readers.

    Args:
        root: folder of the checkpoints; made when first written.
        keep: how many of the newest to keep, None for all. One that is being read is kept longer.
        report: called with an event's name and facts, such as `checkpoint_skipped`.
    """

    def __init__(self, root: str | Path, *, keep: int | None = 3, report: Report) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"expected keep of at least 1 or None, got {keep}")
        self._root = Path(root).absolute()
        self._keep = keep
        self._report = report
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        version: int,
        progress: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
        block: bool = True,
    ) -> None:
        """Writes, reads back and compares, then renames; afterwards deletes what is too old.

        Args:
            state: trees of arrays by name of the part; copied before this returns.
            progress: JSON values: cursor, seeds, attempt.
            files: contents by name, for what is neither an array nor small: finished work.
            block: wait for the result. Otherwise it is written in the background; `wait` and the
                next `save` raise what went wrong.

        Raises:
            OSError: the disk is full or the like; earlier checkpoints are untouched.
            CheckpointDamagedError: what was read back differs from what was written.
        """
        self.wait()
        parts = {part: leaves for part, tree in state.items() if (leaves := host_copy(tree))}
        arrays = {
            f"{part}/{name}": describe(leaf)
            for part, leaves in parts.items()
            for name, leaf in leaves.items()
        }
        ledger = Ledger(step=step, version=version, progress=dict(progress), arrays=arrays, files={})
        self._pending = self._writer.submit(self._write, parts, dict(files or {}), ledger)
        if block:
            self.wait()

    def wait(self) -> None:
        """Waits for a write in the background and raises its error, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def paths(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = [path for path in self._root.glob("checkpoint_*") if _NAME.fullmatch(path.name)]
        return sorted(found, key=_serial)

    def latest(self, like: Mapping[str, Any], *, files: bool = False) -> Restored | None:
        """The newest checkpoint that is undamaged, or None. Each one skipped is reported. See `load`."""
        for path in reversed(self.paths()):
            try:
                return self.load(path, like, files=files)
            except CheckpointDamagedError as error:
                self._report("checkpoint_skipped", {"path": str(path), "reason": str(error)})
        return None

    def load(self, path: str | Path, like: Mapping[str, Any], *, files: bool = False) -> Restored:
        """Reads one checkpoint and verifies every array.

        Args:
            like: trees by part that say what to read: arrays, or `jax.ShapeDtypeStruct` with a
                sharding. Parts that are left out are not read.
            files: read and verify the files too.

        Raises:
            CheckpointDamagedError: a file is missing or differs from what was written.
            ValueError: it is another model's, that is, names, shapes or dtypes are not `like`'s.
        """
        path = Path(path).absolute()
        with reading(path):
            ledger = read_ledger(path)
            state = {part: _load_part(path, part, tree, ledger) for part, tree in like.items()}
            kept = _read_files(path, ledger) if files else {}
        return Restored(
            path=path,
            step=ledger.step,
            version=ledger.version,
            state=state,
            progress=ledger.progress,
            files=kept,
        )

    def _write(
        self, parts: Mapping[str, Mapping[str, np.ndarray]], files: Mapping[str, bytes], ledger: Ledger
    ) -> Path:
        self._root.mkdir(parents=True, exist_ok=True)
        for abandoned in self._root.glob("writing_*"):
            shutil.rmtree(abandoned)
        serial = max((_serial(path) for path in self.paths()), default=0) + 1
        draft = self._root / f"writing_{serial:06d}"
        final = self._root / f"checkpoint_{serial:06d}_step_{ledger.step:08d}"
        try:
            _write_draft(draft, parts, files, ledger)
            draft.rename(final)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        _sync(self._root)
        self._prune()
        return final

    def _prune(self) -> None:
        """Renames before it deletes, so that a half-deleted checkpoint is never taken for one."""
        if self._keep is None:
            return
        for path in self.paths()[: -self._keep]:
            with deleting(path) as free:
                if free:
                    shutil.rmtree(path.rename(self._root / f"writing_deleted_{path.name}"))


def _serial(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def _write_draft(
    draft: Path, parts: Mapping[str, Mapping[str, np.ndarray]], files: Mapping[str, bytes], ledger: Ledger
) -> None:
    (draft / _FILES).mkdir(parents=True)
    for name, content in files.items():
        (draft / _FILES / name).write_bytes(content)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            for part, leaves in parts.items():
                checkpointer.save(draft / part, dict(leaves))
                checkpointer.wait_until_finished()
    except ValueError as error:  # how Orbax passes on what TensorStore says of a full disk
        raise OSError(f"cannot write {draft}: {error}") from error
    ledger = replace(ledger, files=file_digests(draft))
    write_ledger(draft, ledger)
    for part, leaves in parts.items():
        _read_part(draft, part, leaves, ledger)
    if _read_files(draft, ledger) != files:
        raise CheckpointDamagedError(f"expected the files of {draft} as written, got other bytes")
    for folder, _, names in os.walk(draft):
        for name in (*names, "."):
            _sync(Path(folder, name))


def _sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _load_part(path: Path, part: str, tree: Any, ledger: Ledger) -> Any:
    wanted = flat(tree)
    _check_same_model(path, part, wanted, ledger)
    leaves = _read_part(path, part, wanted, ledger) if wanted else {}
    placed = {name: _placed(leaves[name], wanted[name]) for name in wanted}
    return unflat(placed, like=tree)


def _check_same_model(path: Path, part: str, wanted: Mapping[str, Any], ledger: Ledger) -> None:
    held = {
        name.removeprefix(f"{part}/"): array
        for name, array in ledger.arrays.items()
        if name.startswith(f"{part}/")
    }
    if held.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - held.keys())[:3], sorted(held.keys() - wanted.keys())[:3]
        raise ValueError(
            f"expected the arrays of this model in part {part} of {path}, but it lacks {missing} and has "
            f"{extra} besides: use the model and optimizer it was made with"
        )
    for name, leaf in wanted.items():
        expected, got = (list(leaf.shape), str(leaf.dtype)), (held[name]["shape"], held[name]["dtype"])
        if expected != got:
            raise ValueError(
                f"expected {part}/{name} of {path} to have shape and dtype {expected}, got {got}: use the "
                "model it was made with"
            )


def _read_part(path: Path, part: str, wanted: Mapping[str, Any], ledger: Ledger) -> dict[str, np.ndarray]:
    """Arrays by name as NumPy, each compared with its digest.

    Files are compared first: Orbax, given a damaged one, may leave work behind that fails later.
    """
    check_files(path, ledger, part=part)
    hollow = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            leaves = checkpointer.restore(path / part, hollow)
    except Exception as error:  # a damaged file makes Orbax raise nearly anything
        raise CheckpointDamagedError(f"cannot read part {part} of {path}: {error}") from error
    for name, leaf in leaves.items():
        if describe(np.asarray(leaf)) != ledger.arrays[f"{part}/{name}"]:
            raise CheckpointDamagedError(
                f"expected the array {part}/{name} of {path} as written, got other bytes"
            )
    return leaves


def _read_files(path: Path, ledger: Ledger) -> dict[str, bytes]:
    check_files(path, ledger, part=_FILES)
    names = [name for name in ledger.files if name.startswith(f"{_FILES}/")]
    return {name.removeprefix(f"{_FILES}/"): (path / name).read_bytes() for name in names}


def _placed(leaf: np.ndarray, like: Any) -> Any:
    sharding = getattr(like, "sharding", None)
    return jax.device_put(leaf, sharding) if sharding is not None else leaf
