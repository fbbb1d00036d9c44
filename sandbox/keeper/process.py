"""The keeper: a small process that starts, feeds and ends sandboxes for one owner.

It exists because each of these needs a process of its own: it holds no privileges (as root it
becomes an unprivileged uid), its only thread lives as long as the sandboxes (they die with the
thread that forked them), forking it is cheap however large the owner is, and it ends everything
as soon as the owner's end of the socket closes, even when the owner was killed.
"""

import ctypes
import errno
import json
import os
import resource
import select
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

from sandbox.keeper.files import open_in, read_file, read_tree, write_file, write_link
from sandbox.keeper.wire import Header, Unpacker, join_files, pack, split_files

_REPORT_TIMEOUT = 10_000  # milliseconds; a report takes a few
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x00020000, 0x1000, 0x4000, 1 << 18


@dataclass
class Child:
    """One running or ended bubblewrap process. Descriptors belong to the keeper."""

    pid: int
    outer: int  # pidfd of bubblewrap
    info: int = -1  # pipe: bubblewrap's report; closed once read
    report: bytes = b""
    inner: int = -1  # pidfd of the sandbox's first process
    root: int = -1  # directory: the sandbox's /
    work: int = -1  # directory: the working copy, readable even after the sandbox's mounts are gone
    status: int | None = None


