"""`python -m kernels.bench`: times every public op against a peer and against this machine's roofline.

All variants of a case and two probes (a big matmul, a big copy) take turns, round after round, so that
a machine that slows down or speeds up does so for all of them. A variant whose results differ from its
peer's is not timed, and the command then exits with status 1.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels import roofline
from kernels.bench_cases import OPS, Case, Setting, Variant, cases
from kernels.roofline import Peak, Probe

SCHEMA = 1
# One call compiles, one sets how many calls make a sample.
WARM_UP = 2
# A sample shorter than this is a mean over several calls, or the clock and the dispatch would show.
SHORTEST_SAMPLE = 5e-3
PROBES = ("matmul", "copy")
PROBE_REPETITIONS = 10
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Plan:
    """The options of one run, resolved."""

    ops: tuple[str, ...]
    setting: Setting
    device: Any  # a jax.Device, which type checkers do not take for a type
    repetitions: int
    json: Path | None


@dataclass(frozen=True)
class Row:
    """One measurement: all samples in seconds, or why there are none."""

    variant: str
    seconds: tuple[float, ...] = ()
    times_peer: float | None = None
    of_roofline: float | None = None
    unavailable: str = ""
    wrong: str = ""


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a variant was wrong, else 0."""
    plan = parse(argv)
    with jax.default_device(plan.device):
        return _run(plan)


def parse(argv: list[str] | None) -> Plan:
    """Command line to plan; a wrong option prints what was expected and exits with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--op", choices=tuple(OPS), help="only this op (default: all)")
    parser.add_argument("--platform", help="cpu, gpu or tpu (default: JAX's current one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line per measurement")
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes: shows that everything runs, not speed"
    )
    options = parser.parse_args(argv)
    platform = options.platform or jax.default_backend()
    try:
        device = jax.devices(platform)[0]
    except RuntimeError as error:
        parser.error(f"--platform: expected one that JAX finds here; got {platform!r}: {error}")
    on_cpu = device.platform == "cpu"
    size = "quick" if options.quick else "cpu" if on_cpu else "accelerator"
    setting = Setting(device.platform, size, jnp.float32 if on_cpu else jnp.bfloat16)
    ops = (options.op,) if options.op else tuple(OPS)
    return Plan(ops, setting, device, 2 if options.quick else 5, options.json)


def _run(plan: Plan) -> int:
    probes = _probes(plan)
    peak, note = _peak(plan.device, probes)
    print(_header(plan, note), flush=True)
    wrong: int = 0
    lengths: dict[str, list[Case]] = {}
    for op in plan.ops:
        for case in cases(op, plan.setting):
            rows, peak = measure(case, probes, repetitions=plan.repetitions, peak=peak)
            print(report(case, rows, peak), flush=True)
            wrong += sum(bool(row.wrong) for row in rows)
            if op == "gated_delta_rule" and case.mode != "decode" and rows[0].seconds:
                lengths.setdefault(case.mode, []).append(case)
            if plan.json:
                _append(plan, case, rows, peak)
    for mode, each in lengths.items():
        print(per_token(mode, each, repetitions=plan.repetitions), flush=True)
    return 1 if wrong else 0


def _peak(device: Any, probes: tuple[Probe, Probe]) -> tuple[Peak, str]:
    reason = ""
    if device.platform != "cpu":
        try:
            peak = roofline.datasheet(device.device_kind)
            return (
                peak,
                f"{peak.flops_per_s / 1e12:.0f} TFLOP/s, {peak.bytes_per_s / 1e9:.0f} GB/s ({peak.source})",
            )
        except ValueError as error:
            reason = f", since {error}"
    source = "best matmul and in-place copy so far, measured here in turn with the cases"
    samples = interleaved([probe.run for probe in probes], repetitions=PROBE_REPETITIONS)
    return _raised(Peak(0, 0, source, measured=True), probes, samples), source + reason


def _raised(peak: Peak, probes: tuple[Probe, Probe], samples: list[list[float]]) -> Peak:
    matmul, copy = (probe.amount / min(each) for probe, each in zip(probes, samples, strict=True))
    return replace(peak, flops_per_s=max(peak.flops_per_s, matmul), bytes_per_s=max(peak.bytes_per_s, copy))


def threads() -> int:
    """Processors that this process may run on; XLA and BLAS start as many threads."""
    return len(os.sched_getaffinity(0))


def _header(plan: Plan, peak_note: str) -> str:
    load = os.getloadavg()[0]
    return (
        f"kernels.bench  jax {jax.__version__}, {plan.device.platform}: {plan.device.device_kind}, "
        f"{threads()} threads, load average {load:.1f} at the start\n"
        f"{WARM_UP} warm-up, then {plan.repetitions} repetitions, variants in turn; median (min..max)\n"
        f"roofline: {peak_note}\n"
        "x peer: the peer's time over this one's, median of the ratios within a repetition. of roofline:\n"
        "time at the best measured (or published) rates over this one's best; above 100% the arrays fit in\n"
        "caches. GFLOP/s and GB/s count what the op needs, not what an implementation does."
    )


def _probes(plan: Plan) -> tuple[Probe, Probe]:
    big = plan.setting.size == "accelerator"
    matmul, copy = {"quick": (64, 1 << 12), "cpu": (1024, 1 << 25)}.get(plan.setting.size, (8192, 1 << 29))
    return roofline.matmul_probe(
        jnp.bfloat16 if big else plan.setting.dtype, size=matmul
    ), roofline.copy_probe(size=copy)


def measure(
    case: Case, probes: tuple[Probe, Probe], *, repetitions: int, peak: Peak
) -> tuple[list[Row], Peak]:
    """One row per variant of the case, and the roofline they were held against.

    Args:
      peak: a published one, or the best measured so far, which `probes` may raise.
    """
    calls, rows = _warm_up(case)
    timed = [*calls.values(), *(probe.run for probe in probes)]
    samples = dict(zip([*calls, *PROBES], interleaved(timed, repetitions=repetitions), strict=True))
    if peak.measured:
        peak = _raised(peak, probes, [samples[name] for name in PROBES])
    peer = samples.get(case.variants[-1].name)
    for name in calls:
        rows[name] = _row(name, samples[name], peer, peak.bound(case.work).seconds)
    return [rows[variant.name] for variant in case.variants], peak


def _row(name: str, seconds: list[float], peer: list[float] | None, least: float) -> Row:
    return Row(
        name,
        tuple(seconds),
        times_peer=None if peer is None else paired_ratio(peer, seconds),
        of_roofline=least / min(seconds),
    )


def paired_ratio(a: list[float], b: list[float]) -> float:
    """Median over repetitions of a / b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def interleaved(calls: list[Callable[[], Any]], *, repetitions: int) -> list[list[float]]:
    """Seconds per call of each, taken in turn: A B C A B C ..."""
    counts = [max(1, min(100, math.ceil(SHORTEST_SAMPLE / _seconds(call, 1)))) for call in calls]
    rounds = [
        [_seconds(call, count) for call, count in zip(calls, counts, strict=True)] for _ in range(repetitions)
    ]
    return [list(samples) for samples in zip(*rounds, strict=True)]


