"""Builds the parts of a run from its settings. Only entry points import this module."""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from flax import nnx

from jaxrl import config as settings
from jaxrl.config import Config, ConfigError
from jaxrl.model.hub import load_hub
from jaxrl.model.presets import PRESETS
from jaxrl.model.transformer import Transformer
from jaxrl.rl.optimizer import OptimizerOptions
from jaxrl.rollout.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")


def command_config(command: str, argv: Sequence[str] | None) -> Config:
    """Settings from a command line: at most one YAML file, then `section.key=value`.

    Prints help or the error and exits where there is nothing to run.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(settings.render_help(command))
        raise SystemExit(0)
    files = [each for each in arguments if "=" not in each]
    try:
        if len(files) > 1:
            raise ConfigError(f"expected at most one YAML file, got {files}")
        return settings.load(files[0] if files else None, [each for each in arguments if "=" in each])
    except ConfigError as error:
        raise SystemExit(f"{command}: {error}") from None


def resource(path: str) -> Path:
    """A path of the settings: as it stands, else relative to the repository."""
    return Path(path) if Path(path).exists() else ROOT / path


def build_tokenizer(config: Config) -> Tokenizer:
    """Raises `ConfigError` if there is no such file."""
    path = resource(config.model.tokenizer)
    if not path.is_file():
        raise ConfigError(f"model.tokenizer = {config.model.tokenizer}: expected a tokenizer.json, found none")
    return Tokenizer.load(path)


def build_model(config: Config) -> Transformer:
    """The model with starting weights, or random ones where `model.checkpoint` is null."""
    if config.model.checkpoint is not None:
        path = resource(config.model.checkpoint)
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model.checkpoint = {config.model.checkpoint}: expected a folder with config.json and "
                "model.safetensors; null starts from random weights"
            )
        return load_hub(path)
    if config.model.preset not in PRESETS:
        raise ConfigError(
            f"model.preset = {config.model.preset!r}: expected one of {', '.join(sorted(PRESETS))}"
        )
    return Transformer(PRESETS[config.model.preset], rngs=nnx.Rngs(config.run.seed))


def learner_options(config: Config, *, total_steps: int) -> OptimizerOptions:
    """The optimizer's settings for a training of `total_steps` updates."""
    chosen = config.optimizer
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
