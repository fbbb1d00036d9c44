"""What a container may do: its configuration, from limits and an image."""

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.base import Image, Limits
from sandbox.bubblewrap import UNPRIVILEGED_UID

if TYPE_CHECKING:
    from docker import APIClient

SHELL = "/bin/sh"
_OWN_PROCESSES = 2  # the first process and its sleep; they count as processes of the container
# Waiting also collects what daemons of the sandbox leave behind.
_FIRST_PROCESS = [SHELL, "-c", "while :; do sleep 3600 & wait; done"]
_USER = f"{UNPRIVILEGED_UID}:{UNPRIVILEGED_UID}"


def volume_options(size: int) -> dict[str, str]:
    """Driver options of a working copy: memory-backed, `size` bytes.

    In blocks, because podman takes `size` for a quota of the disk below.
    """
    blocks = -(-size // resource.getpagesize())
    flags = f"nr_blocks={blocks},uid={UNPRIVILEGED_UID},gid={UNPRIVILEGED_UID},mode=0755,nosuid,nodev"
    return {"type": "tmpfs", "device": "tmpfs", "o": flags}


def environment(image: Image) -> dict[str, str]:
    """Variables of every process, besides the image's own."""
    common = {"HOME": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1"}
    return common | dict(image.environment)


def container(
    client: "APIClient", image: Image, limits: Limits, *, volume: str, runtime: str | None, local: bool
) -> dict[str, Any]:
    """Arguments of the SDK's `create_container`."""
    return {
        "image": image.name,
        "command": _FIRST_PROCESS,
        "entrypoint": [],
        "user": _USER,
        "working_dir": image.workdir,
        "hostname": "sandbox",
        "environment": environment(image),
        "host_config": _host_config(client, image, limits, volume, runtime, local),
    }


def exec_options(image: Image) -> dict[str, Any]:
    """Arguments of the SDK's `exec_create` that every process has."""
    return {"user": _USER, "workdir": image.workdir, "privileged": False}


def _host_config(
    client: "APIClient", image: Image, limits: Limits, volume: str, runtime: str | None, local: bool
) -> dict[str, Any]:
    return client.create_host_config(
        network_mode="bridge" if limits.network else "none",
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        pids_limit=limits.pids + _OWN_PROCESSES,
        mem_limit=limits.memory,
        memswap_limit=limits.memory,  # memory and swap together: no swap
        nano_cpus=int(limits.cpu * 1e9),
        shm_size=limits.disk,
        tmpfs={"/tmp": f"size={limits.disk},mode=1777,nosuid,nodev", **_empty_folders(client, image)},
        mounts=_mounts(image, volume),
        ulimits=_ulimits(limits, local),
        runtime=runtime,
    )


def _empty_folders(client: "APIClient", image: Image) -> dict[str, str]:
    """Options of file systems in memory by the path that each covers."""
    if not image.covered_folders:
        return {}
    options = "ro,size=4k,mode=0555,nosuid,nodev"
    engines = {item["Name"] for item in client.version().get("Components", ())}
    if "Podman Engine" in engines:  # unless told, it copies there what it covers; dockerd knows no such word
        options += ",notmpcopyup"
    return dict.fromkeys(image.covered_folders, options)


def _mounts(image: Image, volume: str) -> list[Any]:
    from docker.types import Mount

    layers = [
        Mount(inside, str(Path(outside).resolve()), type="bind", read_only=True)
        for inside, outside in image.layers.items()
    ]
    empty = [Mount(path, os.devnull, type="bind", read_only=True) for path in image.covered_files]
    return [Mount(image.workdir, volume, type="volume", no_copy=True), *layers, *empty]


def _ulimits(limits: Limits, local: bool) -> list[Any]:
    from docker.types import Ulimit

    values = {"nofile": 1024, "fsize": limits.disk, "core": 0}
    if local:  # podman would raise it to its own default, which an engine without the right to do so cannot
        values["nproc"] = _hard_limit(resource.RLIMIT_NPROC)
    return [Ulimit(name=name, soft=value, hard=value) for name, value in values.items()]


def _hard_limit(number: int) -> int:
    hard = resource.getrlimit(number)[1]
    return -1 if hard == resource.RLIM_INFINITY else hard


def page_rounded(sizes: list[int]) -> int:
    """Bytes that files of these sizes take in a memory-backed file system."""
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(-(-size // page) * page for size in sizes)