class Keeper:
    """Serves the owner's requests until its socket closes."""

    def __init__(self, control: socket.socket, bwrap: str) -> None:
        self._control, self._bwrap = control, bwrap
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._receive)
        self._unpacker, self._fds = Unpacker(), list[int]()
        self._children: dict[int, Child] = {}
        self._waiting: dict[int, list[Header]] = {}

    def serve(self) -> None:
        """Runs until the owner is gone, then kills every sandbox."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fd in self._selector.get_map():  # an earlier callback may have ended it
                        key.data()
        except (EOFError, ConnectionError):
            for child in self._children.values():
                self._kill(child)

    def _receive(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._control, 1 << 18, 16, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise EOFError
        self._fds += fds
        for header, payload in self._unpacker.feed(data):
            self._handle(header, payload)

    def _handle(self, header: Header, payload: bytes) -> None:
        handler = getattr(self, "_do_" + header["op"])
        try:
            handler(header, payload)
        except (OSError, ValueError) as error:
            self._reply(header, {"errno": getattr(error, "errno", None) or errno.EINVAL, "error": str(error)})

    def _reply(self, request: Header, answer: Header, payload: bytes = b"") -> None:
        self._control.sendall(pack({"id": request["id"], **answer}, payload))

    def _do_spawn(self, request: Header, _: bytes) -> None:
        stdin, stdout, self._fds = self._fds[0], self._fds[1], self._fds[2:]
        info, info_write = os.pipe()
        os.set_inheritable(info_write, True)
        try:
            pid = self._spawn(request["argv"], stdin, stdout, info_write)
        finally:
            for fd in (stdin, stdout, info_write):
                os.close(fd)
        child = Child(pid, os.pidfd_open(pid), info)
        self._children[request["sandbox"]] = child
        self._selector.register(child.outer, selectors.EVENT_READ, lambda: self._exited(request["sandbox"]))
        self._selector.register(info, selectors.EVENT_READ, lambda: self._started(request, child))

    def _spawn(self, argv: list[str], stdin: int, stdout: int, info: int) -> int:
        streams = [(os.POSIX_SPAWN_DUP2, fd, target) for fd, target in ((stdin, 0), (stdout, 1), (stdout, 2))]
        command = [self._bwrap, "--info-fd", str(info), *argv]
        return os.posix_spawn(self._bwrap, command, {}, file_actions=streams, setsigdef=[signal.SIGPIPE])

    def _started(self, request: Header, child: Child) -> None:
        first = self._read_report(child)
        if child.info >= 0:
            return
        try:
            for name, value in request["rlimits"].items():
                limit(first, getattr(resource, name), value)
        except OSError as error:
            return self._reply(request, {"errno": 0, "error": f"bubblewrap did not start: {error}"})
        self._reply(request, {"pid": first})

    def _read_report(self, child: Child) -> int:
        """Takes the next piece of the report; 0, or the first process's id once it is whole."""
        piece = os.read(child.info, 4096)
        child.report += piece
        try:
            first = json.loads(child.report)["child-pid"]
            child.inner = os.pidfd_open(first)
        except (ValueError, ProcessLookupError):
            first = 0
        if first or not piece:
            self._selector.unregister(child.info)
            os.close(child.info)
            child.info = -1
        return first

    def _exited(self, sandbox: int) -> None:
        child = self._children[sandbox]
        self._selector.unregister(child.outer)
        child.status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        for request in self._waiting.pop(sandbox, []):
            self._ended(request, child)

    def _ended(self, request: Header, child: Child) -> None:
        if request["op"] == "destroy":
            self._release(request["sandbox"])
        self._reply(request, {"status": child.status})

    def _release(self, sandbox: int) -> None:
        child = self._children.pop(sandbox)
        for fd in (child.outer, child.inner, child.root, child.work):
            if fd >= 0:
                os.close(fd)

    def _kill(self, child: Child) -> None:
        # Bubblewrap killed before its report would leave its child waiting for ever.
        while child.info >= 0 and _readable(child.info):
            self._read_report(child)
        # The first process is the pid namespace: bubblewrap's exit then means that all are gone.
        fd = child.inner if child.inner >= 0 else child.outer
        if child.status is None:
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _do_kill(self, request: Header, _: bytes) -> None:
        child = self._children.get(request["sandbox"])
        if child is None:
            return self._reply(request, {"status": None})
        self._kill(child)
        if child.status is not None:
            return self._ended(request, child)
        self._waiting.setdefault(request["sandbox"], []).append(request)

    _do_destroy = _do_kill

    def _do_enter(self, request: Header, payload: bytes) -> None:
        """Opens the root of a sandbox that is set up, and writes its first files."""
        child = self._children[request["sandbox"]]
        child.root = os.open(f"/proc/{request['pid']}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        child.work = open_in(child.root, request["workdir"], os.O_PATH | os.O_DIRECTORY)
        self._do_put(request, payload)

    def _do_put(self, request: Header, payload: bytes) -> None:
        root = self._root(request)
        for path, content in split_files(request["files"], payload).items():
            write_file(root, path, content)
        for path, target in request.get("links", {}).items():
            write_link(root, path, target)
        self._reply(request, {})

    def _do_get(self, request: Header, _: bytes) -> None:
        self._reply(request, {}, read_file(self._root(request), request["path"], request["limit"]))

    def _do_tree(self, request: Header, _: bytes) -> None:
        self._root(request)
        tree = read_tree(self._children[request["sandbox"]].work, request["limit"])
        sizes, payload = join_files(tree.files)
        self._reply(request, {"files": sizes, "links": tree.links, "problem": tree.problem}, payload)

    def _root(self, request: Header) -> int:
        child = self._children.get(request["sandbox"])
        if child is None or child.root < 0:
            raise OSError(f"sandbox {request['sandbox']} is gone")
        return child.root


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(_REPORT_TIMEOUT))


def limit(pid: int, resource_number: int, value: int) -> None:
    """Sets a resource limit, or leaves the lower one that the owner itself runs under."""
    _, hard = resource.prlimit(pid, resource_number)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.prlimit(pid, resource_number, (value, value))


def expose(places: list[tuple[str, str]]) -> None:
    """Shows each source at its target in a mount namespace of this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.unshare(_CLONE_NEWNS)
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "cannot make the keeper's mounts private")
    for source, target in places:
        if libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND, None):
            raise OSError(ctypes.get_errno(), f"cannot show {source} to the sandboxes")


def become(uid: int) -> None:
    """Gives up root for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def main(config: dict[str, Any]) -> None:
    """Entry point: `config` has control (descriptor), bwrap, uid (or None), expose."""
    if config["expose"]:
        expose(config["expose"])
    if config["uid"] is not None:
        become(config["uid"])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=config["control"])
    control.set_inheritable(False)
    Keeper(control, config["bwrap"]).serve()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
