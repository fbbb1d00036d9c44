"""The import contracts name everything they are about; import-linter itself runs in `make lint`."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}


def contract(words: str) -> dict:
    (found,) = (each for each in CONTRACTS if words in each["name"])
    return found


def exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_every_module_has_a_layer():
    layers = contract("layers of jaxrl")
    assert layers["containers"] == ["jaxrl"]
    assert layers["exhaustive"] is True


@pytest.mark.parametrize("part", ["contracts", "rollout", "feed", "mlperf", "dashboard"])
def test_what_promises_to_import_no_jax_is_checked(part):
    promise = contract("imports no JAX")
    assert set(promise["forbidden_modules"]) >= JAX
    assert (f"jaxrl.{part}" in promise["source_modules"]) == exists(f"jaxrl.{part}")


def test_sandbox_promises_it_too():
    promise = contract("sandbox imports nothing of ours")
    assert set(promise["forbidden_modules"]) >= JAX | {"jaxrl", "kernels"}
