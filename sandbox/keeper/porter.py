"""The porter: as root, shows the keeper what an unprivileged process cannot reach or own.

It stays root beside the keeper, in the same private mount namespace, and serves the owner alone:
neither the keeper nor a sandbox has a way to talk to it. It ends when both of them have ended.
"""

import itertools
import os
import select
import socket
from pathlib import Path

from sandbox.keeper import mounts
from sandbox.keeper.archives import end_program, mount_archive
from sandbox.keeper.wire import Header, Unpacker, pack


class Porter:
    """Binds paths of the host below `stage`, where the keeper sees them appear."""

    def __init__(self, control: socket.socket, *, stage: str, uid: int) -> None:
        self._control, self._stage, self._uid = control, stage, uid
        self._unpacker, self._numbers = Unpacker(), itertools.count()
        self._maps: dict[tuple[int, int], int] = {}
        self._private = True
        self._programs: dict[str, int] = {}  # squashfuse by the path that it serves

    def prepare(self) -> str:
        """Makes the private mount namespace. Returns where the keeper may mount.

        Root of some containers may not even do that; then only what everyone can reach is shown.
        """
        try:
            mounts.unshare(mounts.NEW_NAMESPACE)
        except PermissionError:
            self._private = False
            return self._stage
        mounts.mount("none", "/", None, flags=mounts.RECURSIVE | mounts.PRIVATE)
        mounts.mount("stage", self._stage, "tmpfs", options="mode=755,size=1m")
        mounts.mount("none", self._stage, None, flags=mounts.SHARED)
        os.mkdir(f"{self._stage}/keeper")
        return f"{self._stage}/keeper"

    def serve(self, keeper: int) -> None:
        """Answers the owner until its end of the socket closes, or the process of a pidfd ends."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(keeper, select.POLLIN)
        while all(fd != keeper for fd, _ in poll.poll()):
            try:
                data = self._control.recv(1 << 16)
            except ConnectionError:
                return
            if not data:
                return
            for header, _ in self._unpacker.feed(data):
                self._control.sendall(pack({"id": header["id"], **self._answer(header)}))

    def close(self) -> None:
        """Ends what still serves mounts."""
        for pid in self._programs.values():
            end_program(pid)

    def _answer(self, header: Header) -> Header:
        try:
            if header["op"] == "share":
                return {"path": self._share(header["path"], header["owned"])}
            if header["op"] == "open":
                return {"path": self._open(header["path"], header["offset"], header["squashfuse"])}
            self._release(header["path"])
            return {}
        except OSError as error:
            return {"errno": error.errno, "error": error.strerror}

    def _share(self, path: str, owned: bool) -> str:
        """Shows `path` below the stage; `owned`: as if its owner were the keeper's user."""
        if not self._private:
            return _reachable(path)
        tree = mounts.clone_tree(path)
        try:
            if owned:
                self._own(tree, os.fstat(tree))
            target = f"{self._stage}/{next(self._numbers)}"
            os.mkdir(target)
            mounts.attach(tree, target)
            return target
        finally:
            os.close(tree)

    def _open(self, path: str, offset: int, squashfuse: str | None) -> str:
        """Shows what is in a squashfs archive, as `_share` does with `owned`."""
        if not self._private:
            raise PermissionError(1, "root may not mount here")
        place = f"{self._stage}/{next(self._numbers)}"
        os.mkdir(place)
        try:
            pid = mount_archive(path, place, offset=offset, squashfuse=squashfuse)
            shown = self._share(place, True)
            mounts.detach(place)  # its clone, whose owner is another, stays
            if pid:
                self._programs[shown] = pid
        finally:
            os.rmdir(place)
        return shown

    def _own(self, tree: int, info: os.stat_result) -> None:
        if info.st_uid == self._uid:
            return
        key = info.st_uid, info.st_gid
        try:
            if key not in self._maps:
                maps = (f"{owner} {self._uid} 1" for owner in key)
                self._maps[key] = mounts.user_namespace(*maps)
            mounts.map_owners(tree, self._maps[key])
        except OSError:  # the file system cannot; the keeper sees whose it is and copies it
            return

    def _release(self, path: str) -> None:
        if self._private:
            mounts.detach(path)
            os.rmdir(path)
            if pid := self._programs.pop(path, 0):
                end_program(pid)


def _reachable(path: str) -> str:
    """`path`, if others than root can enter its folders. Raises `PermissionError`."""
    for folder in (path, *(str(parent) for parent in Path(path).parents)):
        if not os.stat(folder).st_mode & 0o005:
            raise PermissionError(13, f"only root can read {folder}; let others read and enter it", path)
    return path
