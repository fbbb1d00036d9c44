"""The generated tasks: right, wrong, disjoint and reproducible."""

import re
from collections import Counter

import pytest

from sandbox.tasks.generated.families import FAMILIES, bugs
from sandbox.tasks.generated.generate import Split, function_names, generate, instances
from sandbox.tasks.generated.instances import VARIABLES, outputs, same, sources
from sandbox.tasks.schema import Case, HiddenTests, TaskSpec
from sandbox.tasks.taskset import TaskSet

VARIABLE = re.compile(rf"\b(?:{'|'.join(VARIABLES)})\b(?! (?:copy|tuple|set)\b)")
SIZES: dict[Split, int] = {"train": 1200, "validation": 251, "test": 251}


@pytest.fixture(scope="module")
def made():
    return {split: instances(split, count, 0) for split, count in SIZES.items()}


def every(made):
    return [instance for split in made.values() for instance in split]


def passes(source: str, hidden: HiddenTests) -> bool:
    """An independent grader: a fresh module, each case compared in value and type."""
    module: dict = {}
    exec(compile(source, hidden.module, "exec"), module)
    try:
        got = [eval(case.expression, module) for case in hidden.cases]
    except (ArithmeticError, LookupError, NameError, TypeError, ValueError):
        return False
    return all(
        type(g) is type(c.expected) and g == c.expected for g, c in zip(got, hidden.cases, strict=True)
    )


def strip_names(text: str) -> str:
    """Function and variable names in order of appearance become f and v0, v1."""
    text = re.sub(r"\b[a-z]+_[a-z]+(?=\()", "f", text)
    found = list(dict.fromkeys(VARIABLE.findall(text)))
    return VARIABLE.sub(lambda match: f"v{found.index(match[0])}", text)


def test_sizes_and_balance(made):
    for split, count in SIZES.items():
        counts = Counter(each.spec.tags["family"] for each in made[split])
        assert len(made[split]) == count and set(counts) == set(FAMILIES)
        assert max(counts.values()) - min(counts.values()) <= 1
    assert len({each.spec.instance_id for each in every(made)}) == sum(SIZES.values())


def test_reference_passes_and_the_unchanged_file_fails(made):
    for each in every(made):
        source = each.spec.files[each.hidden.module]
        assert passes(each.hidden.reference[each.hidden.module], each.hidden)
        assert not passes(source, each.hidden)
        assert len(each.hidden.cases) == 6


def test_repairs_describe_their_tasks(made):
    for each in every(made):
        repair = each.repair
        assert repair.source == each.spec.files[repair.path] and repair.source.count(repair.wrong) == 1
        assert repair.fixed == each.hidden.reference[repair.path]
        assert repair.right in repair.candidates and repair.habit in repair.candidates
        assert repair.wrong not in repair.candidates and len(set(repair.candidates)) >= 3
        assert repair.wrong not in each.spec.problem_statement.split("must return")[1]


def test_habits_are_right_about_as_often_as_blind_guesses(made):
    train = made["train"]
    habit = sum(each.repair.habit == each.repair.right for each in train) / len(train)
    blind = sum(1 / len(each.repair.candidates) for each in train) / len(train)
    assert 0.12 < habit < 0.18 and 0.12 < blind < 0.18


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"loop"}))
def test_cases_tell_the_right_line_from_every_candidate(family):
    for bug in bugs(family):
        calls = [f"F({each})" for each in bug.inputs]
        right = outputs(sources(bug, bug.right), calls)
        for candidate in {bug.wrong, *bug.candidates} - {bug.right}:
            assert not same(right, outputs(sources(bug, candidate), calls)), (bug, candidate)


def test_loop_candidates_that_pass_compute_the_same_numbers():
    """1 · 2 · 3 = 2 · 3 and 0 + 1 + 2 = 1 + 2: such an edit is right, not undetected."""
    for bug in bugs("loop"):
        cases, more = ([f"F({each})" for each in numbers] for numbers in (bug.inputs, range(3, 12)))
        for edit in (bug.wrong, *bug.candidates):
            left, right = sources(bug, edit), sources(bug, bug.right)
            if same(outputs(left, cases), outputs(right, cases)):
                assert same(outputs(left, more), outputs(right, more))


