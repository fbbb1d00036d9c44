"""The trusted side of one grading: hands the driver its job, takes back an answer that it alone can give."""

import base64
import hashlib
import hmac
import json
import posixpath
import secrets
import shlex
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from sandbox.base import Sandbox
from sandbox.grading.suite_driver import MARK, STRETCH
from sandbox.grading.suite_patch import Patch
from sandbox.grading.suite_plan import Run
from sandbox.tasks.schema import SuiteTests, TaskSpec

GRACE = 60.0  # seconds beside the tests' own: start of the interpreter, files, the end of what was left
_SETTINGS = "PYTHONHASHSEED=0 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONDONTWRITEBYTECODE=1"


def job(task: TaskSpec, hidden: SuiteTests, patch: Patch, runs: Sequence[Run]) -> dict[str, Any]:
    """What the driver is to do, with the key that its answer must be signed by."""
    return {
        "key": secrets.token_hex(32),
        "workdir": task.image.workdir,
        "timeout": seconds(task, runs),
        "patch": _encoded(patch.files),
        "hidden": _encoded(hidden.files),
        "runs": [
            {
                "path": run.path,
                "nonce": run.nonce,
                "ids": run.ids,
                "passing": sorted(run.passing),
                "files": {} if run.content is None else _encoded({run.path: run.content}),
            }
            for run in runs
        ],
    }


def _encoded(files: Mapping[str, bytes | None]) -> dict[str, str | None]:
    return {path: None if data is None else base64.b64encode(data).decode() for path, data in files.items()}


async def drive(sandbox: Sandbox, task: TaskSpec, request: dict[str, Any]) -> dict[str, Any]:
    """The driver's answer, or `stopped` with the reason if there is none that holds the key's signature."""
    # In the working directory, the one place that every backend can write to; the driver removes it first.
    path = posixpath.join(task.image.workdir, f".{secrets.token_hex(8)}")
    await sandbox.write(path, json.dumps(request).encode())
    folder = resources.files("sandbox.grading")
    driver, template = (folder.joinpath(f"suite_{name}.py").read_text() for name in ("driver", "template"))
    program = shlex.join([task.image.python or "python3", "-s", "-B", "-c", driver, path, template])
    command = f"(cd / && {_SETTINGS} exec {program})"
    result = await sandbox.exec(command, STRETCH * request["timeout"] + GRACE)
    if result.timed_out:
        return {"stopped": "tests timed out"}
    message = authentic(result.output, request["key"])
    if message is None:
        return {"stopped": "out of memory" if result.oom else f"the grader was ended: {result.output[-300:]}"}
    return message


def seconds(task: TaskSpec, runs: Sequence[Run]) -> float:
    """Time of a stage: the task's own, once for every time that a file is run."""
    return task.tests_timeout * max(Counter(run.path for run in runs).values(), default=1)


def authentic(output: str, key: str) -> dict[str, Any] | None:
    """The message in `output` that holds our key's signature."""
    for line in reversed(output.splitlines()):
        data, _, sign = line.removeprefix(MARK).partition(":")
        real = hmac.new(bytes.fromhex(key), data.encode(), hashlib.sha256).hexdigest()
        if line.startswith(MARK) and hmac.compare_digest(sign.encode(), real.encode()):
            return json.loads(zlib.decompress(base64.b64decode(data)))
    return None
