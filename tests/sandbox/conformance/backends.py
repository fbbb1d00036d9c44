"""The backends that the cases run against, by name."""

import os

from sandbox.base import Image
from sandbox.containers.engine import connect
from sandbox.containers.owner import LABEL
from sandbox.docker_backend import DockerProvider
from sandbox.namespace import NamespaceProvider

from . import commands, files, isolation, life, limits, terminals  # each registers its cases
from .core import Backend

MODULES = (commands, files, isolation, life, limits, terminals)
ALL = frozenset({"images", "links in a source", "terminal", "oom", "disk"})


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


BACKENDS: dict[str, Backend] = {
    "docker": _engine("docker", "DOCKERD_SOCKET"),
    "podman": _engine("podman", "PODMAN_SOCKET"),
    "namespace": Backend(
        name="namespace",
        make=NamespaceProvider,
        traits=ALL | {"no user namespaces"},
    ),
}
