"""Mounts squashfs archives as root: by the kernel through a loop device, or by squashfuse."""

import errno
import fcntl
import os
import signal
import struct
import subprocess
import time
from collections.abc import Sequence

from sandbox.keeper import mounts

_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_READ_ONLY, _AUTOCLEAR = 1, 4  # the device is free again when its last mount ends
_CONFIG = struct.Struct("=II 3Q QQ IIII 64s 64s 32s 2Q 8Q")  # struct loop_config
_TRIES, _PATIENCE = 20, 10.0
_FLAGS = mounts.NO_SUID | mounts.NO_DEVICES | mounts.READ_ONLY


def mount_archive(path: str, target: str, *, offset: int, squashfuse: str | None) -> int:
    """Mounts the squashfs at byte `offset` of a file. Returns the process id of squashfuse, or 0.

    The kernel's own is preferred: only there the owner of the files can be mapped. Raises `OSError`.
    """
    try:
        _by_kernel(path, target, offset)
        return 0
    except OSError as error:
        if squashfuse is None:
            raise OSError(
                error.errno, f"the kernel cannot mount it ({error.strerror}) and there is no squashfuse"
            ) from error
    return _by_program([squashfuse, "-f", "-o", f"ro,allow_other,offset={offset}", path, target], target)


def _by_kernel(path: str, target: str, offset: int) -> None:
    archive = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        device, name = _loop(archive, offset)
    finally:
        os.close(archive)
    try:
        mounts.mount(name, target, "squashfs", flags=_FLAGS)
    finally:
        os.close(device)


def _loop(archive: int, offset: int) -> tuple[int, str]:
    """A loop device on the archive: its descriptor and path."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):  # somebody else may take the free one first
            name = f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}"
            device = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                flags = _READ_ONLY | _AUTOCLEAR
                numbers = (archive, 0, 0, 0, 0, offset, 0, 0, 0, 0, flags, b"", b"", b"", 0, 0, *([0] * 8))
                fcntl.ioctl(device, _CONFIGURE, _CONFIG.pack(*numbers))
                return device, name
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:
                    raise
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no loop device is free")


def _by_program(command: Sequence[str], target: str) -> int:
    before, deadline = os.stat(target).st_dev, time.monotonic() + _PATIENCE
    program = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while os.stat(target).st_dev == before:
        if program.poll() is not None or time.monotonic() > deadline:
            program.kill()
            said = program.communicate()[1].strip()
            raise OSError(errno.EIO, f"squashfuse did not mount it: {said or 'no answer'}")
        time.sleep(0.002)
    assert program.stderr is not None
    program.stderr.close()
    pid, program.returncode = program.pid, 0  # from now on it is known by its number alone
    return pid


def end_program(pid: int) -> None:
    """Ends a squashfuse; its mounts answer with errors from then on."""
    os.kill(pid, signal.SIGTERM)
    os.waitpid(pid, 0)
