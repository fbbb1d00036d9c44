"""Prompt texts from templates: what a task looks like to the policy, and what tools it has."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sandbox.tasks.schema import TaskSpec

DEFAULTS = Path(__file__).parent / "templates"
_EXAMPLE = TaskSpec(instance_id="example", problem_statement="It fails.", files={})
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined)

# The model family's chat format, which has to match to the letter: it was trained on this text.
_TOOLS = "# Tools\n\nYou have access to the following functions:\n\n<tools>\n{tools}\n</tools>"
_HOW_TO_CALL = """

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested \
within <tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, \
but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and \
do not tell the user about function calls
</IMPORTANT>"""


def render_prompt(template: str, task: TaskSpec) -> str:
    """A Jinja template with `workspace_path` and `instance.{problem_statement, repo_language,
    base_commit}`, without blanks at its ends. Raises `jinja2.TemplateError`."""
    instance = {
        "problem_statement": task.problem_statement,
        "repo_language": task.language,
        "base_commit": task.base_commit,
    }
    made = _ENVIRONMENT.from_string(template).render(workspace_path=task.workdir, instance=instance)
    return made.strip()


def check_prompt(template: str, path: Path) -> None:
    """Raises `ValueError`, naming `path`, if the template cannot be rendered for a task."""
    try:
        render_prompt(template, _EXAMPLE)
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        line = getattr(error, "lineno", None)
        raise ValueError(
            f"{path}{f', line {line}' if line else ''}: {error}; templates know workspace_path and "
            "instance.problem_statement, instance.repo_language, instance.base_commit"
        ) from error


def tool_block(texts: Sequence[Mapping[str, Any]]) -> str:
    """What a system turn says of the tools, in the chat format of Qwen3.5."""
    tools = "\n".join(json.dumps(each, ensure_ascii=False) for each in texts)
    return _TOOLS.format(tools=tools) + _HOW_TO_CALL
