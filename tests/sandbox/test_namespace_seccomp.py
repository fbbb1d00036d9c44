"""The system call filter: what it refuses, and that real programs do not notice it."""

import asyncio
import shutil
import sys
from collections.abc import Awaitable, Callable

import pytest

from sandbox.base import Limits, SandboxError
from sandbox.namespace import NamespaceProvider, NamespaceSandbox
from sandbox.seccomp import filter_program

LIMITS = Limits(memory=1 << 30, pids=64, disk=32 << 20)
Body = Callable[[NamespaceSandbox], Awaitable[None]]

PROBE = r"""
import ctypes, errno, platform, sys
X86 = platform.machine() == "x86_64"
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments))
    return errno.errorcode[ctypes.get_errno()] if result < 0 else "ok"
numbers = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442),
    "statmount": (457, 457), "keyctl": (250, 219), "add_key": (248, 217), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "init_module": (175, 105),
    "kexec_load": (246, 104), "open_by_handle_at": (304, 265), "setns": (308, 268),
    "unshare": (272, 97), "clone3": (435, 435), "io_uring_setup": (425, 425), "ptrace": (101, 117),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "process_vm_readv": (310, 270),
}
for name, pair in numbers.items():
    print(name, call(pair[0 if X86 else 1], 0, 0, 0, 0, 0, 0))
clone, socket = (56, 41) if X86 else (220, 198)
for flag in (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30):
    print("clone", call(clone, flag | 17 | 1 << 40, 0, 0, 0, 0))
for family in (0, 3, 16, 17, 38, 40, 16 | 1 << 32, 17 | 1 << 40, 1 | 1 << 33):
    print("socket", call(socket, family, 3, 0))
print("personality", call(135 if X86 else 92, 0x0400000))
print("tiocsti", call(16 if X86 else 29, 0, 0x5412 | 1 << 32, 0))
if X86:
    print("x32", call(0x40000000 + 39))
"""


def within(body: Body, *, cgroups: bool = True) -> None:
    async def session() -> None:
        backend = NamespaceProvider(cgroups=cgroups)
        try:
            await body(await backend.create({"probe.py": PROBE.encode()}, LIMITS))
        finally:
            await backend.close()

    asyncio.run(session())


def expected(name: str) -> str:
    missing = ("clone3", "io_uring_setup", "memfd_secret", "memfd_create", "vmsplice")
    return "ENOSYS" if name in missing else "EAFNOSUPPORT" if name == "socket" else "EPERM"


def test_refused_calls() -> None:
    allowed = {"ptrace", "shmget", "semget", "msgget", "process_vm_readv", "memfd_create", "vmsplice"}

    unfit = {"EFAULT", "EBADF"}  # what they say to zeros

    async def body(sandbox: NamespaceSandbox) -> None:
        result = await sandbox.exec("grep Seccomp: /proc/self/status; python3 probe.py", 20)
        mode, *lines = result.output.splitlines()
        assert mode.split() == ["Seccomp:", "2"] and len(lines) > 40
        for line in lines:
            name, outcome = line.split()
            if name not in allowed:
                assert outcome == expected(name), line
        outcomes = dict(line.split() for line in lines)
        assert {outcomes[name] for name in allowed} <= {"ok", "EINVAL", "ENOENT", "ENOSYS", *unfit}, outcomes

    within(body)


def test_watched_sandboxes_have_no_memory_that_outlives_its_mappings() -> None:
    async def body(sandbox: NamespaceSandbox) -> None:
        lines = (await sandbox.exec("python3 probe.py", 20)).output.splitlines()
        outcomes = dict(line.split() for line in lines)
        for name in ("shmget", "semget", "msgget", "memfd_create", "vmsplice"):
            assert outcomes[name] == "ENOSYS", (name, outcomes)

    within(body, cgroups=False)


def test_graders_refuse_what_would_outlive_a_grading() -> None:
    async def session() -> None:
        backend = NamespaceProvider()
        try:
            program = [backend.python.executable, "-c", PROBE]
            launched = await backend.launch(program, LIMITS, scratch=False)
            said = b""
            while piece := await launched.pipes.read():
                said += piece
            for line in said.decode().splitlines():
                name, outcome = line.split()
                assert outcome == expected(name), line
            assert "shmget EPERM" in said.decode()
            await launched.destroy()
            launched.pipes.close()
        finally:
            await backend.close()

    asyncio.run(session())


