"""Real projects end to end: from a release to a validated task. Needs the package index."""

import asyncio
import re
from collections import Counter
from pathlib import Path

import pytest

from sandbox.base import Diff, Limits
from sandbox.grading.suite import SuiteGrader
from sandbox.namespace import NamespaceProvider
from sandbox.tasks.__main__ import main
from sandbox.tasks.build import Definitions, load_task_set
from sandbox.tasks.find import find_mutations, find_release_pair, reword_recipes
from sandbox.tasks.mutation.search import Rules
from sandbox.tasks.recipes import MutationRecipe, ReleaseRecipe
from sandbox.tasks.schema import SuiteTests
from sandbox.tasks.validate import load_report, mark, validate
from tests.sandbox.mini_project import CODE, TESTS, catalogue, release

COMMITTED = Path(__file__).resolve().parents[2] / "configs" / "tasks"
FIXED = CODE.replace("self.count += times", "self.count += times if times > 0 else 0")
NEW_TESTS = {
    **TESTS,
    "tests/test_tally.py": TESTS["tests/test_tally.py"]
    + "\n\ndef test_never_less():\n    assert Tally().add('b', -3) == 0\n",
}


@pytest.fixture(scope="module")
def committed() -> Definitions:
    return Definitions(COMMITTED)


def test_committed_definitions_are_complete_and_consistent(committed: Definitions) -> None:
    recipes = committed.recipes()
    mutations = [recipe for recipe in recipes if isinstance(recipe, MutationRecipe)]
    pairs = [recipe for recipe in recipes if isinstance(recipe, ReleaseRecipe)]
    assert len(mutations) >= 200 and len({committed.project(each.project).name for each in mutations}) >= 5
    assert len(pairs) >= 10 and len({recipe.instance_id for recipe in recipes}) == len(recipes)
    assert len({each.operator for each in mutations}) >= 6
    for recipe in recipes:
        assert {node.split("::")[0] for node in recipe.fail_to_pass} == set(recipe.tests)
        committed.project(recipe.project)
    for recipe in pairs:
        committed.project(recipe.fixed)
        assert not set(recipe.fail_to_pass) & set(recipe.pass_to_pass)
    for recipe in mutations:
        stable = {node for path in recipe.tests for node in committed.suites[recipe.project][path]}
        assert set(recipe.fail_to_pass) < stable


def test_committed_issues_name_no_place(committed: Definitions) -> None:
    for recipe in committed.recipes():
        changed = [recipe.path] if isinstance(recipe, MutationRecipe) else recipe.code
        issue = recipe.problem
        assert not [path for path in changed if path in issue]
        assert (
            not re.search(r"\bline \d+", issue) and "/testbed" not in issue and "/tmp/bytecode" not in issue
        )
        names = {re.split(r"::", node)[-1].split("[")[0] for node in recipe.fail_to_pass}
        assert not [name for name in names if re.search(rf"\bdef {name}\b", issue)]
        assert "```python" in issue and len(issue) < 8000


def test_committed_report_proves_every_recipe(committed: Definitions) -> None:
    proofs = load_report(COMMITTED / "validation.jsonl")
    recipes = committed.recipes()
    assert set(proofs) == {recipe.instance_id for recipe in recipes}
    assert all(proofs[recipe.instance_id].recipe == mark(recipe) for recipe in recipes)
    assert all(each.holds and len(each.reference_seconds) == 2 for each in proofs.values())


