"""The settings choose the harness, its texts, limits and tools; wrong files are one clear sentence."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxrl.assembly import build_harness, build_tools
from jaxrl.config import ConfigError, load
from jaxrl.rollout.harness import COMPACT, OPENHANDS
from sandbox.agent_tools.execute_bash import ExecuteBash


def test_the_default_is_compact_as_it_is() -> None:
    config = load()
    assert build_harness(config) == COMPACT
    assert tuple(build_tools(config)) == COMPACT.tools


def test_openhands_brings_its_own_limits_and_tools() -> None:
    config = load(overrides=["harness.name=openhands"])
    assert build_harness(config) == OPENHANDS
    assert tuple(build_tools(config)) == OPENHANDS.tools


def test_settings_overrule_the_harness() -> None:
    overrides = [
        "harness.name=openhands",
        "harness.max_turns=3",
        "harness.turn_tokens=99",
        "harness.detect_loops=false",
    ]
    made = build_harness(load(overrides=overrides))
    assert made == replace(OPENHANDS, max_turns=3, turn_tokens=99, detect_loops=False)
    config = load(
        overrides=["harness.name=openhands", "harness.soft_timeout=5", "harness.normalise_output=false"]
    )
    bash = build_tools(config)["execute_bash"]
    assert isinstance(bash, ExecuteBash) and (bash.soft_timeout, bash.normalise) == (5.0, False)


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "user.j2"
    path.write_text("Fix {{ workspace_path }}")
    made = build_harness(load(overrides=["harness.name=openhands", f"harness.user_prompt={path}"]))
    assert made == replace(OPENHANDS, prompt="Fix {{ workspace_path }}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["harness.user_prompt=none.j2"], "harness.user_prompt: .*no prompt files with the harness compact"),
        (
            ["harness.name=openhands", "harness.user_prompt=none.j2"],
            "harness.user_prompt: .*none.j2: expected a text",
        ),
        (
            ["harness.name=openhands", "harness.tool_texts=none.json"],
            "harness.tool_texts: .*none.json: expected a JSON",
        ),
        (["harness.name=openhand"], "harness.name"),
        (["harness.max_turns=0"], "harness.max_turns"),
    ],
)
def test_wrong_choices_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_harness(load(overrides=overrides))
