"""Which requests share the next device job: pure decisions, no device and no I/O."""

from collections import defaultdict
from collections.abc import Sequence

from jaxrl.engine.cache import Sizes
from jaxrl.engine.request import Request
from jaxrl.engine.step import SlotState, idle_state

_MOST_SKIPS = 8


class Batcher:
    """Cuts prompts into pieces and decides between prefill and decode.

    Pieces end at multiples of the largest bucket, counted from position 0, and their bucket follows
    from their length: a request meets the same programs alone as in a crowd.
    """

    def __init__(self, rows: int, buckets: Sequence[int]):
        self.rows, self.buckets = rows, tuple(buckets)

    def next_prefill(self, requests: Sequence[Request]) -> tuple[list[Request], int] | None:
        """The requests that share the next prefill, and its bucket; None when decoding comes first.

        Decoding goes on while few prompts wait for many decoding slots, since a prefill costs the
        same for one row as for `rows`; a prompt is passed over at most a few times.
        """
        waiting = [request for request in requests if not request.context.ready]
        decoding = len(requests) - len(waiting)
        if not waiting:
            return None
        patient = all(request.skipped < _MOST_SKIPS for request in waiting)
        if decoding and patient and len(waiting) < min(self.rows, decoding):
            for request in waiting:
                request.skipped += 1
            return None
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
        chosen = by_bucket[bucket][: self.rows]
        for request in chosen:
            request.skipped = 0
        return chosen, bucket

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
