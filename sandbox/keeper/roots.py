"""A whole root file system as arguments of bubblewrap, with places for mounts that it lacks.

Bubblewrap cannot make a mount point inside a read-only root. So the root is shown entry by entry, and
a folder in which a mount point is missing is taken apart in the same way.
"""

import os
import stat
from collections.abc import Sequence

_OWN = {"/proc", "/dev", "/sys", "/tmp"}  # of every sandbox, never of an image


def root_arguments(root: str, targets: Sequence[str]) -> list[str]:
    """Shows everything in the directory `root`, read-only, except at the mount points `targets`.

    Raises `OSError` if the root cannot be read.
    """
    return _expanded(root, "", targets)


def _expanded(folder: str, place: str, targets: Sequence[str]) -> list[str]:
    result: list[str] = []
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: entry.name)
    for entry in entries:
        path = f"{place}/{entry.name}"
        if path in targets or path in _OWN:
            continue
        kind = stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode)
        if kind == stat.S_IFLNK:
            result += ["--symlink", os.readlink(entry.path), path]
        elif kind == stat.S_IFDIR and _lacks(entry.path, path, targets):
            result += ["--dir", path, *_expanded(entry.path, path, targets)]
        elif kind in (stat.S_IFDIR, stat.S_IFREG):
            result += ["--ro-bind", entry.path, path]
    return result


def _lacks(folder: str, path: str, targets: Sequence[str]) -> bool:
    """Whether a mount point below `path` does not exist in `folder`."""
    inside = (target[len(path) :] for target in targets if target.startswith(path + "/"))
    return any(not os.path.isdir(folder + rest) for rest in inside)
