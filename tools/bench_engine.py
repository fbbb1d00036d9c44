"""Measures the generation engine on this CPU: economy of prefills, speed against transformers' generate.

    make bench-engine [ARGS="--threads 1 --rounds 5"]
    python tools/bench_engine.py economy
    python tools/bench_engine.py speed --hf-python PYTHON

`economy` plays an agentic workload (16 samples of 8 prompts, 10 turns each, tool outputs of recorded lengths,
tools that take a while) with room for everything, and with half the memory that needed. `speed` sends the
same requests to both sides in turns, the first round of each dropped: 64 at once, prompts of 32 to 512
tokens, 128 sampled tokens each. Ratios are medians over rounds. Prompts are new in every round.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_model import ROOT, Peer, pinned

PROMPTS, SAMPLES, TURNS = 8, 16, 10
SYSTEM, TASK, SAMPLED = 128, 61, 24  # tokens
REQUESTS, NEW_TOKENS = 64, 128
START = ROOT / "configs" / "quickstart" / "start"
DENSE = {
    "vocab_size": 16384,
    "hidden_size": 640,
    "num_heads": 10,
    "num_kv_heads": 2,
    "head_dim": 64,
    "rotary_dim": 16,
    "rope_theta": 1e7,
    "gdn_key_heads": 5,
    "gdn_value_heads": 10,
    "gdn_key_dim": 64,
    "gdn_value_dim": 64,
    "mlp_dim": 2560,
    "dtype": "float32",
}


# --- economy ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Episode:
    """The prompt of a session, and what its tools answer."""

    prompt: list[int]
    outputs: list[list[int]]
    waits: list[float]  # seconds that each tool takes


def workload(vocab: int) -> list[Episode]:
    """The same for everybody: a common system text, a task each, tool outputs of 5 to 90 tokens."""
    rng = np.random.default_rng(0)
    system = rng.integers(6, vocab, SYSTEM).tolist()
    tasks = [rng.integers(6, vocab, TASK).tolist() for _ in range(PROMPTS)]
    return [
        Episode(
            prompt=system + task,
            outputs=[rng.integers(6, vocab, rng.integers(5, 91)).tolist() for _ in range(TURNS - 1)],
            waits=rng.exponential(0.05, TURNS).tolist(),
        )
        for task in tasks
        for _ in range(SAMPLES)
    ]


async def play(engine: Any, index: int, episode: Episode, fed: set[bytes]) -> None:
    """One session; notes in `fed` which prefixes end with a token that no decode step feeds."""
    from jaxrl.contracts import SampleKey, Sampling

    session = engine.open_session()
    for turn, tokens in enumerate([episode.prompt, *episode.outputs]):
        start = max(session.length - 1, 0)
        key = SampleKey(0, f"p{index}", 0, 0, turn)
        await session.generate(tokens, key=key, sampling=Sampling(), max_tokens=SAMPLED)
        ids = np.asarray(session.tokens, np.int32)
        fed |= {ids[: i + 1].tobytes() for i in range(start, len(ids) - SAMPLED - 1)}
        await asyncio.sleep(episode.waits[turn])
    session.close()


async def economy_of(engine: Any, episodes: Sequence[Episode]) -> dict[str, float]:
    """Plays the workload; what it took."""
    fed: set[bytes] = set()
    async with engine:
        await engine.warm_up()
        programs, began = engine.steps.programs(), time.perf_counter()
        peak = asyncio.create_task(peak_pages(engine))
        await asyncio.gather(*(play(engine, i, episode, fed) for i, episode in enumerate(episodes)))
        seconds = time.perf_counter() - began
        peak.cancel()
        await asyncio.gather(peak, return_exceptions=True)
    stats, memory = engine.stats, engine.memory_counts()
    return {
        "seconds": seconds,
        "distinct": len(fed),
        "prefilled": stats.prefilled_tokens,
        "recomputed": stats.recomputed_tokens,
        "planned": memory["dropped_tokens"] - stats.recovered_tokens,
        "offloads": memory["offloads"],
        "preemptions": stats.preemptions,
        "pages": peak_pages.most,  # pyright: ignore[reportFunctionMemberAccess]
        "bytes": engine.cache_bytes(),
        "programs": engine.steps.programs(),
        "compiled": engine.steps.programs() - programs,
    }


async def peak_pages(engine: Any) -> None:
    """Keeps the largest number of pages held in `peak_pages.most`."""
    peak_pages.most = 0  # pyright: ignore[reportFunctionMemberAccess]
    while True:
        held = engine.memory_counts()["pages"]
        peak_pages.most = max(peak_pages.most, held)  # pyright: ignore[reportFunctionMemberAccess]
        await asyncio.sleep(0.002)


def economy() -> None:
    """Prints the table; fails where a bound does not hold."""
    from jaxrl.engine.engine import Engine, EngineOptions
    from jaxrl.model.hub import load_hub

    model = load_hub(START, dtype="float32")
    episodes = workload(model.spec.vocab_size)
    options = EngineOptions(slots=64, context=1216, parked=72, prefill_rows=8, decode_steps=4)
    roomy = Engine(model, replace(options, cache_bytes=None))
    print(f"{len(episodes)} sessions of {TURNS} turns; bytes are those of the device's cache")
    print(f"{'':26} {'prefilled':>9} {'distinct':>9} {'ratio':>6} {'planned':>8} {'MiB':>6} {'s':>6}")
    full = row("room for all", asyncio.run(economy_of(roomy, episodes)))
    page, state = roomy.steps.page_bytes(), roomy.steps.row_bytes()
    need = full["pages"] * page + (options.slots + options.parked) * state
    half = replace(options, slots=32, parked=16, cache_bytes=int(need / 2))
    for name, change in (
        ("half the need, to the host", {}),
        ("half the need, dropped", {"eviction": "recompute"}),
    ):
        got = row(name, asyncio.run(economy_of(Engine(model, replace(half, **change)), episodes)))
        check(got["bytes"] <= need / 2, f"{got['bytes']} bytes exceed the budget of {need / 2:.0f}")
    print(f"compiled programs: {full['programs']}, after warm-up: {full['compiled']} more")


def row(name: str, got: dict[str, float]) -> dict[str, float]:
    """Prints one line; every prefill must be needed or planned."""
    ratio = got["prefilled"] / (got["distinct"] + got["planned"])
    counts = f"{got['prefilled']:9.0f} {got['distinct']:9.0f} {ratio:6.3f} {got['planned']:8.0f}"
    extra = f"{got['offloads']:.0f} offloads, {got['preemptions']:.0f} preemptions"
    print(f"{name:26} {counts} {got['bytes'] / 2**20:6.1f} {got['seconds']:6.1f}  {extra}", flush=True)
    check(ratio <= 1.05, f"{name}: {ratio:.3f} of what is distinct or planned was prefilled")
    check(got["compiled"] == 0, f"{name}: {got['compiled']} programs were compiled after warm-up")
    return got


# --- speed -----------------------------------------------------------------------------------------


def dense_model(directory: Path) -> Path:
    """A dense model of 100 million parameters with random weights, in the hub's layout."""
    from flax import nnx

    from jaxrl.model.hub import save_hub
    from jaxrl.model.spec import ModelSpec, hybrid_layers
    from jaxrl.model.transformer import Transformer

    spec = ModelSpec(layer_types=hybrid_layers(12), **DENSE)  # pyright: ignore[reportArgumentType]
    save_hub(Transformer(spec, rngs=nnx.Rngs(0)), directory)
    return directory


