"""Which rows share the next device job: pure decisions, no device and no I/O."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.engine.cache import Sizes
from jaxrl.engine.session import MOST_STOP_IDS, TurnInFlight
from jaxrl.engine.step import SlotState, idle_state

_MOST_SKIPS = 8


class Batcher:
    """Cuts prompts into pieces and decides between prefill and decode.

    Pieces end at multiples of the largest bucket, counted from position 0, and their bucket follows
    from their length: a request meets the same programs alone as in a crowd.
    """

    def __init__(self, rows: int, buckets: Sequence[int]):
        if not buckets or list(buckets) != sorted(set(buckets)):
            raise ValueError(f"prefill buckets must be ascending and distinct, got {tuple(buckets)}")
        self.rows, self.buckets = rows, tuple(buckets)

    def next_prefill(self, turns: Sequence[TurnInFlight]) -> tuple[list[TurnInFlight], int, list[int]] | None:
        """The next prefill as (turns, bucket, piece sizes); None when decoding comes first.

        Decoding goes on while few prompts wait for many decoding slots, since a prefill costs the
        same for one row as for `rows`; a prompt is passed over at most a few times.
        """
        waiting = [turn for turn in turns if not turn.prefilled and turn.leader is None]
        decoding = sum(turn.prefilled for turn in turns)
        if not waiting:
            return None
        patient = all(turn.skipped < _MOST_SKIPS for turn in waiting)
        if decoding and patient and len(waiting) < min(self.rows, decoding):
            for turn in waiting:
                turn.skipped += 1
            return None
        return self._fullest(waiting)

    def _fullest(self, waiting: Sequence[TurnInFlight]) -> tuple[list[TurnInFlight], int, list[int]]:
        by_bucket: dict[int, list[TurnInFlight]] = defaultdict(list)
        for turn in waiting:
            by_bucket[self._bucket(self._size(turn))].append(turn)
        bucket = max(by_bucket, key=lambda b: (len(by_bucket[b]), b))
        chosen = by_bucket[bucket][: self.rows]
        for turn in chosen:
            turn.skipped = 0
        return chosen, bucket, [self._size(turn) for turn in chosen]

    def _size(self, turn: TurnInFlight) -> int:
        chunk = self.buckets[-1]
        return min(len(turn.pending), chunk - turn.start % chunk)

    def _bucket(self, size: int) -> int:
        return next(bucket for bucket in self.buckets if bucket >= size)

    @staticmethod
    def slot_state(turns: Mapping[int, TurnInFlight], sizes: Sizes) -> SlotState:
        """Host arrays that `Steps.generate` needs for the turns now decoding."""
        state = idle_state(sizes, stop_ids=MOST_STOP_IDS)
        state.pages_BX[:] = np.arange(state.pages_BX.size).reshape(state.pages_BX.shape)
        for slot, turn in turns.items():
            _write_slot(state, slot, turn)
        return state


def _write_slot(state: SlotState, slot: int, turn: TurnInFlight) -> None:
    state.lengths_B[slot] = turn.length
    state.last_B[slot] = turn.tokens[-1] if turn.tokens else turn.last
    state.remaining_B[slot] = turn.budget - len(turn.tokens)
    state.stop_BI[slot, : len(turn.stop_ids)] = turn.stop_ids
    settings, wanted = state.sampling, turn.sampling
    settings.temperature_B[slot] = wanted.temperature
    settings.top_p_B[slot] = wanted.top_p
    settings.top_k_B[slot] = wanted.top_k
    settings.min_p_B[slot] = wanted.min_p
    settings.key_B2[slot] = turn.words
