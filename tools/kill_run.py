"""Kills a small run with SIGKILL at random moments, resumes it, and compares it with an uninterrupted one.

    python -m tools.kill_run [--kills 20] [--seed 0] [--async drain|in_flight] [--folder DIR]

The run is the quickstart with a small step. Synchronous: parameters, optimizer state, the exported model and
the ledger of trained rollouts (which, from which weights, how they ended, every token of their transcripts)
must be byte for byte those of the uninterrupted run. Asynchronous (timing decides what is sampled by which
weights): every (task, epoch, sample) is trained once, in the same step as without kills, and no token is
older than the bound. Prints what it compared; ends with status 1 if something differs.

A kill falls into the first step of an attempt (what comes before it included) or into one of the next, at a
random moment of it. Moments are printed with their seed.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl.feed.reader import lineage, read_events, read_rollouts, read_transcript
from tools.check_run import ages, problems

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 300.0
"""Seconds in which an attempt must begin, or a whole run end."""
SMALL = (
    "tasks.train_count=40",
    "tasks.validation_count=2",
    "evaluation.samples=1",
    "rl.prompts_per_step=4",
    "rl.group_size=4",
    "rl.updates_per_step=1",
    "rl.rows_per_microbatch=2",
    "engine.slots=16",
    "engine.prefill_rows=4",
    "sandbox.concurrency=16",
    "checkpoint.every=1",
)
AHEAD = ("rl.max_staleness=2", "engine.slots=32", "sandbox.concurrency=32")
ROLLOUT = ("task", "epoch", "sample", "outcome", "reward", "turns", "tokens", "sampled", "versions")
BY_THE_CLOCK = ("agent_timeout", "grader_timeout", "infra_error", "grader_error")


def settings(folder: Path, name: str, *, steps: int, update: str | None = None) -> list[str]:
    """Arguments of `jaxrl.train`; `update` is the weight update of an asynchronous run."""
    more = [] if update is None else [*AHEAD, f"rl.weight_update={update}"]
    return [*SMALL, *more, f"run.steps={steps}", f"run.output_dir={folder}", f"run.run_name={name}"]


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """The run as a process of its own."""
    command = [sys.executable, "-m", "jaxrl.train", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def play(arguments: Sequence[str]) -> None:
    """Runs to the end. Raises `RuntimeError` if that is a failure."""
    with start(arguments) as process:
        if status := process.wait(PATIENCE):
            raise RuntimeError(f"jaxrl.train {' '.join(arguments)}: expected status 0, got {status}")


def kill(arguments: Sequence[str], run: Path, *, steps: int, then: float) -> bool:
    """Starts an attempt, and kills it `then` seconds after it has begun and done `steps` steps.

    False if the run was over before. Raises `RuntimeError` if the attempt fails or gets nowhere.
    """
    number = len(lineage(run).attempts) + 1
    with start(arguments) as process:
        _wait_for(process, run, number, steps)
        try:
            process.wait(then)
        except subprocess.TimeoutExpired:
            process.kill()
        status = process.wait()
    if status not in (0, -signal.SIGKILL):
        raise RuntimeError(f"attempt {number} of {run} ended by itself with status {status}")
    return status != 0


def _wait_for(process: subprocess.Popen[bytes], run: Path, number: int, steps: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and progress(run, number) < steps:
        if time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"attempt {number} of {run}: expected {steps} steps in {PATIENCE:.0f} s")
        time.sleep(0.05)


def progress(run: Path, number: int) -> int:
    """Steps that an attempt has done; -1 if it has not begun."""
    attempts = lineage(run).attempts
    if not attempts or attempts[-1].number < number:
        return -1
    return sum(row["attempt"] == number for row in read_events(run, "step"))


def first_step(run: Path) -> float | None:
    """Seconds from the start of the newest attempt that has done a step to that step's end, if any has."""
    for attempt in reversed(lineage(run).attempts):
        ends = [row["t"] for row in read_events(run, "step") if row["attempt"] == attempt.number]
        if ends:
            return ends[0] - attempt.started
    return None


def later_step(run: Path) -> float:
    """Seconds of a step after the first, in an uninterrupted run."""
    ends = [row["t"] for row in read_events(run, "step")]
    return (ends[-1] - ends[0]) / max(1, len(ends) - 1)


def trained(run: Path) -> Iterator[bytes]:
    """A line for every trained rollout, as far as it can be equal in two runs: no times."""
    for event in read_events(run, "step"):
        step = event["step"]
        for row in read_rollouts(run, step):
            text = read_transcript(run, row)
            yield json.dumps([step, *(row[key] for key in ROLLOUT), text]).encode()


