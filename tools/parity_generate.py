"""Compares the engine's greedy tokens with Hugging Face `generate` on new weights; exit status 0 if all hold.

    make parity-generate [ARGS="--seed N"]    builds the reference's environment first
    python tools/parity_generate.py --hf-python PYTHON [--seed N]

PYTHON runs tools/hf_generate.py and needs torch and transformers; this process needs neither.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import jax
from generate_cases import KINDS, verdicts

from jaxrl.engine.engine import EngineOptions

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = EngineOptions(slots=5, context=352, prefill_rows=3, prefill_buckets=(8, 64), decode_steps=4)


def make_traces(python: Path, directory: Path, seed: int) -> None:
    """New weights, prompts and traces; ends the program if the reference fails."""
    script = ROOT / "tools" / "hf_generate.py"
    command = [str(python), str(script), "--directory", str(directory), "--seed", str(seed), "--new-weights"]
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
    if status := subprocess.run(command, env=os.environ | quiet).returncode:
        sys.exit(f"expected {script} to succeed; got exit status {status}: see above")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--hf-python", type=Path, required=True, help="interpreter with torch and transformers"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".cache" / "generate", help="directory for the traces"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="default: a fresh one")
    args = parser.parse_args()
    start, failed = time.monotonic(), 0
    print(f"seed {args.seed}", flush=True)
    make_traces(args.hf_python, args.out, args.seed)
    jax.config.update("jax_enable_x64", True)
    print("model  dtype    requests  equal tokens  log-prob error     gate")
    for kind in KINDS:
        for dtype in ("float64", "float32"):
            for way, made in verdicts(args.out, kind, dtype, OPTIONS).items():
                equal = f"{made.compared} of {made.recorded}"
                figures = f"{equal:>12}  {made.error:14.1e}  {2 * made.gate:7.1e}"
                print(f"{kind:6} {dtype:8} {way:8}  {figures}  {'ok' if made.holds else 'FAIL'}", flush=True)
                failed += not made.holds
    print(f"{failed} failures (seed {args.seed}, {time.monotonic() - start:.0f} s)")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
