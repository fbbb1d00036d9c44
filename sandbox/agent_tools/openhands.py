"""The tools of the `openhands` harness, and the texts by which the prompt describes them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox.agent_tools.base import Stateful, Tool
from sandbox.agent_tools.execute_bash import ExecuteBash
from sandbox.agent_tools.notes import Finish, TaskTracker, Think
from sandbox.agent_tools.str_replace_editor import StrReplaceEditor

NAMES = ("execute_bash", "think", "finish", "task_tracker", "str_replace_editor")
TEXTS = Path(__file__).with_suffix(".json")


def openhands_tools(*, soft_timeout: float = 30.0, normalise: bool = True) -> Mapping[str, Tool | Stateful]:
    """The harness's tools by name.

    `soft_timeout`: seconds without new output after which a command is left running. `normalise`:
    whether output that would differ between equal runs is made equal.
    """
    bash = ExecuteBash(soft_timeout=soft_timeout, normalise=normalise)
    tools = (bash, Think(), Finish(), TaskTracker(), StrReplaceEditor())
    return {tool.name: tool for tool in tools}


def load_texts(path: Path = TEXTS) -> Sequence[Mapping[str, Any]]:
    """The descriptions of the tools, in the order of the file.

    The file is a JSON list of `{"type": "function", "function": {"name", "description",
    "parameters"}}`, one for each tool, with JSON schemas as parameters. Raises `ValueError` naming
    the file, the tool and the key of whatever differs from what the tools take.
    """
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a JSON list of tool descriptions: {error}") from error
    if not isinstance(written, list):
        raise ValueError(f"{path}: expected a JSON list of tool descriptions, got {type(written).__name__}")
    names = [_check(path, position, each) for position, each in enumerate(written)]
    if sorted(names) != sorted(NAMES):
        raise ValueError(
            f"{path}: expected one description each of {', '.join(NAMES)}, got {', '.join(names)}"
        )
    return written


def _check(path: Path, position: int, written: Any) -> str:
    """The name of a description. Raises `ValueError` if it is not one."""
    tool = _key(path, f"entry {position}", written, "function", dict)
    name = _key(path, f"entry {position}", tool, "name", str)
    if name not in NAMES:
        raise ValueError(f"{path}: name = {name!r}: expected a tool of {', '.join(NAMES)}")
    _key(path, name, tool, "description", str)
    schema = _key(path, name, tool, "parameters", dict)
    properties = _key(path, name, schema, "properties", dict)
    required = schema.get("required", [])
    takes = openhands_tools()[name]
    if unknown := set(properties) - set(takes.parameters):
        raise ValueError(
            f"{path}: {name}: properties.{min(unknown)}: the tool takes only {', '.join(takes.parameters)}"
        )
    if not isinstance(required, list) or not set(takes.required) <= set(required) <= set(properties):
        raise ValueError(
            f"{path}: {name}: required = {required!r}: expected {', '.join(takes.required)} and nothing that "
            "is not among the properties"
        )
    return name


def _key(path: Path, where: str, written: Any, key: str, kind: type) -> Any:
    if not isinstance(written, dict) or not isinstance(written.get(key), kind):
        raise ValueError(f"{path}: {where}: {key}: expected {'a text' if kind is str else 'an object'}")
    return written[key]
