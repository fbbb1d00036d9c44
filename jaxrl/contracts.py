"""Types that the parts of jaxrl exchange. Imports no JAX and does no I/O.

Array suffixes follow the table in `jaxrl/README.md`; here only T (token) appears.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32, Int16, Int32


class Outcome(StrEnum):
    """How a rollout ended: a closed set."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    MALFORMED = "malformed"
    STUCK_IN_LOOP = "stuck_in_loop"
    MAX_TURNS = "max_turns"
    AGENT_TIMEOUT = "agent_timeout"
    SANDBOX_OOM = "sandbox_oom"
    CONTEXT_FULL = "context_full"
    SUSPECTED_TAMPERING = "suspected_tampering"
    INFRA_ERROR = "infra_error"
    GRADER_ERROR = "grader_error"
    GRADER_TIMEOUT = "grader_timeout"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class OutcomeRule:
    """What an outcome means for learning.

    `reward` None means "as graded" for a trained outcome and "no reward" for a masked one.
    """

    reward: float | None
    trained: bool
    votes: bool  # counts in its group's baseline
    retried: bool


_FAILED = OutcomeRule(reward=0.0, trained=True, votes=True, retried=False)
_FAULT = OutcomeRule(reward=None, trained=False, votes=False, retried=True)

OUTCOME_RULES: Mapping[Outcome, OutcomeRule] = {
    Outcome.RESOLVED: OutcomeRule(reward=1.0, trained=True, votes=True, retried=False),
    Outcome.UNRESOLVED: _FAILED,
    Outcome.MALFORMED: _FAILED,
    Outcome.STUCK_IN_LOOP: _FAILED,
    Outcome.MAX_TURNS: _FAILED,
    Outcome.AGENT_TIMEOUT: _FAILED,
    Outcome.SANDBOX_OOM: _FAILED,
    Outcome.CONTEXT_FULL: OutcomeRule(reward=None, trained=True, votes=True, retried=False),
    Outcome.SUSPECTED_TAMPERING: OutcomeRule(reward=0.0, trained=False, votes=True, retried=False),
    Outcome.INFRA_ERROR: _FAULT,
    Outcome.GRADER_ERROR: _FAULT,
    Outcome.GRADER_TIMEOUT: _FAULT,
    Outcome.CANCELLED: OutcomeRule(reward=None, trained=False, votes=False, retried=False),
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution a token is drawn from: temperature, then top-k, then top-p, then min-p.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 mean "off".
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class SampleKey(NamedTuple):
    """What a token's randomness depends on, beside its position: never slot, batch or timing."""

    seed: int
    task: str
    epoch: int
    sample: int
    turn: int


Finish = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Tokens that the engine sampled for one turn.

    `stop` means that the last token is one of the stop ids or completes a stop string (it is
    included); `length` that the turn's budget ended; `context` that the engine's context is full;
    None that this is a part of a stream and more follows.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]  # of the distribution actually sampled
    full_logprobs: Sequence[float]  # of the untruncated softmax at temperature 1
    versions: Sequence[int]  # weight version that made each token
    finish: Finish | None
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()  # per token, most likely first, if asked for
    routed_experts: Int16[np.ndarray, "T L X"] | None = field(default=None, compare=False)
    """Experts of every token that this turn fed to the model: the last of the turn before, the prompt, and
    all sampled ones but the last. Only from an engine that records them."""


@runtime_checkable
class Session(Protocol):
    """One conversation held by the engine; its context only grows."""

    @property
    def length(self) -> int:
        """Tokens so far, prompts and samples together."""
        ...

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        key: SampleKey,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> Generation:
        """Appends `tokens` to the context, then samples up to `max_tokens` more."""
        ...

    def close(self) -> None:
        """Frees what the engine holds for this session. Idempotent."""
        ...


@runtime_checkable
class Generator(Protocol):
    """The engine as rollouts see it."""

    @property
    def context(self) -> int:
        """Most tokens a session can hold."""
        ...

    def open_session(self) -> Session: ...


class Turn(NamedTuple):
    """A span [start, stop) of a trajectory's tokens."""

    role: Literal["prompt", "assistant", "tool"]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished episode: exactly the ids that the engine saw and sampled, in order.

    Arrays are parallel to `tokens`; entries outside `loss_mask` are 0 (versions: -1).
    """

    task: str
    epoch: int
    sample: int
    tokens: Int32[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    full_logprobs: Float32[np.ndarray, " T"]
    versions: Int32[np.ndarray, " T"]
    turns: Sequence[Turn]
    outcome: Outcome
    reward: float | None
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds
    detail: str = ""  # why, for people
    routed_experts: Int16[np.ndarray, "T L X"] | None = field(default=None, compare=False)
    """Experts that the sampler used for each token, -1 for the last one, which was never fed to the model.
    Only from an engine that records them."""


@dataclass(frozen=True, kw_only=True)
class TrajectoryGroup:
    """The G trajectories of one prompt; position i is sample i."""

    task: str
    epoch: int
    trajectories: Sequence[Trajectory]