def test_a_32_bit_call_is_refused() -> None:
    code = (
        b"#include <errno.h>\n#include <stdio.h>\n#include <string.h>\n"
        b'int main(void) { long r; __asm__ volatile ("int $0x80" : "=a"(r) : "a"(20)); '
        b'printf("%s\\n", r < 0 ? strerror(-r) : "ran"); return 0; }\n'
    )

    async def body(sandbox: NamespaceSandbox) -> None:
        await sandbox.write("a.c", code)
        if (await sandbox.exec("test $(uname -m) = x86_64", 10)).exit_code == 0:
            result = await sandbox.exec("gcc -o /tmp/a a.c && /tmp/a", 60)
            assert result.output == "Operation not permitted\n"

    if shutil.which("gcc"):
        within(body)


WORK = {
    "threads": "import threading\nt = [threading.Thread(target=print, args=(i,)) for i in range(8)]\n"
    "for x in t: x.start()\nfor x in t: x.join()\n",
    "processes": "import multiprocessing as m\ndef f(x): return x * x\n"
    "if __name__ == '__main__':\n    for kind in ('fork', 'spawn', 'forkserver'):\n"
    "        with m.get_context(kind).Pool(2) as p: assert p.map(f, range(4)) == [0, 1, 4, 9]\n",
    "shared memory": "from multiprocessing import shared_memory as s, Lock\nwith Lock():\n"
    "    m = s.SharedMemory(create=True, size=1000)\n    m.buf[0] = 7\n    m.close()\n    m.unlink()\n",
    "shared values": "import multiprocessing as m\nwith m.Manager() as manager:\n"
    "    v, q, d = m.Value('i', 1), m.Queue(), manager.dict()\n"
    "    def work(): v.value += 1; q.put(v.value); d[1] = 2\n"
    "    p = m.Process(target=work); p.start(); assert q.get() == 2; p.join(); assert d[1] == v.value == 2\n",
    "mapped files": "import mmap, tempfile\nwith tempfile.TemporaryFile() as f:\n"
    "    f.truncate(1 << 20)\n    with mmap.mmap(f.fileno(), 0) as m: m[5:8] = b'abc'\n"
    "    f.seek(5)\n    assert f.read(3) == b'abc'\n"
    "assert open('/dev/zero', 'rb').read(9) == bytes(9)\n",
    "sockets": "import socket, asyncio\nasync def main():\n"
    "    async def echo(r, w):\n        w.write(await r.read(3)); await w.drain(); w.close()\n"
    "    s = await asyncio.start_server(echo, '127.0.0.1', 0)\n"
    "    r, w = await asyncio.open_connection(*s.sockets[0].getsockname())\n"
    "    w.write(b'abc'); assert await r.read() == b'abc'; w.close(); s.close()\n"
    "asyncio.run(main())\nsocket.socketpair(); socket.socket(socket.AF_INET6).bind(('::1', 0))\n",
    "subprocess": "import subprocess, os, pty\nassert subprocess.run(['true']).returncode == 0\n"
    "assert pty.spawn(['true'], lambda fd: os.read(fd, 100)) == 0\n",
}


@pytest.mark.parametrize("cgroups", [True, False], ids=["cgroups", "watchdog"])
@pytest.mark.parametrize("name", WORK)
def test_python_programs_work(name: str, cgroups: bool) -> None:
    async def body(sandbox: NamespaceSandbox) -> None:
        await sandbox.write("work.py", WORK[name].encode())
        result = await sandbox.exec("python3 work.py", 60)
        assert result.exit_code == 0, result.output

    within(body, cgroups=cgroups)


@pytest.mark.parametrize("cgroups", [True, False], ids=["cgroups", "watchdog"])
def test_tools_work(cgroups: bool) -> None:
    async def body(sandbox: NamespaceSandbox) -> None:
        for command in (
            "git init -q . && git add probe.py",
            "git -c user.name=a -c user.email=a@b commit -qm x && git gc -q && git fsck",
            "echo 'int main(void){return 7;}' > a.c && gcc -O2 -g a.c -o a; ./a; test $? = 7",
            "python3 -m venv --without-pip v && v/bin/python -c 'import json'",
            "tar cf t.tar a.c && xz -k t.tar && find . -name '*.xz' | xargs sha256sum",
        ):
            result = await sandbox.exec(command, 60)
            assert result.exit_code == 0, result.output

    within(body, cgroups=cgroups)


def test_missing_library_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(SandboxError, match="install libseccomp2"):
        filter_program.__wrapped__("strict")
