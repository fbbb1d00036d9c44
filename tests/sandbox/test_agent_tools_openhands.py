"""`think`, `finish`, `task_tracker`, and the texts that describe the tools."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from sandbox.agent_tools.base import Observation, for_episode, run_tool
from sandbox.agent_tools.notes import TaskTracker
from sandbox.agent_tools.openhands import NAMES, TEXTS, load_texts, openhands_tools
from sandbox.tasks.schema import TaskSpec

TASK = TaskSpec(instance_id="t", problem_statement="", files={})


def use(tools, name: str, **arguments: str) -> Observation:
    return asyncio.run(run_tool(tools, name, sandbox=None, arguments=arguments))  # type: ignore[arg-type]


def test_think_and_finish() -> None:
    tools = for_episode(openhands_tools(), TASK)
    assert use(tools, "think", thought="hm") == Observation("[noted]")
    assert use(tools, "finish", message="done") == Observation("", finished=True)
    assert use(tools, "think").text == "error: missing argument thought"
    assert use(tools, "finish", message="x", security_risk="LOW").finished


def test_task_tracker_keeps_a_list_per_episode() -> None:
    tools = for_episode({"task_tracker": TaskTracker()}, TASK)
    assert "no tasks" in use(tools, "task_tracker", command="view").text
    plan = [
        {"id": "1", "title": "read"},
        {"title": "fix", "status": "in_progress", "notes": "soon"},
        {"title": "t", "status": "done"},
    ]
    seen = use(tools, "task_tracker", command="plan", task_list=json.dumps(plan))
    listed = "1. [ ] read (todo)\n2. [~] fix (in_progress)\n   soon\n3. [x] t (done)"
    assert seen.text == f"[the list now has 3 tasks]\n{listed}"
    for wrong, message in (
        ("{}", "expected a JSON list"),
        ("[1]", "task 1: expected an object"),
        ('[{"status": "todo"}]', "missing title"),
        ('[{"title": 3}]', "a text for title"),
        ('[{"title": "a", "status": "later"}]', "expected a status of todo, "),
        ("[", "expected JSON"),
    ):
        assert re.search(message, use(tools, "task_tracker", command="plan", task_list=wrong).text)
    assert "missing argument task_list" in use(tools, "task_tracker", command="plan").text
    assert "expected plan or view, got 'add'" in use(tools, "task_tracker", command="add").text
    assert use(tools, "task_tracker", command="view").text == listed
    assert (
        "no tasks"
        in use(for_episode({"task_tracker": TaskTracker()}, TASK), "task_tracker", command="view").text
    )


def test_the_texts_describe_the_tools() -> None:
    texts = load_texts()
    assert [each["function"]["name"] for each in texts] == list(NAMES)
    for each in texts:
        tool = openhands_tools()[each["function"]["name"]]
        assert set(each["function"]["parameters"]["properties"]) <= set(tool.parameters)


def _without(key: str):
    return lambda texts: texts[0]["function"].pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda texts: texts.pop(),
            "expected one description each of execute_bash, .*, got execute_bash, think",
        ),
        (lambda texts: texts.append(texts[0]), "expected one description each"),
        (_without("description"), "execute_bash: description: expected a text"),
        (_without("name"), "entry 0: name: expected a text"),
        (_without("parameters"), "execute_bash: parameters: expected an object"),
        (lambda texts: texts[0].pop("function"), "entry 0: function: expected an object"),
        (lambda texts: texts[0]["function"].update(name="bash"), "name = 'bash': expected a tool of"),
        (
            lambda texts: texts[1]["function"]["parameters"]["properties"].update(deep={}),
            "think: properties.deep",
        ),
        (lambda texts: texts[1]["function"]["parameters"].update(required=[]), "think: required = "),
        (lambda texts: texts[1]["function"]["parameters"].update(required="thought"), "think: required = "),
        (
            lambda texts: texts[1]["function"]["parameters"].update(required=["thought", "x"]),
            "think: required = ",
        ),
    ],
)
def test_a_users_texts_are_checked(tmp_path: Path, change, message: str) -> None:
    path, texts = tmp_path / "tools.json", json.loads(TEXTS.read_text())
    path.write_text(json.dumps(texts))
    assert load_texts(path) == texts
    change(texts)
    path.write_text(json.dumps(texts))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {message}"):
        load_texts(path)


@pytest.mark.parametrize("content", ["{}", "[", "7", ""])
def test_a_file_that_holds_no_texts_is_told(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tools.json"
    with pytest.raises(ValueError, match="expected a JSON list"):
        load_texts(path)
    path.write_text(content)
    with pytest.raises(ValueError, match="expected a JSON list"):
        load_texts(path)
