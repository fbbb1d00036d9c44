"""The JSON file of a checkpoint: its step, the trainer's progress, digests of arrays and files."""

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
    """`progress` is the trainer's; `arrays` maps part/name to shape, dtype and SHA-256 of the array.

    `files` maps each other file's path within the checkpoint to its SHA-256.
    """

    step: int
    version: int
    progress: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    files: dict[str, str]
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


def file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file under `folder` but the ledger, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LEDGER)
    return {str(path.relative_to(folder)): _file_digest(path) for path in files}


def check_files(folder: Path, ledger: Ledger, *, part: str) -> None:
    """Compares the files of one part with the ledger.

    Raises:
        CheckpointDamagedError: one is missing or differs.
    """
    for name, digest in ledger.files.items():
        if not name.startswith(f"{part}/"):
            continue
        try:
            found = _file_digest(folder / name)
        except OSError as error:
            raise CheckpointDamagedError(f"cannot read {folder / name}: {error}") from error
        if found != digest:
            raise CheckpointDamagedError(f"expected {folder / name} as written, got other bytes")


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


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
