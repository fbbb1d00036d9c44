"""Takes out of an agent's sandbox what the task's image holds for its grader, or refuses the sandbox."""

import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from sandbox.base import Image, Sandbox, SandboxError
from sandbox.tasks.schema import TaskSpec

_TIMEOUT = 120.0  # seconds: an image has some hundred thousand files
# Tells what can be read by the names it gets; links are followed. What is empty or closed tells nothing.
_TELL = """for each; do
to=$(readlink -f -- "$each") || continue
if [ -d "$to" ]; then
    [ -r "$to" ] || [ -x "$to" ] || continue
    [ -r "$to" ] && [ -z "$(ls -A -- "$to")" ] && continue
    echo "folder $to"
elif [ -r "$to" ] && [ -s "$to" ]; then
    echo "file $to"
fi
done"""


class Leasing(Protocol):
    """Where sandboxes come from: a pool, as a rule."""

    def lease(
        self, files: Mapping[str, bytes], *, image: Image | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh sandbox of `image` holding `files`, destroyed at the block's end."""
        ...


@dataclass(frozen=True)
class Covers:
    """Absolute paths in the read-only part of an image that hold what the agent must not see."""

    folders: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.folders or self.files)

    def __or__(self, other: "Covers") -> "Covers":
        return Covers(self.folders | other.folders, self.files | other.files)

    def over(self, image: Image) -> Image:
        """The image with all of that shown empty."""
        folders = {*image.covered_folders, *self.folders}
        files = {*image.covered_files, *self.files}
        return replace(image, covered_folders=tuple(sorted(folders)), covered_files=tuple(sorted(files)))


class Concealer:
    """Leases sandboxes for agents. It remembers what an image holds: only its first sandbox is made twice."""

    def __init__(self) -> None:
        self._covers: dict[tuple[object, ...], Covers] = {}

    @asynccontextmanager
    async def lease(self, sandboxes: Leasing, task: TaskSpec) -> AsyncIterator[Sandbox]:
        """A fresh sandbox with the task's files and nothing that is named in `task.concealed`.

        What lies in the working directory is removed, what lies in the read-only root is covered. Raises
        `SandboxError` if something stays within the agent's reach: no episode may run beside its tests.
        """
        files = {path: text.encode() for path, text in task.files.items()}
        key = (task.image.root, task.image.name, task.image.source, task.concealed)
        known = self._covers.get(key, Covers())
        async with AsyncExitStack() as stack:
            lease = sandboxes.lease(files, image=known.over(task.image))
            sandbox = await stack.enter_async_context(lease)
            if found := await conceal(sandbox, task):
                await stack.aclose()
                self._covers[key] = known = known | found
                lease = sandboxes.lease(files, image=known.over(task.image))
                sandbox = await stack.enter_async_context(lease)
                if left := await conceal(sandbox, task):
                    raise SandboxError(_reachable(left))
            yield sandbox


async def conceal(sandbox: Sandbox, task: TaskSpec) -> Covers:
    """Removes everything named in `task.concealed`, links too. Returns what can be read nevertheless.

    Raises `SandboxError` if the sandbox cannot be searched, or if something in its working directory stays.
    """
    if not task.concealed:
        return Covers()
    names = " -o ".join(f"-name {shlex.quote(name)}" for name in task.concealed)
    search = f"find / \\( -path /proc -o -path /sys \\) -prune -o \\( {names} \\) -exec"
    remove = f"{search} rm -rf -- {{}} + 2>/dev/null"
    tell = f"{search} sh -c {shlex.quote(_TELL)} sh {{}} + 2>/dev/null"
    needed = "command -v find >/dev/null && command -v readlink >/dev/null"
    found = await sandbox.exec(f"{needed} && {{ {remove}; {tell}; echo searched; }}", _TIMEOUT)
    lines = found.output.splitlines()
    if found.timed_out or not lines or lines[-1] != "searched":
        raise SandboxError(
            f"the image could not be searched for {', '.join(task.concealed)}: {found.output[-200:]}"
        )
    return _covers(lines[:-1], task)


def _covers(lines: list[str], task: TaskSpec) -> Covers:
    told = [line.partition(" ")[::2] for line in lines]
    covers = Covers(
        folders=frozenset(path for kind, path in told if kind == "folder"),
        files=frozenset(path for kind, path in told if kind == "file"),
    )
    for kind, path in told:
        inside = f"{path}/".startswith(f"{task.image.workdir}/")
        if inside or kind not in ("folder", "file") or not path.startswith("/"):
            raise SandboxError(_reachable(Covers(folders=frozenset({path}))))
    return covers


def _reachable(left: Covers) -> str:
    path = min(left.folders | left.files)
    return f"the agent could reach {path}, which is the grader's: build the image without it"
