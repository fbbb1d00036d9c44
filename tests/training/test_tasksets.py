"""The settings choose the task set; splits of projects are disjoint; a task of one is played and graded."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxrl.assembly import build_tasks, check_step
from jaxrl.config import ConfigError, load
from jaxrl.contracts import Outcome
from jaxrl.rollout.agent import World, run_episode
from jaxrl.rollout.calls import render_call
from jaxrl.rollout.harness import OPENHANDS
from jaxrl.rollout.renderer import Renderer
from jaxrl.tasksets import First, _of_split
from sandbox.agent_tools.openhands import openhands_tools
from sandbox.base import Limits
from sandbox.grading.grader import Grader
from sandbox.grading.graders import Graders
from sandbox.grading.suite import SuiteGrader
from sandbox.namespace import NamespaceProvider
from sandbox.pool import SandboxPool
from sandbox.tasks.build import Definitions, load_task_set
from sandbox.tasks.r2e_gym import R2EGymTasks
from sandbox.tasks.recipes import MutationRecipe
from sandbox.tasks.schema import SuiteTests
from tests.rollout.rollout_fakes import ATTEMPT, END, TOKENIZER, FakeGenerator
from tests.sandbox.test_tasks_r2e import row, written

DEFINITIONS = Path(__file__).parents[2] / "configs" / "tasks"
NAMES = {"a": "one", "b": "two", "c": "two", "d": "three"}


def projects(**keys: str):
    return load(overrides=["tasks.set=projects", *(f"tasks.{key}={value}" for key, value in keys.items())])


def test_projects_of_splits_are_disjoint() -> None:
    config = projects(validation_projects="[two]", test_projects="[three]")
    splits = {split: _of_split(config, split, NAMES) for split in ("train", "validation", "test")}
    assert splits == {"train": {"a"}, "validation": {"b", "c"}, "test": {"d"}}


@pytest.mark.parametrize(
    ("keys", "split", "words"),
    [
        ({"validation_projects": "[four]"}, "train", "validation_projects: expected projects of .* got four"),
        ({"validation_projects": "[two]", "test_projects": "[two]"}, "train", "two is held out"),
        ({"validation_projects": "[two]"}, "test", "test_projects: expected at least one project"),
        ({"validation_projects": "[one,two,three]"}, "train", "none is left to train on"),
    ],
)
def test_wrong_splits_are_one_clear_sentence(keys: dict[str, str], split, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _of_split(projects(**keys), split, NAMES)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tasks.set=projects", "tasks.definitions=none"], "tasks.definitions = none: .*none"),
        (["tasks.set=r2e_gym"], "tasks.train_rows: expected a path"),
        (["tasks.set=r2e_gym", "tasks.train_rows=none"], "tasks.images: expected a path"),
        (["tasks.set=r2e_gym", "tasks.train_rows=none", "tasks.images=/"], "tasks.train_rows = none: .*none"),
    ],
)
def test_what_is_missing_is_named(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_tasks(load(overrides=overrides), "train")


def test_a_step_of_more_tasks_than_there_are_is_refused() -> None:
    config = load(overrides=["tasks.train_count=16", "rl.prompts_per_step=16"])
    tasks = build_tasks(config, "train")
    check_step(config, tasks)
    with pytest.raises(ConfigError, match="rl.prompts_per_step = 17: expected at most 16"):
        check_step(load(overrides=["rl.prompts_per_step=17"]), tasks)


def test_rows_with_images_in_an_engine_or_in_a_folder(tmp_path: Path) -> None:
    rows = written(tmp_path, [row(1), row(2)])
    keys = ["tasks.set=r2e_gym", f"tasks.train_rows={rows}"]
    specs = build_tasks(load(overrides=[*keys, "sandbox.backend=docker"]), "train").specs
    assert len(specs) == 2 and all(spec.image.root is None and spec.image.name for spec in specs)
    with pytest.raises(ConfigError, match="for each of 2 rows; 2 are missing, the first is"):
        build_tasks(load(overrides=[*keys, f"tasks.images={tmp_path}"]), "train")
    for spec in R2EGymTasks(rows, tmp_path).specs:
        assert spec.image.root is not None
        spec.image.root.touch()
    assert len(build_tasks(load(overrides=[*keys, f"tasks.images={tmp_path}"]), "train")) == 2


def test_the_first_tasks_of_a_set() -> None:
    tasks = build_tasks(load(), "validation")
    few = First(tasks, 3)
    assert [spec.instance_id for spec in few.specs] == [spec.instance_id for spec in tasks.specs[:3]]
    assert few.hidden(few.specs[0].instance_id) == tasks.hidden(tasks.specs[0].instance_id)
    assert len(First(tasks, 10_000)) == len(tasks) and few.digest != First(tasks, 4).digest


def call(name: str, **arguments: str) -> str:
    return render_call(name, arguments) + END


@pytest.mark.slow
@pytest.mark.parametrize("repaired", [True, False])
async def test_a_projects_task_is_played_and_graded(repaired: bool) -> None:
    recipe = next(
        each
        for each in Definitions(DEFINITIONS).recipes()
        if isinstance(each, MutationRecipe) and each.project.startswith("sqlparse")
    )
    said: list[str] = []
    tasks = load_task_set(DEFINITIONS, ids=[recipe.instance_id], tell=said.append)
    assert "environment" in said[0] and said[1:] == [f"task 1 of 1: {recipe.instance_id}"]
    task = replace(tasks.specs[0], agent_timeout=240.0)
    hidden = tasks.hidden(task.instance_id)
    assert isinstance(hidden, SuiteTests)
    (path, fixed), *_ = hidden.reference.items()
    assert fixed is not None and task.image.source is not None
    broken = (task.image.source / path).read_text()
    episode = [
        call("execute_bash", command="git log --oneline | wc -l && git status --short"),
        call("str_replace_editor", command="view", path=f"/testbed/{path}", view_range="[1, 5]"),
    ]
    if repaired:
        change = call("execute_bash", command=f"cat > /testbed/{path} <<'THE_END'\n{fixed.decode()}THE_END")
        episode.append(change)
    else:
        episode.append(call("execute_bash", command=f"echo '# looked at' >> /testbed/{path}"))
    episode.append(call("finish", message="done"))
    assert broken != fixed.decode()
    provider = NamespaceProvider()
    pool = SandboxPool(provider, size=1, limits=Limits(disk=256 << 20, pids=256, memory=1 << 30))
    grader = Graders(expressions=Grader(graders=1), suites=SuiteGrader(provider))
    world = World(
        generator=FakeGenerator(tuple(episode), context=1_000_000),
        sandboxes=pool,
        grader=grader,
        tools=openhands_tools(),
        renderer=Renderer(TOKENIZER, OPENHANDS),
    )
    try:
        played = await run_episode(task, hidden, attempt=ATTEMPT, world=world)
    finally:
        await grader.close()
        await pool.close()
    wanted = Outcome.RESOLVED if repaired else Outcome.UNRESOLVED
    assert (played.outcome, played.reward) == (wanted, float(repaired)), played.detail