def _seconds(call: Callable[[], Any], count: int) -> float:
    out, start = None, time.perf_counter()
    for _ in range(count):
        out = call()
    jax.block_until_ready(out)
    return max(time.perf_counter() - start, 1e-9) / count


def _warm_up(case: Case) -> tuple[dict[str, Callable[[], Any]], dict[str, Row]]:
    """Compiles and runs each variant once; keeps those that run and agree with the peer."""
    calls: dict[str, Callable[[], Any]] = {}
    rows: dict[str, Row] = {}
    expected = None
    for variant in reversed(case.variants):
        if variant.run is None:
            rows[variant.name] = Row(variant.name, unavailable=variant.unavailable)
            continue
        call = _prepare(case, variant)
        try:
            got = jax.tree.map(np.asarray, call())
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
            rows[variant.name] = Row(variant.name, unavailable=str(error).splitlines()[0])
            continue
        expected = got if expected is None else expected
        rows[variant.name] = Row(variant.name, wrong=disagreement(got, expected, TOLERANCE[case.dtype]))
        if not rows[variant.name].wrong:
            calls[variant.name] = call
    return {variant.name: calls[variant.name] for variant in case.variants if variant.name in calls}, rows


def _prepare(case: Case, variant: Variant) -> Callable[[], Any]:
    run = variant.run
    assert run is not None
    if variant.on_host:
        return run
    first = len(case.args) - case.carried
    compiled = jax.jit(run, donate_argnums=tuple(range(first, len(case.args))))
    fixed, held = case.args[:first], [jax.tree.map(jnp.copy, case.args[first:])]

    def call() -> Any:
        out = compiled(*fixed, *held[0])
        if not case.carried:
            return out
        held[0] = out[len(out) - case.carried :]
        return out[: len(out) - case.carried]

    return call


