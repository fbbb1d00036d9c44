"""Algorithms by name: what a preset sets, what overrides it, and settings that contradict one another."""

from pathlib import Path

import pytest

from jaxrl.algorithm import build_learner, check_algorithm, group_options, parametrisation, policy_loss
from jaxrl.assembly import build_model
from jaxrl.config import Config, ConfigError, load, render_help, to_yaml
from jaxrl.contracts import OUTCOME_RULES, Outcome
from jaxrl.model.presets import PRESETS as MODELS
from jaxrl.rl.advantage import MLPERF_REFERENCE
from jaxrl.rl.lora import LowRank
from jaxrl.rl.loss import PolicyLoss
from jaxrl.rl.presets import PRESETS


def config(**rl) -> Config:
    """Settings of the section `rl` alone: no file, so that a preset fills in all that is left out."""
    return Config.model_validate({"rl": rl})


def test_the_quickstarts_loss_is_the_default_one():
    loaded = load()
    assert policy_loss(loaded) == PolicyLoss(z_coefficient=1e-3)
    assert group_options(loaded).rules == OUTCOME_RULES and group_options(loaded).overlong is None


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_existing_keys_and_goes_together(name):
    made = config(preset=name)
    check_algorithm(made)
    values = made.rl.model_dump()
    for key, value in PRESETS[name].items():
        got = values[key]
        if isinstance(value, dict):
            assert value.items() <= got.items()
        else:
            assert (list(got) if isinstance(got, tuple) else got) == value
    assert values != config().rl.model_dump() | {"preset": name}


def test_the_benchmarks_preset_is_its_reference():
    made = config(preset="mlperf_v6_1")
    assert policy_loss(made) == PolicyLoss(
        ratio="on_policy",
        importance="sequence_mask",
        importance_min=0.999,
        importance_max=1.002,
        sequence_error_limit=2.0,
    )
    options = group_options(made)
    assert options.advantage == MLPERF_REFERENCE and not options.drop_equal_groups
    changed = {outcome for outcome in Outcome if options.rules[outcome] != OUTCOME_RULES[outcome]}
    assert changed == {Outcome.CONTEXT_FULL}
    assert not options.rules[Outcome.CONTEXT_FULL].trained and options.rules[Outcome.CONTEXT_FULL].votes
    assert (made.rl.group_size, made.rl.updates_per_step, made.rl.router) == (16, 1, "frozen")
    assert made.rl.kl.coefficient == made.rl.aux_loss_coefficient == made.rl.z_loss_coefficient == 0
    assert made.rl.clip_c is None and made.rl.lora is None


def test_the_papers_presets_are_their_formulas():
    losses = {name: policy_loss(config(preset=name)) for name in PRESETS}
    assert (losses["grpo"].normalisation, losses["grpo"].kl_coefficient) == ("sequence", 0.04)
    assert (losses["dr_grpo"].normalisation, losses["dr_grpo"].constant_length) == ("constant", 192)
    assert (losses["dapo"].normalisation, losses["dapo"].clip_high) == ("token", 0.28)
    assert (losses["gspo"].objective, losses["gspo"].clip_low, losses["gspo"].clip_high) == (
        "gspo",
        3e-4,
        4e-4,
    )
    assert (losses["cispo"].objective, losses["cispo"].clip_low) == ("cispo", 1.0)
    stds = {name: group_options(config(preset=name)).advantage.normalise_std for name in PRESETS}
    assert [name for name, on in stds.items() if not on] == ["dr_grpo"]
    penalty = group_options(config(preset="dapo")).overlong
    assert penalty is not None and (penalty.length, penalty.cache, penalty.scale) == (192, 38, 1.0)


