"""Settings: chains, overrides, and errors that say what to do."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from jaxrl.config import (
    QUICKSTART,
    Config,
    ConfigError,
    from_command_line,
    load,
    render_help,
    to_json,
    to_yaml,
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def message_of(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


def test_without_a_file_it_is_the_quickstart():
    assert load() == load(QUICKSTART)
    assert load().run.run_name == "quickstart"


def test_a_chain_of_bases_is_read_relative_to_each_file_and_the_last_word_wins(tmp_path):
    write(tmp_path, "common/root.yaml", "rl: {group_size: 4, clip_low: 0.1}\nrun: {seed: 7}\n")
    write(tmp_path, "common/middle.yaml", "base: root.yaml\nrl:\n  group_size: 6\noptimizer:\n")
    leaf = write(tmp_path, "leaf.yaml", "base: common/middle.yaml\nrun: {steps: 9}\n")
    config = load(leaf, ["rl.clip_low=0.3", "steps=11", "rl={clip_high: 0.5}"])
    assert (config.rl.group_size, config.rl.clip_low, config.rl.clip_high) == (6, 0.3, 0.5)
    assert (config.run.seed, config.run.steps) == (7, 11)


def test_override_values_are_yaml():
    overrides = ["model.checkpoint=null", "optimizer.learning_rate=3e-4", "rl.shuffle_rewards=true"]
    config = load(None, [*overrides, "evaluation.sampling_sets=[[0, 1], [0.1, 0.95]]"])
    assert config.model.checkpoint is None
    assert config.optimizer.learning_rate == 3e-4
    assert config.rl.shuffle_rewards is True
    assert config.evaluation.sampling_sets == ((0.0, 1.0), (0.1, 0.95))


def test_an_unknown_key_names_its_file_and_the_nearest_key(tmp_path):
    path = write(tmp_path, "x.yaml", "rl:\n  group_sise: 8\n")
    assert message_of(path) == f"unknown key rl.group_sise in {path}; did you mean group_size?"


def test_the_error_names_the_file_of_the_chain_that_is_wrong(tmp_path):
    root = write(tmp_path, "root.yaml", "engine: {slots: many}\n")
    leaf = write(tmp_path, "leaf.yaml", "base: root.yaml\nengine: {context: 64}\n")
    message = message_of(leaf)
    assert message.startswith(f"engine.slots = 'many' in {root}: expected a valid integer")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rl.group_size=1", "rl.group_size = 1 on the command line: expected greater than or equal to 2"),
        ("tasks.set=foo", "tasks.set = 'foo' on the command line: expected 'generated'"),
        ("optimiser.eps=1", "unknown key optimiser on the command line; did you mean optimizer?"),
        ("rl=4", "rl = 4 on the command line: expected a section with keys"),
        ("stesp=4", "unknown key run.stesp on the command line; did you mean steps?"),
        ("zzz.a=1", "unknown key zzz on the command line; expected one of run, model"),
        ("steps", "'steps' on the command line: expected section.key=value"),
        ("steps=[", "steps = '[' on the command line: expected a YAML value"),
        ("optimizer.eps=.inf", "optimizer.eps = inf on the command line: expected a finite number"),
        ("evaluation.sampling_sets=[[1, 2]]", "evaluation.sampling_sets.0.1 = 2 on the command line"),
    ],
)
def test_a_wrong_override_is_explained_in_one_line(override, expected):
    message = message_of(None, override)
    assert message.startswith(expected)
    assert "\n" not in message


def test_every_wrong_key_is_reported_at_once():
    assert len(message_of(None, "rl.group_size=1", "engine.slots=0").splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a: [", "is not valid YAML"), ("- 1\n", "expected sections"), ("base: 3\n", "expected the name")],
)
def test_a_broken_file_is_explained(tmp_path, text, expected):
    assert expected in message_of(write(tmp_path, "x.yaml", text))


def test_a_missing_file_and_a_circle_of_bases_are_explained(tmp_path):
    assert "can't read" in message_of(tmp_path / "none.yaml")
    a = write(tmp_path, "a.yaml", "base: b.yaml\n")
    write(tmp_path, "b.yaml", "base: a.yaml\n")
    assert "goes in a circle" in message_of(a)


@given(
    steps=st.integers(0, 10**6),
    rate=st.floats(1e-9, 1.0),
    checkpoint=st.none() | st.text(min_size=1),
    sets=st.lists(st.tuples(st.floats(0, 5), st.floats(1e-3, 1)), min_size=1, max_size=3),
)
def test_the_resolved_settings_load_to_themselves(tmp_path_factory, steps, rate, checkpoint, sets):
    fields = Config().model_dump()
    fields["run"]["steps"], fields["optimizer"]["learning_rate"] = steps, rate
    fields["model"]["checkpoint"], fields["evaluation"]["sampling_sets"] = checkpoint, sets
    config = Config.model_validate(fields)
    path = tmp_path_factory.mktemp("resolved") / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(path) == config
    assert Config.model_validate(json.loads(to_json(config))) == config


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config().run.steps = 5  # type: ignore[misc]


def test_help_shows_every_field_with_its_meaning():
    config = load()
    text = render_help(config, "python -m jaxrl.train")

    def check(section: BaseModel, name: str) -> None:
        for key, field in type(section).model_fields.items():
            value = getattr(section, key)
            if isinstance(value, BaseModel):
                check(value, f"{name}.{key}")
                continue
            assert f"  {name}.{key}=" in text
            assert field.description and field.description.splitlines()[0] in text

    for name in Config.model_fields:
        check(getattr(config, name), name)


def test_help_shows_the_values_in_force(tmp_path, capsys):
    def shown(*arguments: str) -> dict[str, str]:
        with pytest.raises(SystemExit) as caught:
            from_command_line([*arguments, "--help"], command="x")
        assert caught.value.code == 0
        lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "=" in line]
        return {first.partition("=")[0]: f"{first.partition('=')[2]} {rest}" for first, rest in lines}

    quickstart, default = load().run.steps, Config().run.steps
    assert quickstart != default
    steps = shown()["run.steps"]
    assert steps.startswith(f"{quickstart} ") and steps.endswith(f" [{default}]")
    assert shown("steps=77")["run.steps"].startswith("77 ")
    path = write(tmp_path, "x.yaml", "run: {seed: 3}\n")
    assert shown(str(path))["run.steps"].startswith(f"{default} ")
    assert shown(str(path))["run.seed"].startswith("3 ")


def test_a_command_takes_a_file_and_settings_in_any_order(tmp_path):
    path = write(tmp_path, "x.yaml", "run: {seed: 3}\n")
    config = from_command_line(["steps=2", str(path), "rl.group_size=4"], command="x")
    assert (config.run.seed, config.run.steps, config.rl.group_size) == (3, 2, 4)
    assert from_command_line([], command="x") == load()


@pytest.mark.parametrize("arguments", [["a.yaml", "b.yaml"], ["--steps"], ["rl.group_size=x"], ["no.yaml"]])
def test_a_command_with_wrong_settings_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        from_command_line(arguments, command="python -m jaxrl.train")
    assert caught.value.code == 2
    assert "(python -m jaxrl.train --help lists every setting)" in capsys.readouterr().err


def test_help_ends_with_status_0(capsys):
    with pytest.raises(SystemExit) as caught:
        from_command_line(["steps=1", "--help"], command="python -m jaxrl.train")
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m jaxrl.train [file.yaml]")
