"""The files of a squashfs image as a directory, for those who can neither mount it nor have squashfuse."""

import hashlib
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sandbox.images.cache import built, cache_directory
from sandbox.images.environment import ImageBuildError
from sandbox.sif import is_sif, open_partition

_MAGIC = b"hsqs"
_WHAT_TO_DO = (
    "expected a way to read squashfs: install squashfs-tools (unsquashfs), or squashfuse to mount the image "
    "instead of unpacking it, or the package PySquashfsImage with pip"
)


def unpack(image: Path) -> Path:
    """Directory with the files of a squashfs, or of the one in a SIF file; cached by content.

    Raises `ImageBuildError` if there is no squashfs, or nothing here that can read one, `SandboxError` for
    a SIF file without a root for this machine.
    """
    try:
        offset = open_partition(image)[0] if is_sif(image) else 0
        with image.open("rb") as file:
            file.seek(offset)
            magic = file.read(4)
            file.seek(0)
            address = hashlib.file_digest(file, "sha256").hexdigest()[:20]
    except OSError as error:
        raise ImageBuildError(
            f"{image}: expected a squashfs or SIF file: {error.strerror or error}"
        ) from error
    if magic != _MAGIC:
        raise ImageBuildError(f"{image}: expected a squashfs at byte {offset}, got {magic!r}")

    def build(top: Path) -> None:
        if program := shutil.which("unsquashfs"):
            _by_program(program, image, offset, top / "root")
        elif find_spec("PySquashfsImage") is not None:
            _by_package(image, offset, top / "root")
        else:
            raise ImageBuildError(f"{image}: {_WHAT_TO_DO}")

    return built(cache_directory("unpacked") / f"{address}-{offset}", build) / "root"


def _by_program(program: str, image: Path, offset: int, target: Path) -> None:
    options = ["-quiet", "-no-progress", "-no-xattrs", "-offset", str(offset), "-dest", str(target)]
    done = subprocess.run([program, *options, str(image)], capture_output=True, text=True)
    if done.returncode:
        raise ImageBuildError(
            f"{image}: unsquashfs ended with {done.returncode}: {done.stderr.strip()[-500:]}"
        )


def _by_package(image: Path, offset: int, target: Path) -> None:
    """Files, folders and links; devices and the like are left out, since sandboxes have their own."""
    from PySquashfsImage import SquashFsImage  # only where it is installed  # type: ignore[import-not-found]

    with SquashFsImage.from_file(str(image), offset=offset) as opened:
        entry: Any
        for entry in opened:
            if ".." in entry.path.split("/"):
                raise ImageBuildError(f"{image}: expected paths inside the image, got {entry.path!r}")
            place = target / entry.path.lstrip("/")
            if entry.is_dir:
                place.mkdir(parents=True, exist_ok=True)
            elif entry.is_symlink:
                place.symlink_to(entry.readlink())
            elif entry.is_file:
                place.write_bytes(entry.read_bytes())
                place.chmod(entry.mode & 0o777)
