"""The growing record of one episode: ids as the engine saw them, and which of them it sampled."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from jaxrl.contracts import Generation, Outcome, Trajectory, Turn


class Transcript:
    """Append-only: given ids (outside the loss) and sampled ids (inside it), turn by turn."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._full_logprobs: list[float] = []
        self._versions: list[int] = []
        self._turns: list[Turn] = []
        self._routes: list[np.ndarray] = []  # of all tokens but the last

    def give(self, ids: Sequence[int], role: Literal["prompt", "tool"]) -> None:
        """Appends ids that were not sampled."""
        zeros = [0.0] * len(ids)
        self._append(role, ids, zeros, zeros, [-1] * len(ids), sampled=False)

    def sample(self, generation: Generation) -> None:
        """Appends a sampled turn. Raises `ValueError` if its lists differ in length."""
        columns = (generation.tokens, generation.logprobs, generation.full_logprobs, generation.versions)
        if len({len(column) for column in columns}) != 1:
            lengths = [len(column) for column in columns]
            raise ValueError(
                f"expected one log-prob and version per token, got lengths {lengths}: fix the engine"
            )
        self._append("assistant", *columns, sampled=True)
        if generation.routed_experts is not None:
            self._routes.append(generation.routed_experts)

    def _append(
        self,
        role: Literal["prompt", "assistant", "tool"],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        full_logprobs: Sequence[float],
        versions: Sequence[int],
        *,
        sampled: bool,
    ) -> None:
        start = len(self._tokens)
        self._tokens += tokens
        self._logprobs += logprobs
        self._full_logprobs += full_logprobs
        self._versions += versions
        self._mask += [sampled] * len(tokens)
        self._turns.append(Turn(role, start, len(self._tokens)))

    def trajectory(
        self,
        task: str,
        *,
        epoch: int,
        sample: int,
        outcome: Outcome,
        reward: float | None,
        timings: Mapping[str, float],
        detail: str,
    ) -> Trajectory:
        """The finished episode; tokens and versions int32, log-probs float32, mask bool, all `T`."""
        return Trajectory(
            task=task,
            epoch=epoch,
            sample=sample,
            tokens=np.array(self._tokens, np.int32),
            loss_mask=np.array(self._mask, np.bool_),
            logprobs=np.array(self._logprobs, np.float32),
            full_logprobs=np.array(self._full_logprobs, np.float32),
            versions=np.array(self._versions, np.int32),
            turns=tuple(self._turns),
            outcome=outcome,
            reward=reward,
            timings=timings,
            detail=detail,
            routed_experts=self._routed_experts(),
        )

    def _routed_experts(self) -> np.ndarray | None:
        """None also where a cancelled turn left tokens without a record; such an episode is not trained."""
        if not self._routes or sum(map(len, self._routes)) != len(self._tokens) - 1:
            return None
        return np.concatenate([*self._routes, np.full_like(self._routes[0][:1], -1)])
