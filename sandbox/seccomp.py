"""The system calls that sandboxes may not make: a filter, as BPF instructions of this architecture.

It takes away what would reach far into the kernel, as container engines do: mounts, keys, kernel
modules, BPF, new namespaces, rare kinds of sockets. None of it worked without privileges, but each is
code that could be attacked. Every call through another ABI (32-bit, x32) is refused as well.
"""

import errno
import tempfile
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Literal

from sandbox.base import SandboxError

Kind = Literal["usual", "strict", "watched"]
KINDS: tuple[Kind, ...] = ("usual", "strict", "watched")

_REFUSED = (
    *("mount", "umount", "umount2", "pivot_root", "chroot", "fsopen", "fsconfig", "fsmount", "fspick"),
    *("move_mount", "open_tree", "mount_setattr", "open_tree_attr", "statmount", "listmount"),
    *("add_key", "request_key", "keyctl", "bpf", "perf_event_open", "userfaultfd", "fanotify_init"),
    *("init_module", "finit_module", "delete_module", "create_module", "get_kernel_syms", "query_module"),
    *("kexec_load", "kexec_file_load", "reboot", "syslog", "acct", "swapon", "swapoff", "lookup_dcookie"),
    *("setns", "unshare", "open_by_handle_at", "quotactl", "quotactl_fd", "nfsservctl", "vhangup"),
    *("iopl", "ioperm", "uselib", "ustat", "sysfs", "_sysctl", "vm86", "vm86old", "modify_ldt", "kcmp"),
    *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "stime", "sethostname"),
    *("setdomainname", "move_pages", "migrate_pages", "mbind", "set_mempolicy", "get_mempolicy"),
)
# Programs are prepared for kernels that lack these, and then do without.
_MISSING = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_secret")
# Memory that outlives its last mapping, so that no look at processes finds all of it: a descriptor keeps
# it, one that is on its way through a socket, too, a pipe, or nothing at all.
_HIDDEN_MEMORY = ("memfd_create", "vmsplice")
_HIDDEN_OBJECTS = ("shmget", "semget", "msgget")
# Looking into another process, and objects that no process owns: they would outlive a grading.
_REFUSED_STRICTLY = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "process_madvise"),
    *("shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd"),
    *("msgrcv", "msgctl", "mq_open", "mq_unlink"),
)
# The same on every architecture; an older libseccomp may not know them by name.
_NUMBERS = {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "clone3": 435,
    "pidfd_getfd": 438,
    "memfd_secret": 447,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "statmount": 457,
    "listmount": 458,
    "open_tree_attr": 467,
}
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NAMESPACE_FLAGS = (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30)
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_MAX_PERSONALITY = 8
_SHARED_ANONYMOUS = 0x21  # MAP_SHARED, also as a part of MAP_SHARED_VALIDATE, and MAP_ANONYMOUS
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # typing into a terminal on somebody's behalf
_INT = (1 << 32) - 1
_UNKNOWN = -1


@cache
def filter_program(kind: Kind) -> bytes:
    """Instructions (struct sock_filter) of the filter of that kind. Raises `SandboxError` without libseccomp.

    "strict" is for sandboxes that serve many gradings, "watched" for those whose memory is limited by
    looking at their processes: memory that could be hidden from that is refused in both.
    """
    library = _library()
    rules = library.SyscallFilter(library.ALLOW)
    rules.set_attr(library.Attr.ACT_BADARCH, library.ERRNO(errno.EPERM))
    _add(library, rules, _REFUSED + (_REFUSED_STRICTLY if kind == "strict" else ()), errno.EPERM)
    _add(library, rules, _MISSING, errno.ENOSYS)
    _add_arguments(library, rules)
    if kind != "usual":
        _add(library, rules, _HIDDEN_MEMORY, errno.ENOSYS)
        shared = library.Arg(3, library.MASKED_EQ, _SHARED_ANONYMOUS, _SHARED_ANONYMOUS)
        rules.add_rule(library.ERRNO(errno.ENOMEM), "mmap", shared)
    if kind == "watched":
        _add(library, rules, _HIDDEN_OBJECTS, errno.ENOSYS)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _library() -> ModuleType:
    try:
        import pyseccomp  # here, since it fails where the system's library is missing
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise SandboxError(
            f"sandboxes need the shared library libseccomp.so.2 ({error}); "
            "install libseccomp2 (Debian, Ubuntu) or libseccomp (other systems)"
        ) from error
    return pyseccomp


def _add(library: ModuleType, rules: object, names: Sequence[str], error: int) -> None:
    for name in names:
        number = library.resolve_syscall(library.Arch.NATIVE, name)
        if number == _UNKNOWN:
            number = _NUMBERS.get(name, _UNKNOWN)
        if number >= 0:  # negative: not of this architecture
            rules.add_rule(library.ERRNO(error), number)  # type: ignore[attr-defined]


def _add_arguments(library: ModuleType, rules: object) -> None:
    """Calls that are refused with certain arguments only. The kernel ignores the upper half of an int."""
    masked, greater = library.MASKED_EQ, library.GT
    refused = [("clone", errno.EPERM, library.Arg(0, masked, flag, flag)) for flag in _NAMESPACE_FLAGS]
    refused += [
        ("socket", errno.EAFNOSUPPORT, library.Arg(0, masked, _INT, family))
        for family in range(max(_FAMILIES))
        if family not in _FAMILIES
    ]
    refused += [
        ("socket", errno.EAFNOSUPPORT, library.Arg(0, greater, max(_FAMILIES))),
        ("personality", errno.EPERM, library.Arg(0, greater, _MAX_PERSONALITY)),
        ("ioctl", errno.EPERM, library.Arg(1, masked, _INT, _TIOCSTI)),
        ("ioctl", errno.EPERM, library.Arg(1, masked, _INT, _TIOCLINUX)),
    ]
    for name, error, argument in refused:
        rules.add_rule(library.ERRNO(error), name, argument)  # type: ignore[attr-defined]
