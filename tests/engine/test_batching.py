"""Which prefill comes next, and when decoding has its turn: the batcher alone, without a device."""

from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from jaxrl.engine.batching import Batcher
from jaxrl.engine.context import Context

ROWS, BUCKETS = 3, (4, 8)


def request(missing: int, cached: int = 0):
    context = Context(tokens=[7] * (cached + missing + 1), cached=cached, slot=0, cleared=True)
    return SimpleNamespace(context=context)


def play(batcher: Batcher, requests) -> str:
    """Plays prefills and decodes until every prompt is in: P, or D, a letter each."""
    done = ""
    while any(not each.context.ready for each in requests):
        batch = batcher.next_prefill(requests)
        done += "P" if batch else "D"
        chosen, bucket = batch or ([], 0)
        assert len(chosen) <= ROWS
        for each in chosen:
            size = batcher.size(each)
            assert size == each.context.missing or (each.context.cached + size) % BUCKETS[-1] == 0
            assert size <= bucket and (bucket == BUCKETS[0] or size > BUCKETS[0])
            each.context.cached += size
    return done


def test_prompts_that_arrive_together_all_decode_from_the_first_step_on():
    assert "D" not in play(Batcher(ROWS, BUCKETS), [request(n) for n in (3, 4, 8, 8, 8, 2, 7)])


def test_a_long_prompt_does_not_hold_up_the_others():
    done = play(Batcher(ROWS, BUCKETS), [request(200), *(request(0, cached=5) for _ in range(6))])
    assert max(map(len, done.split("D"))) == 4
    assert Counter(done)["P"] == 200 // BUCKETS[-1]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20))
def test_every_prompt_gets_in(lengths):
    done = play(Batcher(ROWS, BUCKETS), [request(n) for n in lengths])
    pieces = sum(-(-n // BUCKETS[-1]) for n in lengths)
    assert -(-pieces // ROWS) <= Counter(done)["P"] <= pieces
