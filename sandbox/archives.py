"""Images that are squashfs or SIF files: mounted where that is possible, else unpacked once."""

import asyncio
import shutil
from pathlib import Path

from sandbox.base import SandboxError
from sandbox.images.environment import ImageBuildError
from sandbox.images.unpack import unpack
from sandbox.keeper.client import KeeperClient
from sandbox.sif import is_sif, open_partition


async def show(keeper: KeeperClient, path: str, owned: bool) -> str:
    """Where the keeper sees a directory of the host, or what is in a file.

    Root mounts a file by the kernel or by squashfuse, in a mount namespace of its own; for a plain
    user it is unpacked into the cache. Raises `OSError`, or `SandboxError` with every way that failed.
    """
    file = Path(path)
    if not file.is_file():
        return await keeper.share(path, owned=owned)
    offset = open_partition(file)[0] if is_sif(file) else 0
    try:
        program = shutil.which("squashfuse")
        return await keeper.open_archive(path, offset=offset, squashfuse=program)
    except OSError as refused:
        try:
            folder = await asyncio.to_thread(unpack, file)
        except ImageBuildError as error:
            raise SandboxError(
                f"image: {path} cannot be mounted ({refused}) nor unpacked ({error})"
            ) from error
    return await keeper.share(str(folder), owned=owned)
