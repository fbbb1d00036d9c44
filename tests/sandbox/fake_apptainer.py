"""A stand-in for Apptainer's command line: checks every flag and its order, then runs by bubblewrap.

Like the real one it gives a process namespace of its own, binds what it is told and cleans the environment;
unlike it, it reads no image: it shows the host's /usr. BWRAP names bubblewrap.
"""

import os
import re
import sys
from pathlib import Path

ENV = re.compile(r"[A-Z_]+=.*", re.DOTALL)
MOUNT = re.compile(r"type=bind,src=(/[^,:]+),dst=(/[^,:]+)(,ro)?")
FLAGS = ["exec", "--writable-tmpfs", "--cleanenv", "--pid", "--no-mount", "home,tmp,bind-paths"]


def refuse(reason: str) -> None:
    """Ends as Apptainer does."""
    sys.exit(f"FATAL: {reason}: {sys.argv[1:]}")


def parse(words: list[str]) -> tuple[list[str], list[str]]:
    """Bubblewrap's arguments for the flags, and the program."""
    if words[: len(FLAGS)] != FLAGS:
        refuse(f"expected {FLAGS}")
    words, result = words[len(FLAGS) :], []
    if words[:3] == ["--net", "--network", "none"]:
        words, result = words[3:], ["--unshare-net"]
    while words[0] == "--env":
        if not ENV.fullmatch(words[1]):
            refuse(f"bad variable {words[1]}")
        name, _, value = words[1].partition("=")
        words, result = words[2:], [*result, "--setenv", name, value]
    while words[0] == "--mount":
        match = MOUNT.fullmatch(words[1])
        if match is None or not Path(match[1]).exists():
            refuse(f"bad mount {words[1]}")
        assert match is not None
        words, result = words[2:], [*result, "--ro-bind" if match[3] else "--bind", match[1], match[2]]
    if words[0] != "--pwd" or not words[1].startswith("/") or words[2].startswith("-"):
        refuse("expected --pwd DIR IMAGE COMMAND...")
    if not words[2].endswith(".sif") or not Path(words[2]).is_file():
        refuse("could not open image")
    return [*result, "--remount-ro", "/", "--remount-ro", "/dev", "--chdir", words[1]], words[3:]


def main() -> None:
    """Becomes bubblewrap."""
    options, program = parse(sys.argv[1:])
    links = [name for name in ("bin", "sbin", "lib", "lib64") if Path("/", name).is_symlink()]
    system = [part for name in links for part in ("--symlink", os.readlink(f"/{name}"), f"/{name}")]
    isolation = ["--unshare-user", "--unshare-pid", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
    folders = ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    etc = ["--ro-bind", "/etc/alternatives", "/etc/alternatives"]
    bwrap = os.environ["BWRAP"]
    os.execv(bwrap, [bwrap, *isolation, *folders, *etc, *system, *options, "--", *program])


if __name__ == "__main__":
    main()