def prompts_of(seed: int, vocab: int, count: int) -> list[list[int]]:
    """Lengths spread over 32 to 512."""
    rng = np.random.default_rng(seed)
    lengths = np.linspace(32, 512, REQUESTS).astype(int)
    return [rng.integers(6, vocab, lengths[i % REQUESTS]).tolist() for i in range(count)]


async def serve(engine: Any, prompts: Sequence[list[int]], seed: int) -> dict[str, float]:
    """All requests at once; tokens a second, and what the host takes of a dispatch."""
    from jaxrl.contracts import SampleKey, Sampling

    async def one(index: int, prompt: list[int]) -> int:
        session = engine.open_session()
        key = SampleKey(seed, f"r{index}", 0, 0, 0)
        out = await session.generate(prompt, key=key, sampling=Sampling(), max_tokens=NEW_TOKENS)
        session.close()
        return len(out.tokens)

    stats = engine.stats
    device, idle, began = stats.device_seconds, stats.idle_seconds, time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts))))
    check(tokens == len(prompts) * NEW_TOKENS, f"expected {NEW_TOKENS} tokens each, got {tokens} in all")
    return {
        "tokens/s": tokens / (time.perf_counter() - began),
        "host": (stats.idle_seconds - idle) / (stats.device_seconds - device),
    }


