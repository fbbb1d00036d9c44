"""One grader sandbox: a pre-imported Python server that forks once per request."""

from importlib import resources
from typing import Any

from sandbox.base import Limits, SandboxError
from sandbox.dialogue import Dialogue
from sandbox.namespace import Launched, NamespaceProvider

_START_TIMEOUT, _GRACE = 30.0, 10.0  # seconds
_MAX_ANSWER = 4 << 20  # bytes
_MAX_USES = 500  # bounds what gradings could leave in kernel objects that no one lists
_LIMITS = Limits(memory=512 << 20, pids=32, disk=16 << 20, wall=86_400.0)


class GraderWorker:
    """Serves one request at a time. Replaces its sandbox whenever something was left in it."""

    def __init__(self, provider: NamespaceProvider) -> None:
        self._provider = provider
        self._server = Dialogue(
            self._launch, name="the grading server", longest=_MAX_ANSWER, patience=_START_TIMEOUT
        )
        self._uses = 0

    async def start(self) -> None:
        """Starts the server unless it runs. Raises `SandboxError`."""
        if await self._server.start():
            self._uses = 0

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer of the server. Raises `SandboxError` if it is lost."""
        await self.start()
        fields = {"workdir": self._provider.workdir, "memory": _LIMITS.memory}
        answer: dict[str, Any] = {}
        try:
            answer = await self._server.ask({**request, **fields}, request["timeout"] + _GRACE)
        finally:
            self._uses += 1
            if answer.get("ended") != "ended" or not answer["clean"] or self._uses >= _MAX_USES:
                await self.close()
        if answer["ended"] == "error":
            raise SandboxError(f"the grading server failed: {answer['error']}")
        return answer

    async def close(self) -> None:
        """Ends the sandbox; the next request starts a fresh one."""
        await self._server.close()

    async def _launch(self) -> Launched:
        source = resources.files("sandbox.grading").joinpath("server.py").read_text()
        program = [self._provider.python.executable, "-I", "-S", "-B", "-c", source]
        return await self._provider.launch(program, _LIMITS, scratch=False)
