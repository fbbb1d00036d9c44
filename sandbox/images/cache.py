"""Where built images lie, and how one gets there whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from sandbox.images import intact

_READ, _ENTER = 0o444, 0o111


class ImageBuildError(RuntimeError):
    """An image could not be built; the message says what is missing and what to do."""


def cache_directory(kind: str) -> Path:
    """`$JAXRL_CACHE/kind`, else `$XDG_CACHE_HOME/jaxrl/kind`, else `~/.cache/jaxrl/kind`; made if missing.

    Root's own home is closed to the unprivileged user of sandboxes: root's default is /var/cache/jaxrl.
    Raises `ImageBuildError` if it cannot be made.
    """
    if chosen := os.environ.get("JAXRL_CACHE"):
        top = Path(chosen).absolute()
    elif os.geteuid() == 0:
        top = Path("/var/cache/jaxrl")
    else:
        top = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl"
    folder = top / kind
    _made(folder)
    return folder


def _made(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ImageBuildError:
    return ImageBuildError(
        f"{folder}: expected a folder that can be written, got {error.strerror}; set JAXRL_CACHE to one"
    )


def built(place: Path, build: Callable[[Path], None], *, recorded: bool = False) -> Path:
    """`place`, made by `build` in a folder beside it unless it exists; others see it only when whole.

    Every file of it becomes readable by all and writable by none but its owner. With `recorded` its digest
    is kept beside it, and one that was changed since is refused. Raises `ImageBuildError` for that, or if
    the folder around it cannot be written, and what `build` raises.
    """
    if place.exists():
        if recorded and (problem := intact.damage(place)):
            raise ImageBuildError(f"{place}: {problem}; delete this folder, and it is made anew")
        return place
    _made(place.parent)
    try:
        making = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    except OSError as error:
        raise _unwritable(place.parent, error) from error
    try:
        build(making)
        _open_to_all(making)
        if recorded:
            intact.write_record(making, place)
        _publish(making, place)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return place


def _publish(making: Path, place: Path) -> None:
    try:
        making.rename(place)
    except OSError:
        if not place.exists():  # somebody else was faster: theirs has the same content
            raise


def _open_to_all(top: Path) -> None:
    top.chmod(0o755)
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            path = Path(folder, name)
            if not path.is_symlink():
                mode = path.stat().st_mode & 0o777
                path.chmod((mode | _READ | (_ENTER if mode & 0o111 else 0)) & ~0o022)
