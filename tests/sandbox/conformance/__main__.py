"""Cases outside of pytest: `run BACKEND` prints one JSON line per case, `own BACKEND MARK` is an owner."""

import asyncio
import json
import sys
import tempfile
import traceback
from pathlib import Path

from .backends import BACKENDS
from .core import Backend, Stage, cases_for, play
from .life import own


def run(backend: Backend) -> None:
    """Every case that applies to `backend`; a failure is printed, not raised."""
    for item in cases_for(backend):
        problem = ""
        try:
            play(item, backend)
        except BaseException:  # noqa: BLE001 - the caller asserts on what is printed
            problem = traceback.format_exc()
        print(json.dumps({"case": item.name, "problem": problem}), flush=True)


async def own_sandboxes(backend: Backend, mark: str) -> None:
    """Holds sandboxes until it is killed."""
    with tempfile.TemporaryDirectory() as folder:
        await own(Stage(backend, backend.make(), Path(folder)), mark)


if __name__ == "__main__":
    chosen = BACKENDS[sys.argv[2]]
    if sys.argv[1] == "own":
        asyncio.run(own_sandboxes(chosen, sys.argv[3]))
    else:
        run(chosen)
