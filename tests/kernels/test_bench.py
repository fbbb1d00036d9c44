"""The benchmark's arithmetic, refusals and output; nothing here depends on how fast anything is."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from kernels import bench, roofline
from kernels.bench_cases import OPS, Case, Setting, Variant, loop_numpy, loop_scan
from kernels.grouped_matmul import reference as expert_reference

NOTHING_YET = roofline.Peak(0, 0, "measured", measured=True)


def refuse(x):
    raise NotImplementedError("no such instruction here")


def tiny_case(*variants):
    return Case("op", "forward", "T3", "float32", 3, roofline.Work(6, 24), (jnp.arange(3.0),), variants)


def probes():
    return roofline.matmul_probe(jnp.float32, size=4), roofline.copy_probe(size=4)


def test_variants_take_turns():
    log = []
    samples = bench.interleaved([lambda: log.append("a"), lambda: log.append("b")], repetitions=3)
    assert [len(each) for each in samples] == [3, 3]
    rounds = log[2:]  # after one call each that sets the sample size
    turns = [x for i, x in enumerate(rounds) if i == 0 or rounds[i - 1] != x]
    assert turns == ["a", "b"] * 3


def test_ratio_pairs_samples_of_the_same_repetition():
    # A machine that slows down tenfold half-way leaves the ratio alone.
    assert bench.paired_ratio([2, 20, 200], [1, 10, 100]) == 2


@pytest.mark.parametrize(
    ("got", "expected"), [([1.0, 2.0], [1.0, 2.1]), ([np.nan, 1.0], [1.0, 1.0]), ([0.1], [0.0])]
)
def test_disagreement_is_found(got, expected):
    assert "result 0 differs" in bench.disagreement([np.array(got)], [np.array(expected)], 1e-3)
    assert bench.disagreement([np.array(expected)], [np.array(expected)], 1e-3) == ""


def test_wrong_and_missing_variants_are_said_and_not_timed():
    case = tiny_case(
        Variant("good", lambda x: x + x),
        Variant("wrong", lambda x: x * 2.5),
        Variant("raises", refuse),
        Variant("absent", unavailable="needs another machine"),
        Variant("peer", lambda x: 2 * x),
    )
    rows, peak = bench.measure(case, probes(), repetitions=2, peak=NOTHING_YET)
    assert peak.flops_per_s > 0 and peak.bytes_per_s > 0
    assert [row.variant for row in rows] == ["good", "wrong", "raises", "absent", "peer"]
    assert [len(row.seconds) for row in rows] == [2, 0, 0, 0, 2]
    assert rows[-1].times_peer == 1
    text = bench.report(case, rows, peak)
    assert "wrong" in text and "WRONG, not timed: result 0 differs from the peer's by 2.5e-01" in text
    assert "unavailable: no such instruction here" in text
    assert "unavailable: needs another machine" in text


def test_measured_peak_only_rises():
    high = roofline.Peak(1e30, 0, "measured", measured=True)
    _, peak = bench.measure(tiny_case(Variant("peer", lambda x: 2 * x)), probes(), repetitions=1, peak=high)
    assert peak.flops_per_s == 1e30 and peak.bytes_per_s > 0


def test_published_peak_replaces_the_measured_one():
    peak = roofline.Peak(1.0, 1.0, "a datasheet")
    rows, used = bench.measure(
        tiny_case(Variant("peer", lambda x: 2 * x)), probes(), repetitions=1, peak=peak
    )
    assert used == peak
    assert rows[0].of_roofline == pytest.approx(24 / min(rows[0].seconds))


def test_carried_state_goes_from_call_to_call():
    case = Case(
        "op",
        "decode",
        "",
        "float32",
        1,
        roofline.Work(1, 1),
        (jnp.float32(2), jnp.float32(1)),
        (Variant("peer", lambda x, state: (state, state * x)),),
        carried=1,
    )
    call = bench._prepare(case, case.variants[0])
    assert [float(call()[0]) for _ in range(4)] == [1, 2, 4, 8]
    assert float(case.args[1]) == 1


def test_expert_loops_agree_with_the_reference():
    rng = np.random.default_rng(0)
    x, gate_up, down = (rng.standard_normal(s).astype(np.float32) for s in ((5, 3), (4, 3, 4), (4, 2, 3)))
    combine = np.eye(4, dtype=np.float32)[[0, 1, 1, 3, 0]] * 0.5
    want = expert_reference.expert_mlp(x, combine, gate_up_EDF=gate_up, down_EFD=down)
    np.testing.assert_allclose(loop_numpy(x, gate_up, down, combine), want, atol=1e-5)
    on_device = map(jnp.asarray, (x, gate_up, down, combine))
    np.testing.assert_allclose(loop_scan(*on_device), want, atol=1e-5)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--platform", "abacus"], "--platform: expected one that JAX finds here; got 'abacus'"),
        (["--op", "fft"], "invalid choice: 'fft'"),
    ],
)
def test_wrong_options_exit_with_status_2(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_quick_prints_a_table_and_appends_json(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    argv = ["--quick", "--op", "causal_conv1d", "--platform", "cpu", "--json", str(file)]
    assert bench.main(argv) == 0
    once = file.read_text()
    assert bench.main(argv) == 0
    assert file.read_text().startswith(once)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["mode"] for row in rows] == ["forward", "forward", "forward+backward", "forward+backward"] * 2
    assert all(len(row["seconds"]) == row["repetitions"] and row["schema"] == 1 for row in rows)
    shown = capsys.readouterr().out
    assert "causal_conv1d forward  B1 T64 D32 W4  float32" in shown and "(peer)" in shown


def test_gpu_rows_say_what_cannot_run_there():
    setting = Setting("gpu", "quick", jnp.bfloat16)
    case = next(OPS["expert_mlp"](setting))
    absent = {variant.name: variant.unavailable for variant in case.variants if variant.unavailable}
    assert absent == {"NumPy loop over experts": "runs on the host in float32; compared on cpu only"}


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_every_op_runs_and_agrees_with_its_peer(op, capsys):
    assert bench.main(["--quick", "--op", op, "--platform", "cpu"]) == 0
    assert "WRONG" not in capsys.readouterr().out


def test_cost_per_token_compares_the_longest_with_the_shortest(monkeypatch):
    monkeypatch.setattr(bench, "interleaved", lambda calls, repetitions: [[3e-6, 30e-6], [4e-6, 40e-6]])
    short = tiny_case(Variant("xla", lambda x: x))
    long = replace(short, tokens=4)
    shown = bench.per_token("forward", [short, long], repetitions=2)
    assert shown.endswith("T 3: 5.5 (1..10), T 4: 5.5 (1..10); last / first 1.00")
