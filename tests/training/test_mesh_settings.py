"""The section `mesh` spreads learner and engine over devices; what it cannot do is refused."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxrl.config import ConfigError, load
from jaxrl.devices import build_mesh
from tools import memory_report

ROOT = Path(__file__).parents[2]
ENGINE = """
import asyncio
from flax import nnx
from jaxrl.assembly import build_model
from jaxrl.config import ConfigError, load
from jaxrl.contracts import SampleKey, Sampling
from jaxrl.devices import build_mesh
from jaxrl.engine.engine import Engine, EngineOptions

OPTIONS = EngineOptions(slots=4, context=64, parked=2, prefill_rows=2, prefill_buckets=(16,), decode_steps=4)

async def said(engine):
    async with engine:
        await engine.warm_up()
        count = engine.steps.programs()
        made = []
        for number in range(3):
            session = engine.open_session()
            key = SampleKey(1, "task", 0, number, 0)
            turn = await session.generate(
                range(5, 40), key=key, sampling=Sampling(), max_tokens=12, stop_ids=[2]
            )
            made.append((turn.tokens, turn.logprobs))
        assert engine.steps.programs() == count, "something compiled after the warm-up"
        return made

for more, words in ((["rl.rows_per_microbatch=3"], "multiple of mesh.data"), (["rl.lora.rank=2"], "rl.lora")):
    try:
        build_mesh(load(overrides=["mesh.data=4", "mesh.fsdp=2", *more]))
    except ConfigError as error:
        assert words in str(error), error
    else:
        raise AssertionError(more)
config = load(overrides=["mesh.data=2", "mesh.tensor=2", "mesh.expert=2"])
mesh = build_mesh(config)
alone = asyncio.run(said(Engine(build_model(config), OPTIONS)))
spread = Engine(build_model(config, mesh=mesh), OPTIONS, mesh=mesh)
keys = spread._device.cache.kv[0].k_PSKH
assert keys.addressable_shards[0].data.shape[2] * 2 == keys.shape[2], keys.sharding
for (tokens, logprobs), (others, theirs) in zip(alone, asyncio.run(said(spread)), strict=True):
    assert tokens == others
    assert max(abs(a - b) for a, b in zip(logprobs, theirs, strict=True)) < 1e-4
print("equal")
"""
STEPS = ["run.steps=2", "rl.prompts_per_step=4", "tasks.train_count=8", "tasks.validation_count=2"]
FEW = [*STEPS, "sandbox.concurrency=8", "engine.slots=8", "evaluation.samples=1"]


def alone(program: list[str]) -> subprocess.CompletedProcess[str]:
    """A program with eight CPU devices."""
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *program],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_one_device_needs_no_mesh_and_others_must_be_there() -> None:
    assert build_mesh(load()) is None
    with pytest.raises(ConfigError, match=rf"mesh.tensor = 3.*: expected a product of {len(jax.devices())}"):
        build_mesh(load(overrides=["mesh.tensor=3"]))


def test_a_report_of_one_device_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        memory_report.main([])
    assert "expected axes for more than one device" in capsys.readouterr().err


@pytest.mark.slow
def test_an_engine_on_a_mesh_says_what_one_device_says() -> None:
    done = alone(["-c", ENGINE])
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]


@pytest.mark.slow
def test_training_on_a_mesh_and_resuming_it(tmp_path: Path) -> None:
    axes = ["mesh.data=2", "mesh.fsdp=2", "mesh.expert=2"]
    command = ["-m", "jaxrl.train", *FEW, *axes, f"run.output_dir={tmp_path}"]
    for steps, words in (("1", "step 1/1"), ("2", "goes on after step 1")):
        done = alone([*command, f"run.steps={steps}"])
        assert done.returncode == 0 and words in done.stdout, done.stdout + done.stderr[-3000:]
    assert (tmp_path / "quickstart" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [1])
def test_the_learner_of_the_smallest_published_model_compiles_for_a_node(fsdp: int) -> None:
    """Weights, moments and gradients: 16 bytes a parameter, on each device or split over all."""
    axes = ["mesh.data=1", "mesh.fsdp=8"] if fsdp == 8 else []
    done = alone(["-m", "tools.memory_report", "configs/qwen3_5_0_8b.yaml", *axes])
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    weights, more = (
        float(last.split(word)[1].split(",")[0]) for word in ("weights ", "moments and gradients ")
    )
    assert weights == pytest.approx(3.0 / fsdp, abs=0.06) and more == pytest.approx(9.0 / fsdp, abs=0.06), (
        last
    )
    assert float(last.split("together ")[1].split()[0]) < 75
