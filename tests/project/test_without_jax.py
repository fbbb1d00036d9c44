"""The parts that promise it import, module by module, where JAX can't be imported."""

import importlib.util
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROMISED = ("jaxrl.contracts", "jaxrl.feed", "jaxrl.rollout", "sandbox")
LATER = ("jaxrl.mlperf", "jaxrl.dashboard")  # promised as soon as they exist

IMPORT_WITHOUT_JAX = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}:
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def modules_of(package: str) -> list[str]:
    """`package` and everything in it, without importing anything of it but `__init__`."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is promised to import without JAX, but does not exist"
    inside = pkgutil.walk_packages(spec.submodule_search_locations or [], package + ".")
    return [package, *(module.name for module in inside if not module.name.endswith("__main__"))]


def files_of(package: str) -> set[str]:
    """Names of the modules whose files lie in the folder of `package`."""
    files = ROOT.joinpath(*package.split(".")).rglob("*.py")
    paths = [file.relative_to(ROOT).with_suffix("").parts for file in files]
    return {".".join(path).removesuffix(".__init__") for path in paths if path[-1] != "__main__"}


def import_without_jax(*modules: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_WITHOUT_JAX, *modules]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)


@pytest.mark.parametrize("package", ["jaxrl.feed", "jaxrl.rollout", "sandbox"])
def test_no_module_is_forgotten(package):
    modules = modules_of(package)
    assert set(modules) == files_of(package)
    assert len(modules) > 3


@pytest.mark.parametrize("package", LATER)
def test_promises_are_kept_as_soon_as_they_can_be(package):
    assert package in PROMISED or importlib.util.find_spec(package) is None


@pytest.mark.parametrize("package", PROMISED)
def test_it_imports_without_jax(package):
    modules = modules_of(package)
    result = import_without_jax(*modules)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["jax", "jax.numpy", "flax.nnx", "optax", "orbax.checkpoint"])
def test_the_block_blocks(name):
    result = import_without_jax(name)
    assert result.returncode != 0
    assert "is blocked" in result.stderr
