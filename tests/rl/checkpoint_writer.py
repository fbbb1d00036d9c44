"""Writes checkpoints until it is killed: `python checkpoint_writer.py FOLDER`.

Forks one writer per line on standard input, so that libraries are imported once; prints a line when a
writer has begun (with its process id, for the parent to kill) and when it has saved.
"""

import os
import sys

import numpy as np

from jaxrl.rl.checkpoint import CheckpointStore


def state(step: int) -> dict:
    """Several parts, in which every element says which step it belongs to."""
    return {"params": {"w": np.full((256, 128), step, np.float32)}, "optimizer": {"mu": np.full(64, step)}}


def write_forever(root: str) -> None:
    """Goes on from the newest checkpoint."""
    store = CheckpointStore(root, keep=2, report=print)
    newest = store.latest(state(0))
    step = newest.step if newest else 0
    print("writing", os.getpid(), step, flush=True)
    while True:
        step += 1
        store.save(state(step), step=step, version=step, progress={"step": step})
        print("saved", flush=True)


def main() -> None:
    """One forked writer per line of standard input."""
    for _ in sys.stdin:
        if (child := os.fork()) == 0:
            write_forever(sys.argv[1])
        os.waitpid(child, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main()
