"""Times GRPO steps against TRL's GRPOTrainer on this CPU, in one run.

    make bench-train [ARGS="--threads 1 --rounds 5 --updates 1"]
    python tools/bench_train.py --trl-python PYTHON

Both sides get the quickstart's starting checkpoint in float32, the same prompts, processors and number of
threads, and take turns; the first round (compilation, warm-up) is dropped. The recipe: advantages are rewards
minus their group's mean, the clipped loss is divided by tokens, ratios from 0.8 to 1.28, no KL, AdamW.

`step` is a whole GRPO step: a fixed number of tokens sampled for every prompt and sample, rewards, the
log-probs that a side needs, the updates, new weights for the sampler. `update` leaves sampling out: both get
the same completions, with tokens among them that were not sampled. Loss, gradient norm and entropy of each
update must then agree in every round, so after as many updates, or the command fails: different work is no
comparison. With two updates a step, both sides first compute the log-probs that ratios start from.
Ratios are medians of TRL's time over ours.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_model import ROOT, Peer, pinned

if TYPE_CHECKING:  # importing them brings JAX, which counts the processors
    from grpo_side import Case, Completion, Play, Prompt

    from jaxrl.stepping import StepResult

QUICKSTART = ROOT / "configs" / "quickstart"
# Largest differences between what the sides report: relative, and absolute for a loss near 0.
RELATIVE, ABSOLUTE = 2e-3, 2e-4


@dataclass(frozen=True)
class Round:
    """Seconds of one step, TRL's and ours, and the share of our packed positions that held a token."""

    wall: tuple[float, float]
    cpu: tuple[float, float]
    fill: float

    def ratio(self, kind: str) -> float:
        """TRL's `kind` of seconds over ours."""
        theirs, ours = getattr(self, kind)
        return theirs / ours


def request(
    case: "Case", prompts: "Sequence[Prompt]", completions: "Sequence[Completion]", *, steps: int, rows: int
) -> dict[str, Any]:
    """The case as tools/trl_bench.py reads it."""
    config = case.config()
    chosen = config.optimizer
    made = {
        "model": str(QUICKSTART / "start"),
        "tokenizer": str(QUICKSTART / "tokenizer.json"),
        "prompts": [asdict(prompt) for prompt in prompts],
        "prompts_per_step": case.prompts,
        "group_size": case.samples,
        "updates": case.updates,
        "steps": steps,
        "microbatch": rows,
        "new_tokens": case.new_tokens,
        "clip_low": config.rl.clip_low,
        "clip_high": config.rl.clip_high,
        "optimizer": {
            "learning_rate": chosen.learning_rate,
            "adam_beta1": chosen.b1,
            "adam_beta2": chosen.b2,
            "adam_epsilon": chosen.eps,
            "weight_decay": chosen.weight_decay,
            "max_grad_norm": chosen.clip_norm,
        },
    }
    if case.fixed:
        made["completion_ids"] = [each.ids for each in completions]
        made["env_mask"] = [each.mask for each in completions]
        made["logprobs"] = [[0.0] * len(each.ids) for each in completions]  # asked for, and not used
    return made


async def rounds_of(peer: Peer, play: "Play", case: "Case", steps: int) -> AsyncIterator[Round]:
    """Both sides in turns; ends the program where they part."""
    for index in range(steps):
        theirs = peer.ask(op="run")
        wall, cpu = time.perf_counter(), time.process_time()
        result = await play(index)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        check_tokens(case, theirs, result)
        if case.fixed:
            for update, (other, report) in enumerate(zip(theirs["updates"], result.reports, strict=True)):
                compare(other, report.metrics, where=f"round {index}, update {update}")
        if index:
            fill = result.packed_tokens / result.packed_positions
            yield Round((theirs["wall"], wall), (theirs["cpu"], cpu), fill)


def compare(theirs: Mapping[str, float], ours: Mapping[str, float], *, where: str) -> None:
    """Ends the program if an update's loss, gradient norm or entropy differ."""
    for name in ("loss", "grad_norm", "entropy"):
        if abs(theirs[name] - ours[name]) > RELATIVE * abs(theirs[name]) + ABSOLUTE * (name == "loss"):
            sys.exit(
                f"bench_train: {where}: expected equal {name}; TRL has {theirs[name]}, jaxrl {ours[name]}"
            )


