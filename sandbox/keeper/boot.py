"""How the keeper begins: with the porter beside it if the owner is root, and without privileges."""

import os
import resource
import socket
from typing import Any

from sandbox.keeper import mounts
from sandbox.keeper.porter import Porter
from sandbox.keeper.process import Keeper


def main(config: dict[str, Any]) -> None:
    """Entry point. `config`: control and porter (descriptors of sockets), stage (a directory), uid,
    filters (BPF instructions as hexadecimal digits by name).

    `uid` and `porter` are None for an owner that is a plain user, or root without another uid.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if config["uid"] is None:
        return _keep(config, config["stage"])
    stage = config["stage"]
    porter = Porter(_socket(config["porter"]), stage=stage, uid=config["uid"])
    place = porter.prepare()
    if keeper := os.fork():
        os.close(config["control"])
        porter.serve()
        os.waitpid(keeper, 0)
    else:
        os.close(config["porter"])
        become(config["uid"])
        _keep(config, place)


def become(uid: int) -> None:
    """Gives up root for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _keep(config: dict[str, Any], stage: str) -> None:
    control, broken = _socket(config["control"]), ""
    try:
        mounts.own_user_namespace()
        mounts.mount("keeper", stage, "tmpfs", options="mode=755,size=1m")
        for name, program in config["filters"].items():
            with open(f"{stage}/{name}.bpf", "wb") as file:
                file.write(bytes.fromhex(program))
    except OSError as error:
        broken = str(error)
    Keeper(control, stage=stage, broken=broken).serve()


def _socket(fd: int) -> socket.socket:
    result = socket.socket(fileno=fd)
    result.set_inheritable(False)
    return result