def test_splits_share_no_name_no_pair_and_no_stripped_content(made):
    names = [set(function_names(split)) for split in SIZES]
    assert all(names) and sum(map(len, names)) == len(set.union(*names)) == 576
    stripped = {
        split: {strip_names(f"{each.spec.problem_statement}\n{each.repair.source}") for each in made[split]}
        for split in SIZES
    }
    pairs = {
        split: {strip_names(f"{each.repair.source}\n{each.repair.right}") for each in made[split]}
        for split in SIZES
    }
    for content in (stripped, pairs):
        assert len(content["train"]) > 200 and len(content["validation"]) > 60 and len(content["test"]) > 60
        assert content["train"].isdisjoint(content["validation"] | content["test"])
        assert content["validation"].isdisjoint(content["test"])


def test_stripping_sees_through_renaming():
    left, right = (
        "get_row(a, b) must.\ndef get_row(a, b): a - b",
        "set_key(y, x) must.\ndef set_key(y, x): y - x",
    )
    assert strip_names(left) == strip_names(right) != strip_names(left.replace("a - b", "b - a"))


def test_every_right_line_occurs_in_training(made):
    def rights(split):
        return {(each.spec.tags["family"], VARIABLE.sub("v", each.repair.right)) for each in made[split]}

    assert rights("validation") | rights("test") <= rights("train")


def test_same_arguments_same_digest_and_other_seeds_differ():
    first = generate("train", 64, 5)
    assert first.digest == generate("train", 64, 5).digest
    assert len({first.digest, generate("train", 64, 6).digest, generate("test", 64, 5).digest}) == 3
    assert first.digest == "b418bc70e98f90e0193f6522daaf068527dc5eae8a5671cff1639be0a8a17fca"


def test_the_task_tells_nothing_hidden():
    for spec in generate("validation", 32, 1).specs:
        assert set(spec.tags) == {"family"} and list(spec.files) == ["app.py"]
        assert spec.problem_statement.count("\n") == 0 and "must return" in spec.problem_statement


def test_errors_say_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match="split"):
        generate("dev", 1, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="family"):
        bugs("typo")
    with pytest.raises(ValueError, match="ask for fewer"):
        monkeypatch.setattr("sandbox.tasks.generated.generate.function_names", lambda split: ("get_row",))
        instances("test", 4_000, 0)


def case_set(*expected):
    specs = [TaskSpec(instance_id=str(i), problem_statement="", files={}) for i in range(len(expected))]
    tests = [
        HiddenTests(instance_id=str(i), module="m.py", cases=(Case(expression="f()", expected=value),))
        for i, value in enumerate(expected)
    ]
    return TaskSet(specs, tests)


def test_taskset_looks_up_takes_and_digests():
    tasks = case_set({3, 1, 2}, [1])
    assert tasks.hidden("1").cases[0].expected == [1]
    assert [spec.instance_id for spec in tasks.take(1).specs] == ["0"]
    assert tasks.digest == case_set({2, 3, 1}, [1]).digest
    assert tasks.digest != case_set({2, 3, 1}, (1,)).digest
    assert tasks.digest != case_set({2, 3, 1}, [True]).digest
    with pytest.raises(KeyError, match="instance id"):
        tasks.hidden("2")
    with pytest.raises(ValueError, match="count"):
        tasks.take(3)


def test_taskset_wants_one_hidden_test_per_task():
    tasks = case_set(1, 2)
    with pytest.raises(ValueError, match="hidden test"):
        TaskSet(tasks.specs, [tasks.hidden("0")])
    with pytest.raises(ValueError, match="unique"):
        TaskSet([tasks.specs[0]] * 2, [tasks.hidden("0")] * 2)
