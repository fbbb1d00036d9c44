"""Checks from a run's feed alone that it is whole: every step there once, nothing trained twice.

    python tools/check_run.py runs/quickstart

Reads the surviving lineage (rows that a resumed attempt did not abandon) and fails if a step or a rollout
of one is missing or doubled, if a (task, epoch, sample) was trained more than once, or if a token came from
weights that are more than rl.max_staleness versions older than those its step trained, or newer ones. Prints
what it found.
"""

import argparse
from collections import Counter
from pathlib import Path

from jaxrl.feed.reader import lineage, read_events, read_rollouts, read_run, read_series


def problems(run: Path) -> list[str]:
    """What is wrong with the surviving steps of a run; empty if nothing is."""
    steps = [row["step"] for row in read_events(run, "step")]
    found = []
    if steps != list(range(1, len(steps) + 1)):
        found.append(f"expected steps 1 to {len(steps)} once each, got {steps}")
    trained = Counter(
        (row["task"], row["epoch"], row["sample"]) for step in steps for row in read_rollouts(run, step)
    )
    doubled = [rollout for rollout, count in trained.items() if count > 1]
    if doubled:
        found.append(f"{len(doubled)} rollouts were trained more than once: {doubled[:3]}")
    rl = read_run(run)["config"]["rl"]
    whole = rl["prompts_per_step"] * rl["group_size"]
    most = whole * (1 + rl.get("dynamic_sampling_rounds", 0))
    for step in steps:
        rows = len(read_rollouts(run, step))
        if not whole <= rows <= most or rows % rl["group_size"]:
            expected = f"{whole}" if whole == most else f"groups of {rl['group_size']} with {whole} to {most}"
            found.append(f"step {step}: expected {expected} rollouts, got {rows}")
    published = {row["step"]: row["version"] for row in read_events(run, "step")}
    for step in steps:
        newest = published.get(step - 1, 0)
        oldest = newest - rl.get("max_staleness", 0)
        sampled = [row["versions"] for row in read_rollouts(run, step) if row["versions"] is not None]
        if stale := sum(not oldest <= first <= last <= newest for first, last in sampled):
            allowed = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
            found.append(f"step {step}: {stale} rollouts from other weights than {allowed}")
    return found


def ages(run: Path) -> Counter[int]:
    """Rollouts of the surviving steps by the age of their oldest token, in weight versions."""
    published = {row["step"]: row["version"] for row in read_events(run, "step")}
    return Counter(
        published.get(step - 1, 0) - row["versions"][0]
        for step in published
        for row in read_rollouts(run, step)
        if row["versions"] is not None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    if not (run / "run.json").is_file():
        parser.error(f"{run}: expected the folder of a run, found no run.json in it")
    steps = [row["step"] for row in read_events(run, "step")]
    rollouts = sum(len(read_rollouts(run, step)) for step in steps)
    errors = [value for _, value in read_series(run, "train/logprob_error_max") if value is not None]
    for attempt in lineage(run).attempts:
        origin = "from the start" if attempt.resumed_from is None else f"after step {attempt.resumed_from}"
        print(f"attempt {attempt.number}: {origin}")
    print(f"{len(steps)} steps, {rollouts} rollouts")
    print(f"rollouts by the age of their oldest token: {dict(sorted(ages(run).items()))}")
    if errors:
        print(f"largest |sampler - trainer| log-prob of the run: {max(errors):.2e}")
    found = problems(run)
    for problem in found:
        print(f"PROBLEM: {problem}")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
