"""Whether a built folder still holds what was put into it."""

import hashlib
import os
from pathlib import Path

# Objects and index of a repository differ between equal ones (times, packing), and git checks the former
# itself; its branches are looked at.
_UNCHECKED = (".git/objects/", ".git/index")
_seen: dict[Path, str] = {}  # checked by this process


def write_record(made: Path, place: Path) -> None:
    """Notes beside `place` what `made`, which is to become it, holds."""
    record = _record(place)
    beside = record.with_name(f".{record.name}.{os.getpid()}")
    beside.write_text(_digest(made) + "\n")
    beside.replace(record)


def damage(place: Path) -> str | None:
    """How a folder is not as it was made, or None. Each is read once by a process."""
    try:
        wanted = _record(place).read_text().strip()
    except OSError as error:
        return f"expected the digest of its content beside it in {_record(place).name}, got {error.strerror}"
    if place not in _seen:
        _seen[place] = _digest(place)
    if _seen[place] != wanted:
        return f"expected content of digest {wanted[:12]}, got {_seen[place][:12]}: it was changed"
    return None


def _record(place: Path) -> Path:
    return place.with_name(f"{place.name}.sha256")


def _digest(top: Path) -> str:
    """Of names, kinds, executable bits and contents."""
    whole = hashlib.sha256()
    for folder, folders, files in os.walk(top):
        folders.sort()
        for name in sorted([*files, *(each for each in folders if Path(folder, each).is_symlink())]):
            path = Path(folder, name)
            relative = path.relative_to(top).as_posix()
            if not relative.startswith(_UNCHECKED):
                whole.update(f"{relative}\0{_content(path)}\0".encode())
    return whole.hexdigest()


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"link {os.readlink(path)}"
    with path.open("rb") as file:
        kind = "program" if path.stat().st_mode & 0o100 else "file"
        return f"{kind} {hashlib.file_digest(file, 'sha256').hexdigest()}"