def disagreement(got: Any, expected: Any, tolerance: float) -> str:
    """Empty, or by how much two results differ, relative to the largest expected value."""
    for number, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        if not error <= tolerance:
            share = f"{error:.1e} of its largest value; limit {tolerance:.0e}"
            return f"result {number} differs from the peer's by {share}"
    return ""


def report(case: Case, rows: list[Row], peak: Peak) -> str:
    """The case's block of the table."""
    bound = peak.bound(case.work)
    head = (
        f"\n{case.op} {case.mode}  {case.shape}  {case.dtype}\n"
        f"  needs {case.work.flops / 1e9:.3g} GFLOP, {case.work.bytes / 1e6:.3g} MB; roofline "
        f"{peak.flops_per_s / 1e9:.0f} GFLOP/s, {peak.bytes_per_s / 1e9:.1f} GB/s: "
        f"{bound.seconds * 1e3:.3g} ms ({bound.limit})\n"
        f"  {'':36}{'ms':>9} {'(min..max)':>19} {'us/token':>9} {'GFLOP/s':>8} {'GB/s':>6} "
        f"{'x peer':>7} {'of roofline':>12}\n"
    )
    return head + "\n".join(_line(case, row) for row in rows)


def _line(case: Case, row: Row) -> str:
    if row.unavailable or row.wrong:
        return f"  {row.variant:36}" + (
            f"WRONG, not timed: {row.wrong}" if row.wrong else f"unavailable: {row.unavailable}"
        )
    median = statistics.median(row.seconds)
    spread = f"({min(row.seconds) * 1e3:.3g}..{max(row.seconds) * 1e3:.3g})"
    peer = "" if row.times_peer is None else f"{row.times_peer:.2f}"
    return (
        f"  {row.variant:36}{median * 1e3:9.3g} {spread:>19} {median * 1e6 / case.tokens:9.3g} "
        f"{case.work.flops / median / 1e9:8.3g} {case.work.bytes / median / 1e9:6.3g} "
        f"{peer:>7} {row.of_roofline:12.1%}"
    )


def per_token(mode: str, lengths: list[Case], *, repetitions: int) -> str:
    """Cost per token of one op at several lengths, which take turns; a linear op's stays flat."""
    calls = [_prepare(case, case.variants[0]) for case in lengths]
    for call in calls:
        jax.block_until_ready(call())
    costs = [
        [seconds * 1e6 / case.tokens for seconds in samples]
        for case, samples in zip(lengths, interleaved(calls, repetitions=repetitions), strict=True)
    ]
    shown = ", ".join(
        f"T {case.tokens}: {statistics.median(cost):.3g} ({min(cost):.3g}..{max(cost):.3g})"
        for case, cost in zip(lengths, costs, strict=True)
    )
    growth = paired_ratio(costs[-1], costs[0])
    return f"\n{lengths[0].op} {mode}, us per token, lengths in turn: {shown}; last / first {growth:.2f}"


def _append(plan: Plan, case: Case, rows: list[Row], peak: Peak) -> None:
    assert plan.json is not None
    with plan.json.open("a") as file:
        for row in rows:
            file.write(json.dumps(_record(plan, case, row, peak)) + "\n")


def _record(plan: Plan, case: Case, row: Row, peak: Peak) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "op": case.op,
        "mode": case.mode,
        "shape": case.shape,
        "dtype": case.dtype,
        "platform": plan.device.platform,
        "device": plan.device.device_kind,
        "threads": threads(),
        "load_average": os.getloadavg()[0],
        "jax": jax.__version__,
        "variant": row.variant,
        "peer": case.variants[-1].name,
        "warm_up": WARM_UP,
        "repetitions": plan.repetitions,
        "seconds": row.seconds,
        "tokens": case.tokens,
        "flops": case.work.flops,
        "bytes": case.work.bytes,
        "times_peer": row.times_peer,
        "of_roofline": row.of_roofline,
        "bound": peak.bound(case.work).limit,
        "peak_flops_per_s": peak.flops_per_s,
        "peak_bytes_per_s": peak.bytes_per_s,
        "peak_source": peak.source,
        "unavailable": row.unavailable or None,
        "wrong": row.wrong or None,
    }


if __name__ == "__main__":
    sys.exit(main())
