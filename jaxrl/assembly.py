"""Builds the parts of a run from its settings. Only entry points import this module."""

import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError

from jaxrl import tasksets
from jaxrl.config import Config, ConfigError
from jaxrl.contracts import Generator, Sampling
from jaxrl.engine.engine import Engine, EngineError, EngineOptions
from jaxrl.model.hub import load_hub, save_hub
from jaxrl.model.presets import PRESETS
from jaxrl.model.spec import Dtype, ModelSpec
from jaxrl.model.transformer import Transformer
from jaxrl.rl.optimizer import OptimizerOptions
from jaxrl.rollout.agent import World
from jaxrl.rollout.harness import Harness, harness, with_texts
from jaxrl.rollout.renderer import Renderer
from jaxrl.rollout.tokenizer import Tokenizer
from jaxrl.tasksets import Split, Tasks
from sandbox.agent_tools.base import Stateful, Tool
from sandbox.agent_tools.compact import compact_tools
from sandbox.agent_tools.openhands import openhands_tools
from sandbox.apptainer_backend import ApptainerProvider
from sandbox.base import Limits, SandboxError, SandboxProvider
from sandbox.docker_backend import DockerProvider
from sandbox.grading.grader import Grader
from sandbox.grading.graders import Graders
from sandbox.grading.suite import SuiteGrader
from sandbox.namespace import NamespaceProvider
from sandbox.pool import SandboxPool

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")


def resource(path: str) -> Path:
    """A path of the settings: as it stands, else relative to the repository."""
    return Path(path) if Path(path).exists() else ROOT / path


def build_tokenizer(config: Config) -> Tokenizer:
    """Raises `ConfigError` if there is no such file."""
    path = resource(config.model.tokenizer)
    if not path.is_file():
        raise ConfigError(
            f"model.tokenizer = {config.model.tokenizer}: expected a tokenizer.json, found none"
        )
    return Tokenizer.load(path)


def build_model(config: Config, *, mesh: Mesh | None = None) -> Transformer:
    """The model with starting weights on `mesh`, or random ones where `model.checkpoint` is null."""
    if config.model.checkpoint is not None:
        return load_weights(
            config.model.checkpoint, key="model.checkpoint", dtype=config.model.dtype, mesh=mesh
        )
    return Transformer(preset_spec(config), rngs=nnx.Rngs(config.run.seed))


def preset_spec(config: Config) -> ModelSpec:
    """The sizes of `model.preset` in `model.dtype`. Raises `ConfigError` for an unknown one."""
    if config.model.preset not in PRESETS:
        raise ConfigError(
            f"model.preset = {config.model.preset!r}: expected one of {', '.join(sorted(PRESETS))}"
        )
    spec = PRESETS[config.model.preset]
    return replace(spec, dtype=config.model.dtype or spec.dtype)


def export_model(config: Config, model: Transformer, folder: Path) -> None:
    """Writes the trained model in hub layout, with its tokenizer and what its checkpoint held besides."""
    start = config.model.checkpoint
    save_hub(model, folder, source=None if start is None else resource(start))
    shutil.copyfile(resource(config.model.tokenizer), folder / "tokenizer.json")


