"""Streamed text: what was shown is never taken back; all of it is the whole text, cut at a stop string."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.engine.text import TextStream
from jaxrl.rollout.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).parents[2] / "configs" / "quickstart" / "tokenizer.json")


def pieces(ids: list[int], stops: list[str]) -> list[str]:
    stream = TextStream(TOKENIZER.decode, stops)
    return [*(stream.push(token) for token in ids), stream.flush()]


@given(st.lists(st.integers(0, TOKENIZER.size - 1), max_size=40))
def test_any_ids_give_their_text(ids):
    assert "".join(pieces(ids, [])) == TOKENIZER.decode(ids)


@given(st.text(max_size=20))
def test_characters_are_shown_whole_and_at_once(text):
    ids, shown = TOKENIZER.encode(text), ""
    stream = TextStream(TOKENIZER.decode)
    for n, token in enumerate(ids, start=1):
        shown += stream.push(token)
        assert text.startswith(shown)
        assert shown == TOKENIZER.decode(ids[:n]).rstrip("\ufffd") or "\ufffd" in text
    assert shown + stream.flush() == text


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_stop_string_and_what_follows_is_never_shown(text, stops):
    made = pieces([token for letter in text for token in TOKENIZER.encode(letter)], stops)
    first = next((n for n in range(len(text) + 1) for stop in stops if text[:n].endswith(stop)), None)
    if first is None:
        assert "".join(made) == text
    else:
        ends = [len(stop) for stop in stops if text[:first].endswith(stop)]
        assert "".join(made) == text[: first - max(ends)]


def test_what_may_become_a_stop_string_waits():
    assert pieces(TOKENIZER.encode("a") + TOKENIZER.encode("b") + TOKENIZER.encode("c"), ["bd"]) == [
        "a",
        "",
        "bc",
        "",
    ]


@pytest.mark.parametrize("ending", ["", "b"])
def test_a_stop_string_that_does_not_come_is_text(ending):
    assert "".join(pieces(TOKENIZER.encode("aab" + ending), ["abbb"])) == "aab" + ending
