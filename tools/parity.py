"""Compares the model with Hugging Face transformers on new random weights; exit status 0 if every gate holds.

    make parity [ARGS="--seed N"]    builds the reference's environment first
    python tools/parity.py --hf-python PYTHON [--seed N]

PYTHON runs tools/hf_traces.py and needs torch and transformers; this process needs neither.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import jax
from parity_cases import DTYPES, KINDS, Comparison, Result

ROOT = Path(__file__).resolve().parent.parent


def make_traces(python: Path, directory: Path, seed: int) -> None:
    """New weights, tokens and traces; ends the program if the reference fails."""
    script = ROOT / "tools" / "hf_traces.py"
    command = [str(python), str(script), "--out", str(directory), "--seed", str(seed)]
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
    if status := subprocess.run(command, env=os.environ | quiet).returncode:
        sys.exit(f"expected {script} to succeed; got exit status {status}: see above")


def show(kind: str, result: Result) -> None:
    """One line of the table."""
    verdict = "ok" if result.holds else "FAIL"
    figures = f"{result.error:9.1e} {result.gate:9.1e}"
    print(
        f"{kind:6} {result.dtype:9} {result.case:45.45} {result.measure:9} {figures}  {verdict}", flush=True
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--hf-python", type=Path, required=True, help="interpreter with torch and transformers"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".cache" / "parity", help="directory for the traces"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="default: a fresh one")
    args = parser.parse_args()
    start = time.monotonic()
    print(f"seed {args.seed}", flush=True)
    make_traces(args.hf_python, args.out, args.seed)
    jax.config.update("jax_enable_x64", True)
    print(f"{'model':6} {'dtype':9} {'case':45} {'measure':9} {'error':>9} {'gate':>9}")
    failed = total = 0
    for kind in KINDS:
        for dtype in DTYPES:
            for result in Comparison(args.out, kind, dtype).results():
                show(kind, result)
                total, failed = total + 1, failed + (not result.holds)
    print(f"{total - failed} of {total} hold (seed {args.seed}, {time.monotonic() - start:.0f} s)")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