def load_weights(
    folder: str, *, key: str, dtype: Dtype | None = None, mesh: Mesh | None = None
) -> Transformer:
    """The model in `folder`, which the setting `key` names. Raises `ConfigError`."""
    path = resource(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{key} = {folder}: expected a folder with config.json and model.safetensors")
    try:
        return load_hub(path, dtype=dtype, mesh=mesh)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = error.args[0] if isinstance(error, KeyError) else error
        raise ConfigError(f"{key} = {folder}: {reason}") from error


def build_tasks(config: Config, split: Split, *, tell: Callable[[str], None] = lambda _: None) -> Tasks:
    """The tasks of a split, in cursor order; `tell` hears of what takes long. Raises `ConfigError`."""
    return tasksets.build_tasks(config, split, resource=resource, tell=tell)


def check_sizes(config: Config) -> None:
    """Raises `ConfigError` for numbers that each are right and together could not train."""
    rl, engine = config.rl, config.engine
    if config.tasks.set == "generated" and rl.prompts_per_step > config.tasks.train_count:
        raise ConfigError(
            f"rl.prompts_per_step = {rl.prompts_per_step}: expected at most tasks.train_count = "
            f"{config.tasks.train_count}, so that no step holds a task twice"
        )
    if rl.row_length < engine.context:
        raise ConfigError(
            f"rl.row_length = {rl.row_length}: expected at least engine.context = {engine.context}, so that "
            "every episode fits into a row"
        )


def check_step(config: Config, tasks: Tasks) -> None:
    """Raises `ConfigError` if the training tasks are fewer than a step takes."""
    wanted = config.rl.prompts_per_step
    if wanted > len(tasks):
        raise ConfigError(
            f"rl.prompts_per_step = {wanted}: expected at most {len(tasks)}, the number of training tasks"
        )


def check_prompts(world: World, tasks: Tasks) -> None:
    """Raises `ConfigError` if the engine cannot hold a task's prompt and one token more."""
    longest = max(len(world.renderer.initial(task)) for task in tasks.specs)
    if longest >= world.generator.context:
        raise ConfigError(
            f"engine.context = {world.generator.context}: expected more than the longest prompt, which has "
            f"{longest} tokens"
        )


def build_harness(config: Config) -> Harness:
    """The harness with the texts and limits of the settings. Raises `ConfigError`."""
    chosen = config.harness
    files = {key: getattr(chosen, key) for key in ("system_prompt", "user_prompt", "tool_texts")}
    paths = {key: None if value is None else resource(value) for key, value in files.items()}
    limits = {key: getattr(chosen, key) for key in ("max_turns", "turn_tokens", "detect_loops")}
    try:
        made = with_texts(harness(chosen.name), **paths)
    except ValueError as error:
        given = ", ".join(f"harness.{key}" for key, value in files.items() if value is not None)
        raise ConfigError(f"{given}: {error}") from error
    return replace(made, **{key: value for key, value in limits.items() if value is not None})


def build_tools(config: Config) -> Mapping[str, Tool | Stateful]:
    """The tools of the harness."""
    if config.harness.name == "openhands":
        chosen = config.harness
        return openhands_tools(soft_timeout=chosen.soft_timeout, normalise=chosen.normalise_output)
    return compact_tools()


def build_sampling(config: Config) -> Sampling:
    """How training rollouts are sampled.

    Raises `ConfigError` for a truncated distribution: the trainer would differentiate another one.
    """
    chosen = config.sampling
    if chosen.temperature == 0 or chosen.top_p < 1 or chosen.top_k or chosen.min_p:
        raise ConfigError(
            f"sampling = {chosen.model_dump()}: expected temperature above 0 and top_p 1, top_k 0, min_p 0: "
            "training differentiates the whole softmax, so it must be what is sampled"
        )
    return Sampling(temperature=chosen.temperature)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What rollouts need, running."""

    world: World
    engine: Engine
    pool: SandboxPool
    grader: Graders


@asynccontextmanager
async def open_parts(
    config: Config, model: Transformer, device: Executor, *, mesh: Mesh | None = None
) -> AsyncIterator[Parts]:
    """Starts engine, sandboxes and graders; everything they started is gone at the end.

    Raises `ConfigError` for sizes that do not fit together, and where sandboxes cannot run.
    """
    tokenizer = build_tokenizer(config)
    if tokenizer.size > model.spec.vocab_size:
        raise ConfigError(
            f"model.tokenizer = {config.model.tokenizer}: {tokenizer.size} ids, but the model has only "
            f"{model.spec.vocab_size}"
        )
    async with AsyncExitStack() as stack:
        pool, grader = await _sandboxes(config, stack)
        engine = await stack.enter_async_context(_engine(model, config, device, mesh))
        world = _world(config, engine, tokenizer, pool, grader)
        yield Parts(world=world, engine=engine, pool=pool, grader=grader)


@asynccontextmanager
async def open_world(config: Config, generator: Generator) -> AsyncIterator[World]:
    """As `open_parts`, with the turns of `generator` in place of a model's."""
    async with AsyncExitStack() as stack:
        pool, grader = await _sandboxes(config, stack)
        yield _world(config, generator, build_tokenizer(config), pool, grader)


def _world(
    config: Config, generator: Generator, tokenizer: Tokenizer, pool: SandboxPool, grader: Graders
) -> World:
    return World(
        generator=generator,
        sandboxes=pool,
        grader=grader,
        tools=build_tools(config),
        renderer=Renderer(tokenizer, build_harness(config)),
    )


async def _sandboxes(config: Config, stack: AsyncExitStack) -> tuple[SandboxPool, Graders]:
    try:
        provider = _provider(config)
        size, limits = config.sandbox.concurrency, _limits(config)
        pool = SandboxPool(provider, size=size, limits=limits, report=_report)
        stack.push_async_callback(pool.close)
        await pool.start()
        workers = config.grader.workers
        suites = SuiteGrader(provider, at_once=workers)
        grader = Graders(expressions=Grader(graders=workers), suites=suites)
        stack.push_async_callback(grader.close)
        if config.tasks.set == "generated":
            await grader.start()
    except SandboxError as error:
        raise ConfigError(str(error)) from error
    return pool, grader


def _report(text: str) -> None:
    print(f"sandboxes: {text}", file=sys.stderr, flush=True)


def _provider(config: Config) -> SandboxProvider:
    backend = config.sandbox.backend
    if backend != "namespace" and config.tasks.set != "r2e_gym":
        raise ConfigError(
            f"sandbox.backend = {backend}: expected namespace for tasks.set = {config.tasks.set}, whose "
            "images are directories of this machine"
        )
    match backend:
        case "docker":
            return DockerProvider()
        case "apptainer":
            return ApptainerProvider()
    return NamespaceProvider()


def _limits(config: Config) -> Limits:
    chosen = config.sandbox
    return Limits(
        cpu=chosen.cpu,
        memory=chosen.memory_mib << 20,
        disk=chosen.disk_mib << 20,
        pids=chosen.pids,
        wall=chosen.wall_seconds,
    )


def engine_options(config: Config) -> EngineOptions:
    """Sizes and policies of the engine. Raises `ConfigError`."""
    chosen = config.engine
    if list(chosen.prefill_buckets) != sorted(set(chosen.prefill_buckets)):
        raise ConfigError(
            f"engine.prefill_buckets = {list(chosen.prefill_buckets)}: expected ascending, distinct numbers"
        )
    return EngineOptions(
        slots=chosen.slots,
        context=chosen.context,
        prefill_rows=chosen.prefill_rows,
        prefill_buckets=chosen.prefill_buckets,
        decode_steps=chosen.decode_steps,
        page_size=chosen.page_size,
        cache_bytes=chosen.cache_bytes,
        parked=chosen.parked,
        host_bytes=chosen.host_bytes,
        eviction=chosen.eviction,
        routed_experts=config.rl.router == "replayed",
    )


def _engine(model: Transformer, config: Config, device: Executor, mesh: Mesh | None) -> Engine:
    try:
        return Engine(model, engine_options(config), device=device, mesh=mesh)
    except EngineError as error:
        raise ConfigError(f"engine: {error}") from error


def learner_options(config: Config, *, total_steps: int) -> OptimizerOptions:
    """The optimizer's settings for a training of `total_steps` updates.

    Raises `ConfigError` for a cosine that has no update left after the warm-up.
    """
    chosen = config.optimizer
    if chosen.schedule == "cosine" and total_steps <= chosen.warmup_steps:
        raise ConfigError(
            f"optimizer.schedule = cosine: expected more than optimizer.warmup_steps = {chosen.warmup_steps} "
            f"updates in all, got {total_steps}"
        )
    return OptimizerOptions(
        learning_rate=chosen.learning_rate,
        schedule=chosen.schedule,
        warmup_steps=chosen.warmup_steps,
        total_steps=total_steps,
        b1=chosen.b1,
        b2=chosen.b2,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        clip_norm=chosen.clip_norm,
    )


def package_versions() -> dict[str, str]:
    """Versions that numbers depend on."""
    return {"python": sys.version.split()[0]} | {name: version(name) for name in PACKAGES}