def arrays(run: Path) -> dict[str, Any]:
    """Shape, dtype and SHA-256 of every array in the newest checkpoint: parameters and optimizer state."""
    newest = max((run / "checkpoints").glob("checkpoint_*"))
    return json.loads((newest / "ledger.json").read_text())["ledger"]["arrays"]


def differences(whole: Path, killed: Path) -> list[str]:
    """What is not byte for byte equal in two synchronous runs."""
    found = []
    left, right = arrays(whole), arrays(killed)
    unequal = [name for name in left.keys() | right.keys() if left.get(name) != right.get(name)]
    if unequal:
        found.append(f"{len(unequal)} of {len(left)} arrays of the checkpoint, such as {min(unequal)}")
    if list(trained(whole)) != list(trained(killed)):
        found.append("the ledger of trained rollouts")
    models = [(run / "model/model.safetensors").read_bytes() for run in (whole, killed)]
    if models[0] != models[1]:
        found.append("the exported model")
    return found


def assignments(run: Path) -> list[tuple]:
    """(step, task, epoch, sample) of every trained rollout."""
    steps = [row["step"] for row in read_events(run, "step")]
    return [(s, row["task"], row["epoch"], row["sample"]) for s in steps for row in read_rollouts(run, s)]


def compare(whole: Path, killed: Path, *, asynchronous: bool) -> list[str]:
    """What is wrong with a run that was killed, beside one that was not."""
    found = [f"{run.name}: {problem}" for run in (whole, killed) for problem in problems(run)]
    if assignments(whole) != assignments(killed):
        found.append("other rollouts, or in other steps, than without kills")
    if not asynchronous:
        found += [f"not byte for byte equal: {each}" for each in differences(whole, killed)]
    return found


def describe(run: Path) -> None:
    """Prints how often the run began, from where, and what it trained."""
    origins = Counter(attempt.resumed_from for attempt in lineage(run).attempts)
    kept = sum(row["groups"] for row in read_events(run, "checkpoint"))
    anew = [row for row in read_events(run, "alert") if "generated anew" in row["reason"]]
    rows = [row for event in read_events(run, "step") for row in read_rollouts(run, event["step"])]
    print(f"{run.name}: {sum(origins.values())} attempts; resumed after step: {dict(origins)}")
    print(f"  {len(rows)} rollouts by the age of their oldest token: {dict(sorted(ages(run).items()))}")
    print(f"  groups kept in checkpoints: {kept}; generated anew as too old: {len(anew)}")
    print(f"  ended by the clock or by a fault: {sum(row['outcome'] in BY_THE_CLOCK for row in rows)}")


def kill_often(arguments: Sequence[str], run: Path, *, whole: Path, kills: int, seed: int) -> int:
    """Starts the run and kills it up to `kills` times, until it is over; how often that was."""
    rng = random.Random(seed)
    for number in range(1, kills + 1):
        steps, part = divmod(rng.uniform(0, 2), 1)
        # Compiling takes most of a first step, and machines are not equally fast at all times.
        span = later_step(whole) if steps else first_step(run) or first_step(whole) or 0.0
        if not kill(arguments, run, steps=int(steps), then=part * span):
            return number - 1
        done = max((row["step"] for row in read_events(run, "step")), default=0)
        when = f"{part * span:.2f} s after step {steps:.0f} of its attempt"
        print(f"kill {number}: {when}; {done} steps done", flush=True)
    return kills


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async", dest="update", choices=("drain", "in_flight"))
    parser.add_argument("--folder", type=Path, help="of the runs; the uninterrupted one is used again")
    return parser.parse_args()


def main() -> None:
    given = parse()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kill_run_"))
    whole, killed = folder / "whole", folder / f"killed_{given.seed}"
    chosen = partial(settings, folder, steps=given.steps, update=given.update)
    play(chosen(whole.name))
    print(f"{folder}: {later_step(whole):.1f} s a step; seed {given.seed}", flush=True)
    done = kill_often(chosen(killed.name), killed, whole=whole, kills=given.kills, seed=given.seed)
    play(chosen(killed.name))
    print(f"{done} kills of {given.kills}")
    describe(whole)
    describe(killed)
    found = compare(whole, killed, asynchronous=given.update is not None)
    for each in found:
        print(f"PROBLEM: {each}")
    if not found:
        print(
            "as without kills:", "each rollout once, none too old" if given.update else "equal byte for byte"
        )
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
