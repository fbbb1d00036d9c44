"""A directory of a sandbox, two levels deep."""

import shlex

from sandbox.base import Sandbox

_FIND = (
    "command find -L {path} -mindepth 1 -maxdepth 2 "
    r"\( -name '.*' -prune -printf 'h%d %p\0' \) -o -printf '%y%d %p\0' 2>/dev/null"
)


async def listing(sandbox: Sandbox, path: str, timeout: float) -> str | None:
    """What lies below the absolute `path`, hidden entries only counted; None if it cannot be listed.

    Raises `SandboxError`.
    """
    result = await sandbox.exec(_FIND.format(path=shlex.quote(path)), timeout)
    if result.timed_out:
        return None
    found = [entry.partition(" ") for entry in result.output.split("\0") if " " in entry]
    shown = sorted(
        (name + "/" * (kind == "d1" or kind == "d2") for kind, _, name in found if kind[0] != "h"),
        key=lambda name: name.rstrip("/").split("/"),
    )
    hidden = sum(kind == "h1" for kind, _, _ in found)
    base = path.rstrip("/") or "/"
    lines = [f"{base.rstrip('/')}/", *shown]
    if hidden:
        noun = "entry" if hidden == 1 else "entries"
        lines += ["", f"[{hidden} hidden {noun} of this directory left out; ls -la shows them]"]
    return "\n".join(lines)
