"""The learning algorithm that the settings describe: advantages, loss, what is trained. Entry points only."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxrl.assembly import learner_options, load_weights
from jaxrl.config import Config, ConfigError
from jaxrl.contracts import Outcome
from jaxrl.devices import place_learner
from jaxrl.model.spec import ModelSpec
from jaxrl.model.transformer import Transformer
from jaxrl.rl.advantage import AdvantageOptions
from jaxrl.rl.examples import GroupOptions, with_masked
from jaxrl.rl.learner import Learner
from jaxrl.rl.lora import LowRank, projections
from jaxrl.rl.loss import PolicyLoss
from jaxrl.rl.overlong import OverlongPenalty
from jaxrl.rl.parameters import Direct, Parametrisation, without_router
from jaxrl.rl.scoring import TransformerScorer

START = "start"
"""The reference policy that the run starts from."""


def check_algorithm(config: Config) -> None:
    """Raises `ConfigError` for settings of the algorithm that contradict one another."""
    rl = config.rl
    if rl.kl.coefficient and rl.kl.reference is None:
        raise ConfigError(
            f"rl.kl.coefficient = {rl.kl.coefficient}: expected rl.kl.reference, to which the distance is "
            f"taken: {START}, or the folder of other weights"
        )
    if rl.ratio == "recomputed" and rl.updates_per_step == 1:
        raise ConfigError(
            "rl.ratio = recomputed: expected rl.updates_per_step above 1; before the first update the ratio "
            "is 1, which is rl.ratio = on_policy"
        )
    if rl.router == "frozen" and rl.aux_loss_coefficient:
        raise ConfigError(
            f"rl.aux_loss_coefficient = {rl.aux_loss_coefficient}: expected 0 with rl.router = frozen, which "
            "no loss can balance"
        )
    if rl.dynamic_sampling_rounds and (not rl.drop_equal_groups or rl.shuffle_rewards):
        raise ConfigError(
            f"rl.dynamic_sampling_rounds = {rl.dynamic_sampling_rounds}: expected rl.drop_equal_groups = "
            "true and rl.shuffle_rewards = false: the groups that further draws replace are left out, by "
            "rewards of their own"
        )
    policy_loss(config)
    group_options(config)


def build_learner(config: Config, model: Transformer, *, mesh: Mesh | None = None) -> Learner[Transformer]:
    """The learner with the settings' loss, parameters and optimizer. Raises `ConfigError`."""
    if config.rl.router == "replayed" and not model.spec.is_moe:
        raise ConfigError("rl.router = replayed: expected a model with experts, got a dense one")
    reference = _reference(config, model, mesh)
    try:
        return Learner(
            model,
            score=TransformerScorer(
                temperature=config.sampling.temperature,
                remat=config.rl.remat,
                replay=config.rl.router == "replayed",
            ),
            loss=policy_loss(config),
            options=learner_options(config, total_steps=config.run.steps * config.rl.updates_per_step),
            parameters=parametrisation(config, model.spec),
            reference=reference,
            placement=place_learner(model, mesh),
        )
    except ValueError as error:
        if isinstance(error, ConfigError) or config.rl.lora is None:
            raise
        raise ConfigError(f"rl.lora.targets = {list(config.rl.lora.targets)}: {error}") from error


def policy_loss(config: Config) -> PolicyLoss:
    """The loss of the section `rl`. Raises `ConfigError` for pieces that do not go together."""
    rl = config.rl
    length = rl.constant_length
    if rl.normalisation == "constant" and length is None:
        length = config.engine.context
    try:
        return PolicyLoss(
            objective=rl.objective,
            ratio=rl.ratio,
            clip_low=rl.clip_low,
            clip_high=rl.clip_high,
            clip_c=rl.clip_c,
            importance=rl.importance.kind,
            importance_min=rl.importance.low,
            importance_max=rl.importance.high,
            normalisation=rl.normalisation,
            constant_length=length,
            kl_coefficient=rl.kl.coefficient,
            kl_estimator=rl.kl.estimator,
            sequence_error_limit=rl.sequence_error_limit,
            aux_coefficient=rl.aux_loss_coefficient,
            z_coefficient=rl.z_loss_coefficient,
        )
    except ValueError as error:
        raise ConfigError(f"rl: {error}") from error


def group_options(config: Config) -> GroupOptions:
    """How the section `rl` makes examples of a group. Raises `ConfigError`."""
    rl = config.rl
    return GroupOptions(
        advantage=AdvantageOptions(
            baseline=rl.baseline, normalise_std=rl.normalise_std, masked_vote=rl.masked_vote
        ),
        drop_equal_groups=rl.drop_equal_groups,
        rules=with_masked(map(Outcome, rl.masked_outcomes)),
        overlong=_overlong(config),
    )


def parametrisation(config: Config, spec: ModelSpec) -> Parametrisation:
    """What the section `rl` trains of a model of `spec`."""
    lora = config.rl.lora
    if lora is None:
        return Direct(without_router if config.rl.router == "frozen" else None)
    return LowRank(
        rank=lora.rank, alpha=lora.alpha, adapts=projections(spec, lora.targets), seed=config.run.seed
    )


def _overlong(config: Config) -> OverlongPenalty | None:
    chosen = config.rl.overlong
    if not chosen.penalty:
        return None
    length = chosen.length or config.engine.context
    try:
        return OverlongPenalty(length=length, cache=chosen.cache or max(length // 5, 1), scale=chosen.penalty)
    except ValueError as error:
        raise ConfigError(f"rl.overlong: {error}") from error


def _reference(config: Config, model: Transformer, mesh: Mesh | None) -> nnx.State | None:
    """The weights of the reference policy, if the loss asks for one."""
    folder = config.rl.kl.reference
    if not config.rl.kl.coefficient or folder is None:
        return None
    if folder == START:
        # Updates consume the arrays that they train; under adapters those are not the model's.
        own = nnx.state(model)
        return jax.tree.map(jnp.copy, own) if config.rl.lora is None else own
    other = load_weights(folder, key="rl.kl.reference", dtype=config.model.dtype, mesh=mesh)
    if other.spec != model.spec:
        raise ConfigError(
            f"rl.kl.reference = {folder}: expected a model like the one that is trained, got another: "
            f"{other.spec} instead of {model.spec}"
        )
    return nnx.state(other)
