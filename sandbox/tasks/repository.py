"""The repository an agent gets: a tree with changes and without some files, and one commit of it."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from sandbox.images.environment import ImageBuildError

# Fixed, so that the same tree is the same commit everywhere.
_MADE = "1577836800 +0000"
_WHO = {"NAME": "Maintainers", "EMAIL": "maintainers@example.invalid", "DATE": _MADE}
_ENVIRONMENT = {
    **{f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in _WHO.items()},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_TEMPLATE_DIR": "",
    "LC_ALL": "C",
}
_SETTINGS = ("gc.auto=0", "core.autocrlf=false", "core.logAllRefUpdates=false", "core.fileMode=false")


def make_repository(
    top: Path, tree: Path, *, changes: Mapping[str, bytes | None], without: Iterable[str]
) -> None:
    """Fills `top` with the files of `tree`, `changes` over them and `without` left out; commits all.

    The only objects are those of the one commit. Raises `ImageBuildError` if git is missing or fails.
    """
    skipped = {*without, *changes}
    for path in sorted(tree.rglob("*")):
        relative = path.relative_to(tree).as_posix()
        if path.is_file() and relative not in skipped:
            (top / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, top / relative)
    for relative, content in changes.items():
        if content is not None:
            place = top / relative
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    _git(top, "init", "--quiet", "--initial-branch=main")
    _git(top, "add", "--all", "--force")
    _git(top, "commit", "--quiet", "--no-verify", "--message", "Import")
    _git(top, "repack", "-a", "-d", "--quiet")
    _git(top, "prune-packed", "--quiet")


def _git(top: Path, *arguments: str) -> None:
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(top), **_ENVIRONMENT}
    try:
        done = subprocess.run(
            ["git", *settings, *arguments], cwd=top, env=environment, capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise ImageBuildError("expected git on PATH to make task repositories: install git") from error
    if done.returncode:
        raise ImageBuildError(f"git {arguments[0]} failed in {top}: {done.stderr.strip()[-500:]}")
