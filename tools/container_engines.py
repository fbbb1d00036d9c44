"""Starts dockerd and podman on private roots and sockets, runs a command beside them, stops them.

    python tools/container_engines.py [--only docker|podman] [--cache DIR] -- COMMAND...

Each engine lives in mount, pid and network namespaces of its own: it touches nothing of an engine
that the machine may run already, and nothing is left when its first process is killed, by its pid.
COMMAND finds DOCKERD_SOCKET and PODMAN_SOCKET (unix:// addresses) and ENGINE_IMAGE, the name of a small
Debian image (bash, dash, Python with its whole library) that both engines hold; it is built once by
mmdebstrap and kept in the cache. Needs root, and from Debian: docker.io podman runc mmdebstrap. Exit
status: COMMAND's.
"""

import argparse
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGE = "jaxrl-test:latest"
NAMESPACES = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]
PACKAGES = {
    "dockerd": "docker.io",
    "podman": "podman",
    "runc": "runc",
    "mmdebstrap": "mmdebstrap",
}
# Without CAP_SYS_RESOURCE podman cannot raise limits to its defaults; without systemd it needs cgroupfs.
CONTAINERS_CONF = """[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


def root_archive(cache: Path) -> Path:
    """A tar of a small Debian root, built when it is not in `cache` yet."""
    archive = cache / "debian-python.tar"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = archive.with_suffix(".partial.tar")
        lean = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
        packages = "--include=bash,python3,procps"
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", packages, *lean, _release(), str(partial)],
            check=True,
        )
        partial.rename(archive)
    return archive


def _release() -> str:
    """The host's own Debian release, which its package mirror surely has."""
    text = Path("/etc/os-release").read_text()
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return fields.get("VERSION_CODENAME", "stable") if fields.get("ID") == "debian" else "stable"


@contextmanager
def running(
    name: str, command: Sequence[str], folder: Path, environment: dict[str, str], *, groups: str
) -> Iterator[str]:
    """The address of an engine's socket, while it runs. `groups` names the parent of its control groups.

    Raises `RuntimeError` with its log if it ends by itself.
    """
    address, log = folder / "api.sock", folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*NAMESPACES, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=folder,  # podman's monitor leaves a file there when memory runs out
            start_new_session=True,
        )
    try:
        _wait_until_ready(name, process, address, log)
        yield f"unix://{address}"
    finally:
        process.kill()  # unshare's child, the first process of the namespace, is killed with it
        process.wait()
        _wait_until_gone(str(folder))
        _remove_groups(groups)


@contextmanager
def dockerd(folder: Path) -> Iterator[str]:
    """A Docker daemon whose data lies in `folder`."""
    command = ["dockerd", "-H", f"unix://{folder}/api.sock", "--data-root", f"{folder}/data"]
    command += ["--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid", "--bridge=none"]
    groups = f"jaxrl-docker-{os.getpid()}"
    command += ["--iptables=false", "--ip6tables=false", f"--cgroup-parent=/{groups}"]
    with running("dockerd", command, folder, {}, groups=groups) as address:
        yield address


@contextmanager
def podman(folder: Path) -> Iterator[str]:
    """A podman service whose data lies in `folder`."""
    conf = folder / "containers.conf"
    conf.write_text(CONTAINERS_CONF)
    command = ["podman", "--root", f"{folder}/data", "--runroot", f"{folder}/run"]
    command += ["--tmpdir", f"{folder}/tmp", "--network-config-dir", f"{folder}/net"]
    command += ["system", "service", "--time=0", f"unix://{folder}/api.sock"]
    environment = {"CONTAINERS_CONF": str(conf)}
    with running("podman", command, folder, environment, groups="libpod_parent") as address:
        yield address


def load_image(address: str, archive: Path) -> None:
    """Imports the root file system as `IMAGE`. Raises `RuntimeError` with the engine's answer."""
    connection = Connection(address)
    name, tag = IMAGE.split(":")
    with archive.open("rb") as content:
        headers = {"Content-Type": "application/x-tar", "Content-Length": str(archive.stat().st_size)}
        path = f"/v1.40/images/create?fromSrc=-&repo={name}&tag={tag}"
        connection.request("POST", path, content, headers)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    connection.close()
    if answer.status != 200 or '"error"' in text:
        raise RuntimeError(f"{address} did not take the test image: {answer.status} {text[-500:]}")


class Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, address: str) -> None:
        super().__init__("localhost", timeout=120)
        self._path = address.removeprefix("unix://")

    def connect(self) -> None:
        """Connects. Raises `OSError`."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _wait_until_ready(name: str, process: subprocess.Popen[bytes], address: Path, log: Path) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            connection = Connection(str(address))
            connection.request("GET", "/_ping")
            if connection.getresponse().status == 200:
                connection.close()
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"{name} did not start; its log ends with:\n{log.read_text()[-2000:]}")


def _wait_until_gone(mark: str) -> None:
    """Until no process names the engine's folder any more: only then can it be removed."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(_mentions(path, mark) for path in Path("/proc").glob("[0-9]*")):
        time.sleep(0.05)


def _remove_groups(name: str) -> None:
    """Empty control groups, once the last processes have left them. Those of another engine stay."""
    top, deadline = Path("/sys/fs/cgroup"), time.monotonic() + 3
    while (left := [*top.glob(name), *top.glob(f"*/{name}")]) and time.monotonic() < deadline:
        for parent in left:
            for folder, _, _ in os.walk(parent, topdown=False):
                with suppress(OSError):
                    os.rmdir(folder)
        time.sleep(0.05)


def _mentions(process: Path, mark: str) -> bool:
    try:
        return process.name != str(os.getpid()) and mark.encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


def _check_programs(engines: Sequence[str]) -> None:
    needed = {"runc", "mmdebstrap", *({"docker": "dockerd"}.get(name, name) for name in engines)}
    missing = sorted(PACKAGES[name] for name in needed if shutil.which(name) is None)
    if missing:
        sys.exit(f"missing from this machine: {' '.join(missing)}; on Debian: apt-get install them")
    if os.geteuid() != 0:
        sys.exit("container engines on private roots need root; run as root")


def main() -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=["docker", "podman"])
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "engines")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    engines = [arguments.only] if arguments.only else ["docker", "podman"]
    _check_programs(engines)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    archive = root_archive(arguments.cache)
    with ExitStack() as stack:
        environment = {"ENGINE_IMAGE": IMAGE}
        for name in engines:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{name}-")))
            start, variable = {"docker": (dockerd, "DOCKERD_SOCKET"), "podman": (podman, "PODMAN_SOCKET")}[
                name
            ]
            environment[variable] = stack.enter_context(start(folder))
            load_image(environment[variable], archive)
            print(f"{name} answers at {environment[variable]}", file=sys.stderr, flush=True)
        status = subprocess.run(arguments.command, env={**os.environ, **environment}, check=False).returncode
    sys.exit(status)


if __name__ == "__main__":
    main()
