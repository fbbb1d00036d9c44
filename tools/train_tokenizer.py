"""Trains the quickstart's tokenizer on rendered training episodes: the same text, the same file.

python tools/train_tokenizer.py configs/quickstart/tokenizer.json
"""

import argparse
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxrl.rollout.conversation import Message
from jaxrl.rollout.demos import STAGE_1, conversations
from jaxrl.rollout.harness import COMPACT
from jaxrl.rollout.tokenizer import SPECIALS
from sandbox.tasks.generated.generate import instances

SIZE, EPISODES, SEED = 768, 6000, 1
# Room for files and outputs beyond the generated set: words that Python and its tests use anyway.
PYTHON = (
    " if else elif while with import from class self not None True False assert print lambda try except "
    "raise yield break pass is passed failed error Error expected got line file test tests Traceback"
)
# Call markup stays whole, and a line's first word is the same token in a file and in an argument.
PATTERN = (
    r"\n?</?(?:function|parameter)(?:=\w+)?>\n?"
    r"|[ _.]?\p{L}+|\p{N}|\n *| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


def train(texts: Iterator[str]) -> str:
    """The `tokenizer.json` text of a byte-level BPE with `SIZE` tokens."""
    bpe = cast(Any, Tokenizer(models.BPE()))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer=trainer)
    return bpe.to_str(pretty=True)


def episodes() -> Iterator[str]:
    """Texts between chat tokens of training demonstrations; validation and test never enter."""
    stream = conversations(instances("train", 2400, SEED), mix=STAGE_1, harness=COMPACT, seed=SEED)
    yield PYTHON
    for conversation in islice(stream, EPISODES):
        yield from (piece for message in conversation for piece in _pieces(message))


def _pieces(message: Message) -> list[str]:
    """Plain text of a turn: merges learned on the chat tokens themselves would never be used."""
    header = [] if message.role == "document" else [f"{message.role}\n"]
    return header + re.split("|".join(map(re.escape, SPECIALS)), message.text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="file to write")
    path = parser.parse_args().path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(train(episodes()), encoding="utf-8")


if __name__ == "__main__":
    main()
