"""Takes out of an agent's sandbox what the task's image holds for its grader, or refuses the sandbox."""

import shlex

from sandbox.base import Sandbox, SandboxError
from sandbox.tasks.schema import TaskSpec

_TIMEOUT = 120.0  # seconds: an image has some hundred thousand files


async def conceal(sandbox: Sandbox, task: TaskSpec) -> None:
    """Removes everything named in `task.concealed`, links too.

    Raises `SandboxError` if something of that name stays within the agent's reach, such as a folder of
    the read-only root: no episode may run beside its hidden tests.
    """
    if not task.concealed:
        return
    names = " -o ".join(f"-name {shlex.quote(name)}" for name in task.concealed)
    search = f"find / \\( -path /proc -o -path /sys \\) -prune -o \\( {names} \\) -print 2>/dev/null"
    remove = f'{search} | while IFS= read -r each; do rm -rf -- "$each" 2>/dev/null; done'
    found = await sandbox.exec(f"command -v find && {{ {remove}; {search}; echo searched; }}", _TIMEOUT)
    lines = found.output.splitlines()
    if found.timed_out or not lines or lines[-1] != "searched":
        raise SandboxError(
            f"the image could not be searched for {', '.join(task.concealed)}: {found.output[-200:]}"
        )
    if left := lines[1:-1]:
        raise SandboxError(
            f"the agent could reach {left[0]}, which is the grader's: build the image without it, or cover "
            "it by a layer that is an empty directory (Image.layers)"
        )
