"""The tokenizer: lossless, deterministic, and deaf to markup in untrusted text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.rollout.tokenizer import SPECIALS, Tokenizer
from tools.train_tokenizer import episodes, train

PATH = Path(__file__).parents[2] / "configs/quickstart/tokenizer.json"
tokenizer = Tokenizer.load(PATH)
special_ids = {tokenizer.special(each) for each in SPECIALS}
texts = st.lists(st.sampled_from(SPECIALS) | st.text(max_size=8), max_size=8).map("".join)


def test_committed_file_is_what_training_makes():
    assert train(episodes()) == PATH.read_text(encoding="utf-8")


def test_size_and_whole_chat_tokens():
    assert tokenizer.size == 768 and special_ids == set(range(len(SPECIALS)))
    for each in SPECIALS:
        assert tokenizer.encode_markup(each) == [tokenizer.special(each)]


@given(texts)
def test_untrusted_text_never_becomes_special_and_is_lossless(text):
    ids = tokenizer.encode(text)
    assert special_ids.isdisjoint(ids) and tokenizer.decode(ids) == text


@given(texts)
def test_markup_is_lossless_too(text):
    assert tokenizer.decode(tokenizer.encode_markup(text)) == text


@given(st.lists(st.integers(0, 767), max_size=40))
def test_any_ids_decode(ids):
    assert isinstance(tokenizer.decode(ids), str)


def test_a_line_is_the_same_ids_in_a_file_and_alone():
    """Copying a line out of a file must be copying ids."""
    for line in ("return a - b", "t += i", "for i in range(1, n + 1):", "a[0]", "x.lower()"):
        file, alone = tokenizer.encode(f"def f(a):\n    {line}\n"), tokenizer.encode(line)
        assert any(file[start : start + len(alone)] == alone for start in range(len(file)))


def test_errors():
    with pytest.raises(ValueError, match="chat token"):
        tokenizer.special("return")
    with pytest.raises(ValueError, match="chat tokens"):
        Tokenizer(PATH.read_text(encoding="utf-8").replace("<think>", "<thunk>"))
    with pytest.raises(FileNotFoundError):
        Tokenizer.load("missing.json")


def test_digest_names_the_definition():
    text = PATH.read_text(encoding="utf-8")
    assert tokenizer.digest == Tokenizer(text).digest != Tokenizer(text + " ").digest
