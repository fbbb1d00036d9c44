"""The keeper: a small process that starts, feeds and ends sandboxes for one owner.

It exists because each of these needs a process of its own: it holds no privileges (as root it
becomes an unprivileged uid), its only thread lives as long as the sandboxes (they die with the
thread that forked them), forking it is cheap however large the owner is, and it ends everything
as soon as the owner's end of the socket closes, even when the owner was killed.
"""

import errno
import json
import os
import select
import selectors
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from sandbox.keeper.box import Box, binds, bubblewrap_arguments, readable
from sandbox.keeper.cgroups import Groups
from sandbox.keeper.changes import changes
from sandbox.keeper.disk import Disk, Scratch
from sandbox.keeper.files import open_in, read_file, write_file
from sandbox.keeper.roots import root_arguments
from sandbox.keeper.signals import CATCHABLE
from sandbox.keeper.terminal import Program, kill_tree, open_pair, start
from sandbox.keeper.watchdog import DEVICES, FILTERS, PERIOD, Watchdog
from sandbox.keeper.wire import Header, Unpacker, join_files, pack, split_files


class Keeper:
    """Serves the owner's requests until its socket closes. `stage`: its directory for mounts."""

    def __init__(
        self, control: socket.socket, *, stage: str, groups: Groups | None, broken: str = ""
    ) -> None:
        self._control, self._stage, self._broken = control, stage, broken
        self._groups, self._watchdog = groups, None if groups else Watchdog(self._check_owner)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._receive)
        self._hangup = select.poll()
        self._hangup.register(control, 0)  # its end is always told
        self._unpacker, self._fds = Unpacker(), list[int]()
        self._boxes: dict[int, Box] = {}
        self._waiting: dict[int, list[Header]] = {}
        self._roots: dict[tuple[Any, ...], list[str]] = {}

    def serve(self) -> None:
        """Runs until the owner is gone, then kills every sandbox."""
        try:
            while True:
                for key, _ in self._selector.select(PERIOD if self._watchdog and self._boxes else None):
                    if key.fd in self._selector.get_map():  # an earlier callback may have ended it
                        key.data()
                if self._watchdog:
                    self._watchdog.look(self._boxes.values())
        except (EOFError, ConnectionError):
            for box in self._boxes.values():
                self._kill(box)
            for box in self._boxes.values():
                for pid in box.terminals:
                    os.waitpid(pid, 0)
                if box.running:
                    box.ended()
                box.remove_group()  # the disks end with this process

    def _check_owner(self) -> None:
        """Raises `EOFError` if the owner is gone: on a crowded machine one look may take a second."""
        if self._hangup.poll(0):
            raise EOFError

    def _receive(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._control, 1 << 18, 16)
        for fd in fds:  # recv_fds ignores MSG_CMSG_CLOEXEC: a sandbox would hold another's pipes
            os.set_inheritable(fd, False)
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

    def _reply(self, request: Header, answer: Header, payload: bytes = b"", *, fd: int = -1) -> None:
        frame = pack({"id": request["id"], "fd": fd >= 0, **answer}, payload)
        if fd >= 0:
            socket.send_fds(self._control, [frame[:1]], [fd])
        self._control.sendall(frame[fd >= 0 :])

    def _do_spawn(self, request: Header, payload: bytes) -> None:
        (stdin, stdout), self._fds = self._fds[:2], self._fds[2:]
        (info, say), (wait, block) = os.pipe(), os.pipe()
        try:
            if self._broken:
                return self._reply(request, {"errno": 0, "error": self._broken})
            box = self._box(request, payload)
            box.scratch.make()
            arguments = bubblewrap_arguments(request, self._known(request, box))
            pid = _spawn(request["bwrap"], arguments, box.filter, (stdin, stdout, say, wait))
            box.started(pid, info, block)
            info = block = -1
        finally:
            for fd in (stdin, stdout, say, wait, info, block):
                if fd >= 0:
                    os.close(fd)
        self._selector.register(box.outer, selectors.EVENT_READ, lambda: self._exited(request["sandbox"]))
        self._selector.register(box.info, selectors.EVENT_READ, lambda: self._started(request, box))

    def _box(self, request: Header, payload: bytes) -> Box:
        """The sandbox of that number: a new one with its first files, or the one that is rebuilt."""
        number = request["sandbox"]
        if number not in self._boxes:
            disk = Disk(self._stage, str(number), size=request["disk"], lower=_lower(request))
            group = self._groups.make(str(number), request["limits"]) if self._groups else None
            counter = group.open_counter() if group else os.memfd_create("counter")
            scratch = Scratch(self._stage, str(number), size=request["disk"], targets=request["scratch"])
            memory, network, kind = request["memory"], request["network"], request["filter"]
            box = Box(disk, scratch, request["workdir"], memory, network, group, counter)
            box.filter = f"{self._stage}/{FILTERS[kind] if self._watchdog else kind}.bpf"
            self._boxes[number] = box
            for path, content in split_files(request["files"], payload).items():
                write_file(disk.work, path, content)
        return self._boxes[number]

    def _known(self, request: Header, box: Box) -> Mapping[str, Sequence[str]]:
        """What stands for the names in the arguments of bubblewrap."""
        return {
            "{root}": self._root_arguments(request),
            "{work}": [box.disk.place],
            "{empty}": [f"{self._stage}/empty"],
            "{scratch}": binds(box.scratch.places),
            "{devices}": DEVICES if self._watchdog else [],
        }

    def _root_arguments(self, request: Header) -> list[str]:
        if request["root"] is None:
            return []
        key = request["root"], *request["targets"]
        if key not in self._roots:
            self._roots[key] = root_arguments(request["root"], request["targets"])
        return self._roots[key]

    def _started(self, request: Header, box: Box) -> None:
        self._read_report(box)
        if box.info >= 0:
            return
        try:
            box.confine(request["rlimits"])
        except OSError as error:
            return self._reply(request, {"errno": 0, "error": f"bubblewrap did not start: {error}"})
        version = f"cgroup v{self._groups.version}" if self._groups else "rlimits and a watchdog"
        self._reply(request, {"pid": box.first, "limits_by": version}, fd=box.counter)

    def _read_report(self, box: Box) -> None:
        """Takes the next piece of the report."""
        piece = os.read(box.info, 4096)
        box.report += piece
        try:
            first = json.loads(box.report)["child-pid"]
            box.inner, box.first = os.pidfd_open(first), first
        except (ValueError, ProcessLookupError):
            pass
        if box.first or not piece:
            self._selector.unregister(box.info)
            box.reported()

    def _exited(self, sandbox: int) -> None:
        box = self._boxes[sandbox]
        self._selector.unregister(box.outer)
        box.ended()
        for request in self._waiting.pop(sandbox, []):
            self._ended(request, box)

    def _ended(self, request: Header, box: Box) -> None:
        if request["op"] == "destroy":
            del self._boxes[request["sandbox"]]
            box.forget()
        self._reply(request, {"status": box.status})

    def _kill(self, box: Box) -> None:
        # Bubblewrap killed before its report would leave its child waiting for ever.
        while box.info >= 0 and readable(box.info):
            self._read_report(box)
        box.kill()

    def _do_kill(self, request: Header, _: bytes) -> None:
        box = self._boxes.get(request["sandbox"])
        if box is None:
            return self._reply(request, {"status": None})
        self._kill(box)
        if not box.running:
            return self._ended(request, box)
        self._waiting.setdefault(request["sandbox"], []).append(request)

    _do_destroy = _do_kill

    def _do_put(self, request: Header, payload: bytes) -> None:
        root = self._find(request).opened_root()
        for path, content in split_files(request["files"], payload).items():
            write_file(root, path, content)
        self._reply(request, {})

    def _do_get(self, request: Header, _: bytes) -> None:
        root = self._find(request).opened_root()
        self._reply(request, {}, read_file(root, request["path"], request["limit"]))

    def _do_changes(self, request: Header, _: bytes) -> None:
        disk = self._find(request).disk
        known, limit = request["known"], request["limit"]
        found = changes(disk.upper, disk.lower, whole=disk.whole, known=known, limit=limit)
        sizes, payload = join_files(found.files)
        answer = {"files": sizes, "deleted": found.deleted, "problem": found.problem}
        self._reply(request, answer, payload)

    def _do_terminal(self, request: Header, _: bytes) -> None:
        box = self._find(request)
        with open(box.filter, "rb") as file:
            rules = file.read()
        environment, rlimits = request["environment"], request["rlimits"]
        program = Program(request["commands"], environment, box.workdir, rlimits, rules, box.group)
        master, slave = open_pair(box.opened_root())
        try:
            pid = start(program, first=box.inner, slave=slave)
            self._watch(box, pid)
            self._reply(request, {"pid": pid}, fd=master)
        finally:
            os.close(master)
            os.close(slave)

    def _watch(self, box: Box, pid: int) -> None:
        """Reaps the shell of a terminal when it ends."""
        ended = os.pidfd_open(pid)
        box.terminals.add(pid)

        def reap() -> None:
            self._selector.unregister(ended)
            os.close(ended)
            os.waitpid(pid, 0)
            box.terminals.discard(pid)

        self._selector.register(ended, selectors.EVENT_READ, reap)

    def _do_hangup(self, request: Header, _: bytes) -> None:
        box = self._boxes.get(request["sandbox"])
        if box is not None and request["pid"] in box.terminals:
            kill_tree(request["pid"])
        self._reply(request, {})

    def _find(self, request: Header) -> Box:
        box = self._boxes.get(request["sandbox"])
        if box is None:
            raise OSError(errno.ESRCH, f"sandbox {request['sandbox']} is gone")
        return box


def _lower(request: Header) -> int:
    """Descriptor of the tree below the working directory: an image's source, or a folder in its root."""
    if request["lower"] is None:
        return -1
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    top = os.open(request["lower"], flags)
    if not request["inside"]:
        return top
    try:
        return open_in(top, request["inside"], flags)
    except FileNotFoundError:
        return -1
    finally:
        os.close(top)


def _spawn(program: str, arguments: list[str], rules: str, fds: tuple[int, int, int, int]) -> int:
    """Starts bubblewrap with the filter in the file `rules` and (stdin, stdout, its report, its signal)."""
    stdin, stdout, info, wait = fds
    seccomp = os.open(rules, os.O_RDONLY)  # its own offset, since bubblewrap reads to the end
    own = {"--info-fd": info, "--block-fd": wait, "--seccomp": seccomp}
    for fd in own.values():
        os.set_inheritable(fd, True)
    streams = [(os.POSIX_SPAWN_DUP2, fd, target) for fd, target in ((stdin, 0), (stdout, 1), (stdout, 2))]
    command = [program, *(str(part) for item in own.items() for part in item), *arguments]
    try:
        return os.posix_spawn(program, command, {}, file_actions=streams, setsigdef=CATCHABLE)
    finally:
        os.close(seccomp)
