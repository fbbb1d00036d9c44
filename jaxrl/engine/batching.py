"""Which requests share the next device job: pure decisions, no device and no I/O."""

from collections import defaultdict
from collections.abc import Sequence

from jaxrl.engine.cache import Sizes
from jaxrl.engine.request import Request
from jaxrl.engine.step import SlotState, idle_state

_MOST_PREFILLS = 4  # in a row, while others could decode


class Batcher:
    """Cuts prompts into pieces and decides between prefill and decode.

    Pieces end at multiples of the largest bucket, counted from position 0, and their bucket follows
    from their length: a request meets the same programs alone as in a crowd.
    """

    def __init__(self, rows: int, buckets: Sequence[int]):
        self.rows, self.buckets = rows, tuple(buckets)
        self._in_a_row = 0

    def next_prefill(self, requests: Sequence[Request]) -> tuple[list[Request], int] | None:
        """The requests that share the next prefill, and its bucket; None when it is decoding's turn.

        A decode step costs the same however many slots take part, so prompts go first; but a long one
        must not hold up everybody: after a few prefills in a row that were not full, decoding has a turn.
        """
        waiting = [request for request in requests if not request.context.ready]
        decoding = len(requests) - len(waiting)
        full = len(waiting) >= min(self.rows, decoding)
        if not waiting or (decoding and not full and self._in_a_row >= _MOST_PREFILLS):
            self._in_a_row = 0
            return None
        self._in_a_row += bool(decoding)
        return self._fullest(waiting)

    def size(self, request: Request) -> int:
        """Tokens of the request's next piece."""
        context, chunk = request.context, self.buckets[-1]
        return min(context.missing, chunk - context.cached % chunk)

    def _fullest(self, waiting: Sequence[Request]) -> tuple[list[Request], int]:
        by_bucket: dict[int, list[Request]] = defaultdict(list)
        for request in waiting:
            by_bucket[self._bucket(self.size(request))].append(request)
        bucket = max(by_bucket, key=lambda b: (len(by_bucket[b]), b))
        return by_bucket[bucket][: self.rows], bucket

    def _bucket(self, size: int) -> int:
        return next(bucket for bucket in self.buckets if bucket >= size)


def slot_state(requests: Sequence[Request], sizes: Sizes) -> SlotState:
    """Host arrays that `Steps.generate` needs when `requests` decode."""
    state = idle_state(sizes)
    for request in requests:
        _write_slot(state, request)
    return state


def _write_slot(state: SlotState, request: Request) -> None:
    context, slot = request.context, request.context.slot
    assert slot is not None
    state.lengths_B[slot] = context.cached
    state.last_B[slot] = context.tokens[-1]
    # A recurrent state can't be rolled back: where text decides the end, each token is looked at alone.
    state.remaining_B[slot] = 1 if request.stop_strings else request.remaining
    state.stop_BI[slot, : len(request.stop_ids)] = request.stop_ids
    state.pages_BX[slot, : len(context.pages)] = context.pages
    settings, wanted = state.sampling, request.sampling
    settings.temperature_B[slot] = wanted.temperature
    settings.top_p_B[slot] = wanted.top_p
    settings.top_k_B[slot] = wanted.top_k
    settings.min_p_B[slot] = wanted.min_p
    settings.key_B2[slot] = request.words