def check_tokens(case: "Case", theirs: Mapping[str, Any], result: "StepResult") -> None:
    """Ends the program if a side did not train the tokens that the case says."""
    ours = sum(report.metrics["tokens"] for report in result.reports) / (case.prompts * case.samples)
    if not all(report.applied for report in result.reports):
        sys.exit(f"bench_train: expected every update to be made; got {result.reports}")
    if abs(ours - theirs["length"]) > 1e-3 or not (case.fixed or ours == case.new_tokens):
        sys.exit(f"bench_train: expected as many tokens a sample: TRL has {theirs['length']}, jaxrl {ours}")


async def duel(peer: Peer, case: "Case", *, rounds: int, microbatch: int, folder: Path) -> list[Round]:
    """The rounds of one line of the table."""
    from grpo_side import completions_of, prompts_of, sampling, updating

    steps = rounds + 1
    prompts = prompts_of(case.prompts * (1 if case.fixed else steps))
    completions = await completions_of(case, prompts) if case.fixed else []
    path = folder / "case.json"
    path.write_text(json.dumps(request(case, prompts, completions, steps=steps, rows=microbatch)))
    peer.ask(op="case", path=str(path))
    opened = updating(case, prompts, completions) if case.fixed else sampling(case, prompts)
    async with opened as play:
        return [each async for each in rounds_of(peer, play, case, steps)]


def report(case: "Case", rounds: Sequence[Round]) -> None:
    """One line of the table."""
    title = f"{'update' if case.fixed else 'step'}, {case.updates} update{'s' * (case.updates > 1)} a step"
    walls, cpus = (
        [statistics.median(getattr(each, kind)[side] for each in rounds) for side in (0, 1)]
        for kind in ("wall", "cpu")
    )
    wall, cpu = (statistics.median(each.ratio(kind) for each in rounds) for kind in ("wall", "cpu"))
    print(
        f"{title:26} {walls[0]:8.2f} {walls[1]:8.2f} {wall:7.2f}x {cpus[0]:8.2f} {cpus[1]:8.2f} {cpu:7.2f}x "
        f"{100 * rounds[0].fill:5.0f}%",
        flush=True,
    )


def cases(args: argparse.Namespace) -> "list[Case]":
    """The lines of the table."""
    from grpo_side import Case

    names = ("prompts", "samples", "new_tokens", "rows", "row_samples")
    sizes = {name: getattr(args, name) for name in names}
    return [
        Case(updates=updates, fixed=fixed, **sizes) for updates in args.updates for fixed in (False, True)
    ]


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--trl-python", type=Path, required=True, help="interpreter with trl (make bench-train)"
    )
    parser.add_argument("--threads", type=int, default=1, help="for both sides (default: 1)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="steps of each side after the first (default: 3)"
    )
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 2], help="a step (default: 1 2)")
    parser.add_argument("--prompts", type=int, default=16, help="of a step (default: 16)")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt (default: 8)")
    parser.add_argument("--new-tokens", type=int, default=56, help="sampled each (default: 56)")
    parser.add_argument("--microbatch", type=int, default=32, help="sequences, TRL (default: 32)")
    parser.add_argument("--rows", type=int, default=8, help="of a microbatch, jaxrl (default: 8)")
    parser.add_argument("--row-samples", type=int, default=4, help="that fit a row, jaxrl (default: 4)")
    args = parser.parse_args()
    for updates in args.updates:
        part = args.prompts * args.samples / updates
        if args.prompts % updates or part % args.microbatch or args.microbatch % args.samples:
            parser.error(
                f"--microbatch {args.microbatch}: expected whole groups of --samples {args.samples}, and a "
                f"divisor of the {part:g} sequences of an update (--updates {updates})"
            )
    if args.new_tokens < 28:
        parser.error(f"--new-tokens {args.new_tokens}: expected at least 28, of which 12 are not trained")
    return args


def main() -> None:
    """The command."""
    args = arguments()
    os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}  # the peer's
    with pinned(args.threads), tempfile.TemporaryDirectory(prefix="bench_train_") as name:
        peer = Peer(args.trl_python, args.threads, script="trl_bench.py")
        print(f"float32, {args.threads} thread(s), {args.rounds} rounds after 1; {peer.versions}")
        print(f"{args.prompts} prompts x {args.samples} samples, {args.new_tokens} tokens sampled each")
        head = f"{'wall TRL':>8} {'jaxrl':>8} {'':>8} {'CPU TRL':>8} {'jaxrl':>8} {'':>8} {'fill':>6}"
        print(f"{'seconds':26} {head}")
        for case in cases(args):
            rounds = duel(peer, case, rounds=args.rounds, microbatch=args.microbatch, folder=Path(name))
            report(case, asyncio.run(rounds))
        peer.close()


if __name__ == "__main__":
    main()
