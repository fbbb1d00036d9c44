"""The JSON file of a checkpoint: its step, the trainer's progress, and a digest of each array."""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
LEDGER = "ledger.json"


class CheckpointDamagedError(RuntimeError):
    """A checkpoint is incomplete, or differs from what was written."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """`arrays` maps part/name to shape, dtype and SHA-256; `progress` is the trainer's."""

    step: int
    version: int
    progress: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    schema: int = SCHEMA


def write_ledger(folder: Path, ledger: Ledger) -> None:
    """Writes the file with a digest of itself.

    Raises:
        ValueError or TypeError: `progress` holds something that is not a JSON value.
    """
    body = asdict(ledger)
    text = json.dumps({"ledger": body, "sha256": _digest(body)}, allow_nan=False, indent=1)
    if json.loads(text)["ledger"] != body:
        raise ValueError("expected progress of JSON values with string keys and lists, got others")
    (folder / LEDGER).write_text(text)


def read_ledger(folder: Path) -> Ledger:
    """Reads the file and compares its digest.

    Raises:
        CheckpointDamagedError: it is missing, damaged, or of another schema.
    """
    try:
        document = json.loads((folder / LEDGER).read_text())
        body, digest = document["ledger"], document["sha256"]
        if digest != _digest(body):
            raise CheckpointDamagedError(
                f"expected {folder / LEDGER} with digest {digest}, got {_digest(body)}"
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamagedError(f"cannot read {folder / LEDGER}: {error!r}") from error
    if body.get("schema") != SCHEMA:
        raise CheckpointDamagedError(
            f"expected schema {SCHEMA} in {folder / LEDGER}, got {body.get('schema')}"
        )
    return Ledger(**body)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Keeps a checkpoint from being deleted meanwhile.

    Raises:
        CheckpointDamagedError: there is none.
    """
    try:
        file = (folder / LEDGER).open()
    except OSError as error:
        raise CheckpointDamagedError(f"cannot open {folder / LEDGER}: {error}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        if not folder.exists():
            raise CheckpointDamagedError(f"{folder} was deleted as too old just now")
        yield


@contextmanager
def deleting(folder: Path) -> Iterator[bool]:
    """Yields whether no process reads this checkpoint; if so, none starts to before the end."""
    try:
        file = (folder / LEDGER).open()
    except FileNotFoundError:
        yield True  # without a ledger nobody can be reading it
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()
