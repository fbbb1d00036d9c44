"""How the keeper begins: with the porter beside it if the owner is root, and without privileges."""

import os
import resource
import secrets
import socket
from typing import Any

from sandbox.keeper import mounts
from sandbox.keeper.cgroups import Groups, find
from sandbox.keeper.porter import Porter
from sandbox.keeper.process import Keeper
from sandbox.keeper.terminal import adopt_orphans


def main(config: dict[str, Any]) -> None:
    """Entry point. `config`: control and porter (descriptors of sockets), stage (a directory), uid,
    filters (BPF instructions as hexadecimal digits by name), cgroups (whether to look for them).

    `uid` and `porter` are None for an owner that is a plain user, or root without another uid.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    groups = find(f"jaxrl-{os.getpid()}-{secrets.token_hex(4)}") if config["cgroups"] else None
    if config["uid"] is None:
        return _keep_alone(config, groups)
    stage = config["stage"]
    porter = Porter(_socket(config["porter"]), stage=stage, uid=config["uid"])
    place = porter.prepare()
    if groups is not None:
        groups.give(config["uid"])
    if keeper := os.fork():
        os.close(config["control"])
        porter.serve(os.pidfd_open(keeper))
        porter.close()
        os.waitpid(keeper, 0)
        if groups is not None:
            groups.remove()
    else:
        os.close(config["porter"])
        if groups is not None:
            groups.enter()
        become(config["uid"])
        _keep(config, place, groups)


def _keep_alone(config: dict[str, Any], groups: Groups | None) -> None:
    if groups is not None:
        groups.enter()
    _keep(config, config["stage"], groups)
    if groups is not None:
        groups.leave()
        groups.remove()


def become(uid: int) -> None:
    """Gives up root for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _keep(config: dict[str, Any], stage: str, groups: Groups | None) -> None:
    control, broken = _socket(config["control"]), ""
    adopt_orphans()
    try:
        mounts.own_user_namespace()
        mounts.mount("keeper", stage, "tmpfs", options="mode=755,size=1m")
        open(f"{stage}/empty", "x").close()
        for name, program in config["filters"].items():
            with open(f"{stage}/{name}.bpf", "wb") as file:
                file.write(bytes.fromhex(program))
    except OSError as error:
        broken = str(error)
    Keeper(control, stage=stage, groups=groups, broken=broken).serve()


def _socket(fd: int) -> socket.socket:
    result = socket.socket(fileno=fd)
    result.set_inheritable(False)
    return result
