"""kill -9 at any moment leaves the last complete checkpoint loadable."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint_writer import state

from jaxrl.rl.checkpoint import CheckpointStore

ROOT = Path(__file__).parents[2]
KILLS = 8


@pytest.fixture
def writer(tmp_path):
    script = Path(__file__).with_name("checkpoint_writer.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def line(process, start):
    for text in process.stdout:
        if text.startswith(start):
            return text.split()
    raise AssertionError(f"expected a line that starts with {start!r}, got the end of the output")


def verified(root):
    """Reads and checks every complete checkpoint; returns the newest step."""
    events = []
    store = CheckpointStore(root, report=lambda *event: events.append(event))
    for path in store.paths():
        read = store.load(path, state(0))
        assert read.step == read.version == read.progress["step"]
        for leaf in (read.state["params"]["w"], read.state["optimizer"]["mu"]):
            assert (np.asarray(leaf) == read.step).all()
    newest = store.latest(state(0))
    assert events == []
    return newest.step if newest else 0


def wait_for_a_random_moment(process, rng, period):
    """Returns how long a save takes, as measured now."""
    for _ in range(rng.randint(0, 2)):
        started = time.perf_counter()
        line(process, "saved")
        period = time.perf_counter() - started
    time.sleep(rng.uniform(0, 1.2) * period)
    return period


def test_last_complete_checkpoint_survives_kills(writer, tmp_path):
    rng, done, period = random.Random(0), 0, 0.1
    for _ in range(KILLS):
        writer.stdin.write("go\n")
        writer.stdin.flush()
        _, pid, step = line(writer, "writing")
        assert int(step) == done
        period = wait_for_a_random_moment(writer, rng, period)
        os.kill(int(pid), signal.SIGKILL)
        line(writer, "gone")
        now = verified(tmp_path)
        assert now >= done
        done = now
    assert done >= 3, "expected the writers to complete some checkpoints between the kills"
