"""The engine's greedy tokens against those of Hugging Face `generate`, as tools/hf_generate.py recorded them.

Where the reference's best token leads by no more than the error, another choice is right, too, and what
follows is another text: such a sequence is compared up to there.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxrl.contracts import Generation, SampleKey, Sampling
from jaxrl.engine.engine import Engine, EngineOptions
from jaxrl.model.hub import load_hub
from jaxrl.model.spec import Dtype
from jaxrl.model.transformer import Transformer

KINDS = ("dense", "moe")
# How far a logit may lie from the truth: float32 in the random dense models loses more than in the others.
GATES: dict[str, dict[str, float]] = {
    "float64": {"dense": 1e-9, "moe": 1e-9},
    "float32": {"dense": 2e-4, "moe": 5e-5},
}


@dataclass(frozen=True)
class Trace:
    """What the reference generated for P prompts, T new tokens each."""

    prompts: Sequence[list[int]]
    tokens_PT: np.ndarray
    logprobs_PT: np.ndarray
    gaps_PT: np.ndarray
    embedding_scale: float

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Reads what tools/hf_generate.py wrote."""
        record = np.load(path)
        prompts = np.split(record["prompts"], np.cumsum(record["lengths"])[:-1])
        return cls(
            [prompt.tolist() for prompt in prompts],
            record["tokens"],
            record["logprobs"],
            record["gaps"],
            float(record["embedding_scale"]),
        )


@dataclass(frozen=True)
class Verdict:
    """One way of generating in one dtype."""

    compared: int  # equal tokens
    recorded: int
    different: int  # sequences in which another token was chosen than a clear best one
    error: float  # largest difference of the equal tokens' log-probabilities
    gate: float

    @property
    def holds(self) -> bool:
        """Every clear best token was chosen, and most of the trace compared; a NaN does not hold."""
        enough = self.compared >= 0.9 * self.recorded
        return enough and self.different == 0 and self.error <= 2 * self.gate


def load_model(directory: Path, kind: str, dtype: Dtype, scale: float) -> Transformer:
    """The checkpoint KIND_hub as the reference had it."""
    model = load_hub(directory / f"{kind}_hub", dtype=dtype)
    model.embed.set_value(model.embed.get_value() * scale)
    return model


async def generate(engine: Engine, trace: Trace, *, together: bool) -> list[Generation]:
    """Greedy tokens for every prompt, one request after the other or all at once."""

    async def one(number: int) -> Generation:
        session = engine.open_session()
        try:
            return await session.generate(
                trace.prompts[number],
                key=SampleKey(0, "greedy", 0, number, 0),
                sampling=Sampling(temperature=0),
                max_tokens=trace.tokens_PT.shape[1],
                stop_ids=(),
            )
        finally:
            session.close()

    numbers = range(len(trace.prompts))
    async with engine:
        if together:
            return list(await asyncio.gather(*map(one, numbers)))
        return [await one(number) for number in numbers]


def judge(made: Sequence[Generation], trace: Trace, gate: float) -> Verdict:
    """Compares token by token."""
    compared = different = 0
    error = 0.0
    wanted = zip(trace.tokens_PT, trace.logprobs_PT, trace.gaps_PT, strict=True)
    for out, (tokens, logprobs, gaps) in zip(made, wanted, strict=True):
        if len(out.tokens) != len(tokens):
            raise ValueError(f"expected {len(tokens)} new tokens; got {len(out.tokens)}, finish {out.finish}")
        same = np.array(out.tokens) == tokens
        until = len(tokens) if same.all() else int(np.argmin(same))
        different += until < len(tokens) and bool(gaps[until] > 2 * gate)
        compared += until
        error = max(error, np.abs(np.array(out.full_logprobs)[:until] - logprobs[:until]).max(initial=0.0))
    return Verdict(compared, trace.tokens_PT.size, different, error, gate)


def verdicts(directory: Path, kind: str, dtype: Dtype, options: EngineOptions) -> dict[str, Verdict]:
    """How the engine does alone and in a crowd, with the same compiled programs."""
    trace = Trace.load(directory / f"{kind}_generate.npz")
    engine = Engine(load_model(directory, kind, dtype, trace.embedding_scale), options)
    made = {
        name: asyncio.run(generate(engine, trace, together=name == "crowd")) for name in ("single", "crowd")
    }
    return {name: judge(outs, trace, GATES[dtype][kind]) for name, outs in made.items()}
