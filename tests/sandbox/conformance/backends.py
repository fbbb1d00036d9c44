"""The backends that the cases run against, by name."""

from sandbox.namespace import NamespaceProvider

from . import commands, files, isolation, life, limits, terminals  # each registers its cases
from .core import Backend

MODULES = (commands, files, isolation, life, limits, terminals)
BACKENDS: dict[str, Backend] = {
    "namespace": Backend(name="namespace", make=NamespaceProvider, traits=frozenset({"images", "terminal"}))
}
