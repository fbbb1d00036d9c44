"""What a task is: the part an agent may see, and the hidden tests that only the grader opens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox.base import HOST, Image


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One repair task, without anything that tells the answer.

    The working copy is `image.source` with `files` (path → text) written over it: a small task has
    only the latter, a project's mutation only the mutated file. `tags` serve reports only and never
    reach the policy.
    """

    instance_id: str
    problem_statement: str
    files: Mapping[str, str]
    image: Image = HOST
    workdir: str = "/testbed"
    base_commit: str = "HEAD"  # what the prompt calls the state before any change
    language: str = "python"  # of the repository, for the prompt
    command_timeout: float = 10.0  # seconds, one tool call
    agent_timeout: float = 120.0  # seconds, the whole episode
    tests_timeout: float = 5.0  # seconds, the hidden tests
    concealed: tuple[str, ...] = ()  # names of files and folders that the agent must not find anywhere
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One hidden check: `expression`, evaluated in the module's namespace, must equal `expected`.

    `expected` is a Python literal (numbers, strings, lists, tuples, sets, dicts, None); equality
    includes the type. Only the grader compares: the code under test sees the expression alone.
    """

    expression: str
    expected: Any


@dataclass(frozen=True, kw_only=True)
class HiddenTests:
    """The tests of one task. Never enters the agent's sandbox."""

    instance_id: str
    module: str  # path of the module under test, relative to the working directory
    cases: tuple[Case, ...]
    reference: Mapping[str, str] = field(default_factory=dict)  # path → text of the known fix


@dataclass(frozen=True, kw_only=True)
class SuiteTests:
    """The hidden pytest suite of a project task. Never enters the agent's sandbox.

    `files` (path in the working directory → content) replace whatever the tree has there before the
    tests run. Node ids are pytest's, relative to the working directory. A task is resolved when
    every id of both sets passed in setup, call and teardown.
    """

    instance_id: str
    files: Mapping[str, bytes]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    reference: Mapping[str, bytes | None] = field(default_factory=dict)  # the known fix; None deletes
    expected: Mapping[str, str] = field(default_factory=dict)  # `reference` mode: name → status


type Hidden = HiddenTests | SuiteTests  # what a grader opens; the kind says which grader