async def duel(name: str, path: Path, peer: Peer, rounds: int, folder: Path) -> None:
    """Both sides in turns on one model."""
    from jaxrl.engine.engine import Engine, EngineOptions
    from jaxrl.model.hub import load_hub

    model = load_hub(path, dtype="float32")
    options = EngineOptions(
        slots=REQUESTS,
        context=640,
        parked=1,
        prefill_rows=8,
        prefill_buckets=(64, 128, 256),
        decode_steps=8,
    )
    engine = Engine(model, options)
    peer.ask(op="generate", model=str(path), new_tokens=NEW_TOKENS)
    rows: list[tuple[float, float, float, float]] = []
    async with engine:
        await engine.warm_up()
        programs = engine.steps.programs()
        for index in range(rounds + 1):
            prompts = prompts_of(index, model.spec.vocab_size, REQUESTS)
            (folder / "prompts.json").write_text(json.dumps(prompts))
            theirs = peer.ask(op="generate_run", prompts=str(folder / "prompts.json"))
            ours = await serve(engine, prompts, index)
            many = await serve(
                engine, prompts_of(100 + index, model.spec.vocab_size, 4 * REQUESTS), 100 + index
            )
            if index:
                rate = REQUESTS * NEW_TOKENS / theirs["wall"]
                rows.append((rate, ours["tokens/s"], ours["host"], many["tokens/s"]))
        compiled = engine.steps.programs() - programs
    theirs, ours, host, many = (statistics.median(column) for column in zip(*rows, strict=True))
    ratio = statistics.median(b / a for a, b, _, _ in rows)
    crowd = statistics.median(d / b for _, b, _, d in rows)
    print(
        f"{name:34} {theirs:8.0f} {ours:8.0f} {ratio:6.2f}x {many:8.0f} {crowd:6.2f}x {100 * host:7.1f}% "
        f"{compiled:9}",
        flush=True,
    )


def speed(hf_python: Path, threads: int, rounds: int, only: str | None) -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory(prefix="bench_engine_") as name:
        folder = Path(name)
        peer = Peer(hf_python, threads)
        print(f"float32, {threads} thread(s), {rounds} rounds after 1; {peer.versions}; tokens a second")
        print(f"{'':34} {'HF':>8} {'jaxrl':>8} {'':>7} {'at 256':>8} {'':>7} {'host':>8} {'compiled':>9}")
        if only != "dense":
            asyncio.run(duel("MoE of the quickstart, 1M", START, peer, rounds, folder))
        if only != "moe":
            path = dense_model(folder / "dense")
            asyncio.run(duel("dense, 12 layers, d 640, 100M", path, peer, rounds, folder))
        peer.close()


def check(holds: bool, what: str) -> None:
    """Ends the program where a bound does not hold."""
    if not holds:
        sys.exit(f"bench_engine: {what}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("all", "economy", "speed"), default="all")
    parser.add_argument("--hf-python", type=Path, help="interpreter with torch and transformers, for speed")
    parser.add_argument("--threads", type=int, default=2, help="for both sides (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of speed (default: 3)")
    parser.add_argument("--only", choices=("moe", "dense"), help="one model of speed; dense: 20 minutes")
    args = parser.parse_args()
    if args.part != "economy" and args.hf_python is None:
        parser.error(
            "speed needs --hf-python: an interpreter with torch and transformers (make bench-engine)"
        )
    with pinned(args.threads):
        if args.part != "speed":
            economy()
        if args.part != "economy":
            speed(args.hf_python, args.threads, args.rounds, args.only)


if __name__ == "__main__":
    main()