def test_the_command_line_lists_and_refuses(
    capsys: pytest.CaptureFixture, tmp_path: Path, committed: Definitions
) -> None:
    assert main(["show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    counts = Counter(recipe.kind for recipe in committed.recipes())
    assert lines[-1] == f"{counts['mutation']} mutation, {counts['release_diff']} release_diff"
    assert len(lines) == 1 + sum(counts.values())
    for arguments, message in (
        (["show", "--definitions", str(tmp_path)], "expected mutation.jsonl or release_diff.jsonl"),
        (["build", "nobody__1"], "expected ids of its recipes, got nobody__1"),
        (["show", "--r2e", "rows.jsonl"], "expected --images with the folder"),
        (["build", "--r2e", "rows.jsonl", "--images", "."], "expected the benchmark's JSONL file"),
        (["find", "release_diff", "tornado-6.5.1"], "expected two keys"),
        (["find", "mutation", "nothing-1.0"], "expected a project 'nothing-1.0'"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def written(cache: Path, folder: Path) -> Definitions:
    """A catalogue of the mini project's two releases, and the committed environment."""
    first = release(cache, "1.0", {"src/counts.py": CODE, **TESTS})
    second = release(cache, "1.1", {"src/counts.py": FIXED, **NEW_TESTS})
    folder.mkdir()
    (folder / "projects.yaml").write_text(catalogue(first, {"1.1": second}))
    (folder / "environment.txt").write_bytes((COMMITTED / "environment.txt").read_bytes())
    return Definitions(folder)


@pytest.mark.slow
@pytest.mark.sandbox
def test_a_project_gives_tasks_that_hold(tmp_path_factory: pytest.TempPathFactory) -> None:
    top = readable(tmp_path_factory.mktemp("mini"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXRL_CACHE", str(top / "cache"))
        definitions = written(top / "cache", top / "definitions")

        async def session() -> None:
            said: list[str] = []
            rules = Rules(budget=30, share=0.7, per_function=6)
            found = await find_mutations(definitions, ["counts-1.0"], 3, 60, rules, said.append)
            pair = await find_release_pair(definitions, "counts-1.0", "counts-1.1", said.append)
            assert (found, pair) == (0, 0), said
            made = Definitions(definitions.folder)
            recipes = made.recipes()
            assert [each.kind for each in recipes] == ["mutation"] * 3 + ["release_diff"], said
            assert recipes[-1].fail_to_pass == ["tests/test_tally.py::test_never_less"]
            await reword_recipes(made, recipes[-1:], said.append)
            assert made.recipes() == recipes  # the same failures, the same words
            report = top / "report.jsonl"
            provider = NamespaceProvider()
            try:
                proofs = await validate(provider, made, recipes, report=report, jobs=2, tell=said.append)
                assert [each.problem for each in proofs] == [""] * 4
                size = report.stat().st_size
                again = await validate(provider, made, recipes, report=report, jobs=2, tell=said.append)
                assert again == proofs and report.stat().st_size == size
                absent = [f"{recipes[0].tests[0]}::test_absent"]
                changed = recipes[0].model_copy(update={"fail_to_pass": absent})
                (proof,) = await validate(provider, made, [changed], report=report, jobs=1, tell=said.append)
                assert not proof.holds and report.stat().st_size > size
            finally:
                await provider.close()

        asyncio.run(session())


def readable(folder: Path) -> Path:
    """Pytest's folders are closed to the user of sandboxes."""
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.parametrize("prefix", ["tornado-6.5.1__", "sqlparse-", "toolz-"])
def test_committed_tasks_hold(committed: Definitions, prefix: str) -> None:
    recipe = next(each for each in reversed(committed.recipes()) if each.instance_id.startswith(prefix))
    tasks = load_task_set(COMMITTED, ids=[recipe.instance_id])
    (task,) = tasks.specs
    suite = tasks.hidden(task.instance_id)
    assert isinstance(suite, SuiteTests)

    async def session() -> None:
        provider = NamespaceProvider()
        try:
            sandbox = await provider.create({}, Limits(memory=1 << 30, disk=256 << 20), image=task.image)
            for path in suite.reference:
                listed = await sandbox.exec(
                    f"git log --oneline -- {path} | wc -l; git status --porcelain", 30
                )
                assert listed.output.split() == ["1"]
            for path in recipe.tests:
                assert (await sandbox.exec(f"test -e {path}", 30)).exit_code == 1
            for path, content in suite.reference.items():
                assert content is not None
                await sandbox.write(path, content)
            diff = await sandbox.diff()
            work = {path: content for path, content in diff.files.items() if not path.startswith(".git/")}
            assert work == suite.reference
            await sandbox.destroy()
            grader = SuiteGrader(provider)
            assert (await grader.grade(task, suite, diff)).status == "resolved"
            assert (await grader.grade(task, suite, Diff(files={}))).status == "unresolved"
            assert (await grader.check_unchanged(task, suite)).status == "unresolved"
            await grader.close()
        finally:
            await provider.close()

    asyncio.run(session())