def test_keys_that_are_set_anywhere_override_the_preset(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("rl: {clip_high: 0.5, kl: {estimator: k2}}\n")
    leaf = tmp_path / "leaf.yaml"
    leaf.write_text("base: base.yaml\nrl: {preset: grpo}\n")
    rl = load(leaf, ["rl.kl.coefficient=0.1"]).rl
    assert (rl.clip_low, rl.clip_high) == (0.2, 0.5)
    assert (rl.kl.coefficient, rl.kl.estimator, rl.kl.reference) == (0.1, "k2", "start")


def test_resolved_values_are_what_is_written(tmp_path: Path):
    made = load(None, ["rl.preset=mlperf_v6_1", "rl.lora={rank: 4}"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(made))
    assert "sequence_error_limit: 2.0" in path.read_text() and "low: 0.999" in path.read_text()
    assert load(path) == made
    path.write_text(path.read_text().replace("preset: mlperf_v6_1", "preset: null"))
    assert policy_loss(load(path)) == policy_loss(made)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rl.preset=gdpo", "rl.preset = 'gdpo' on the command line: expected 'grpo', 'mlperf_v6_1'"),
        ("rl.preset=[1]", "rl.preset = [1] on the command line: expected 'grpo'"),
        ("rl.kl.coeficient=1", "unknown key rl.kl.coeficient on the command line; did you mean coefficient?"),
        ("rl.lora.ranc=1", "unknown key rl.lora.ranc on the command line; did you mean rank?"),
        ("rl.lora.targets=[]", "rl.lora.targets = [] on the command line: expected"),
        ("rl.lora=4", "rl.lora = 4 on the command line: expected a section with keys"),
        ("rl.masked_outcomes=[infra_error]", "rl.masked_outcomes.0 = 'infra_error' on the command line"),
        ("rl.clip_c=1", "rl.clip_c = 1 on the command line: expected greater than 1"),
    ],
)
def test_a_wrong_value_is_explained_in_one_line(override, expected):
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    message = str(caught.value)
    assert message.startswith(expected)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("rl", "words"),
    [
        ({"kl": {"coefficient": 0.1}}, r"rl.kl.coefficient = 0.1: expected rl.kl.reference"),
        ({"ratio": "recomputed"}, r"rl.ratio = recomputed: expected rl.updates_per_step above 1"),
        ({"router": "frozen", "aux_loss_coefficient": 0.1}, r"rl.aux_loss_coefficient = 0.1: expected 0"),
        ({"importance": {"kind": "truncated"}}, "rl: expected importance none with ratio sampler"),
        ({"normalisation": "token", "constant_length": 3}, "rl: expected constant_length exactly with"),
        ({"preset": "gspo", "normalisation": "token"}, "rl: expected normalisation sequence with objective"),
        ({"preset": "cispo", "clip_c": 2.0}, "rl: expected clip_c above 1, and only with objective ppo"),
        ({"importance": {"low": 3.0}}, "rl: expected importance_min of at most importance_max"),
        ({"preset": "dapo", "drop_equal_groups": False}, "rl.dynamic_sampling_rounds = 10: expected"),
        ({"dynamic_sampling_rounds": 1, "shuffle_rewards": True}, "rl.dynamic_sampling_rounds = 1: expected"),
        ({"overlong": {"penalty": 1.0, "cache": 193}}, "rl.overlong: expected a cache of 1 to length"),
    ],
)
def test_contradictions_are_refused_before_anything_is_built(rl, words):
    with pytest.raises(ConfigError, match=words):
        check_algorithm(config(**rl))


def test_help_shows_the_keys_of_a_section_that_is_off():
    text = render_help(config(), "x")
    assert "\n  rl.lora=null" in text and "\n  rl.lora.rank " in text
    assert "\n  rl.kl.estimator=" in text
    assert "\n  rl.lora.rank=4 " in render_help(config(lora={"rank": 4}), "x")


def test_what_does_not_fit_the_model_is_refused():
    model = build_model(load())
    lora = config(lora={"targets": ["experts"]})
    assert isinstance(parametrisation(lora, model.spec), LowRank)
    dense = MODELS["qwen3.5-0.8b"]
    stand_in = type("Dense", (), {"spec": dense})()
    with pytest.raises(ConfigError, match="rl.router = replayed: expected a model with experts"):
        build_learner(config(router="replayed"), stand_in)  # type: ignore[arg-type]


def test_a_reference_that_is_missing_or_another_model_is_refused(tmp_path: Path):
    model = build_model(load())
    with pytest.raises(
        ConfigError, match=f"rl.kl.reference = {tmp_path}: expected a folder with config.json"
    ):
        build_learner(config(kl={"coefficient": 0.1, "reference": str(tmp_path)}), model)
