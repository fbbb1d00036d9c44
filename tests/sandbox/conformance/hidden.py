"""Cases: memory and files that a limit may overlook, because no process or no size tells of them."""

import re

from sandbox.base import Limits

from .core import LIMITS, Stage, case, run, say
from .terminals import until

_PIECE, _PIECES = 16, 32  # MiB, and how many of them: four times the memory of a sandbox
_ATTACKS = """
import ctypes, os, socket, sys, time

PIECE, PIECES = {piece} << 20, {pieces}
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.shmat.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.shmdt.argtypes = [ctypes.c_void_p]
kept = []

def check(result):
    if result in (-1, None, 2**64 - 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def mapped(fd, flags):  # all but one page is unmapped, and yet all of it stays
    place = check(libc.mmap(None, PIECE, 3, flags, fd, 0))
    libc.memset(place, 1, PIECE)
    libc.munmap(place + 4096, PIECE - 4096)

def memfd():
    for _ in range(4):  # a file of its own may have as many bytes as the disk
        kept.append(os.memfd_create("x"))
        for _ in range(4):
            os.write(kept[-1], bytes(PIECE // 16))

def system_v():
    name = check(libc.shmget(0, PIECE, 0o1600))
    place = check(libc.shmat(name, None, 0))
    libc.memset(place, 1, PIECE)
    libc.shmdt(place)

def anonymous():
    mapped(-1, 0x21)

def zeros():
    mapped(os.open("/dev/zero", os.O_RDWR), 0x01)

def zeros_checked():
    mapped(os.open("/dev/zero", os.O_RDWR), 0x03)

def sockets():
    sent = 0
    while sent < PIECE:
        kept.append(socket.socketpair())
        for end in kept[-1]:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            end.setblocking(False)
            try:
                while True:
                    sent += end.send(bytes(32768))
            except BlockingIOError:
                pass

attack, held = globals()[sys.argv[1]], 0
try:
    for held in range(PIECES):
        attack()
        time.sleep(0.02)
    time.sleep(1)
    print("held everything")
except OSError as error:
    print("refused after", held, error)
"""
_NAMES = ("memfd", "system_v", "anonymous", "zeros", "zeros_checked", "sockets")
_EMPTY = """
import os, sys
count = 0
try:
    for count in range(200_000):
        os.close(os.open(f"{sys.argv[1]}/e{count}", os.O_CREAT | os.O_WRONLY))
except OSError as error:
    print(count, error.strerror)
"""


@case("hidden memory")
async def memory_that_no_process_shows(stage: Stage) -> None:
    limits = Limits(memory=128 << 20, pids=24, disk=8 << 20, output=4096)
    script = _ATTACKS.format(piece=_PIECE, pieces=_PIECES)
    box = await stage.create({"attack.py": script.encode()}, limits=limits)
    for name in _NAMES:
        result = await run(box, f"python3 attack.py {name}", 60)
        killed = result.exit_code == 137 and result.oom
        assert killed or result.output.startswith("refused after 0 "), (name, result)
        assert await say(box, "echo fine") == "fine\n"


@case("hidden memory", "terminal")
async def memory_of_a_terminal(stage: Stage) -> None:
    box = await stage.create()
    terminal = await box.terminal()
    hog = "x = b'1' * (600 << 20); import time; time.sleep(3); print('sur' + 'vived')"
    await terminal.send(f'python3 -c "{hog}"; echo en""ded\n'.encode())
    assert b"survived" not in await until(terminal, b"ended\r\n", 30)
    await terminal.close()


@case("number of files")
async def empty_files_are_limited_too(stage: Stage) -> None:
    box = await stage.create({"empty.py": _EMPTY.encode()})
    for folder in (".", "/tmp", "/dev/shm"):
        said = await say(box, f"python3 empty.py {folder}")
        match = re.fullmatch(r"(\d+) No space left on device\n", said)
        assert match and int(match[1]) < LIMITS.disk // 1024 + 64, said
        await run(box, f"find {folder} -maxdepth 1 -name 'e[0-9]*' -delete")
        assert await say(box, f"echo x > {folder}/x; cat {folder}/x") == "x\n"
