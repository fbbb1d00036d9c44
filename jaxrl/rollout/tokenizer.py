"""Text to token ids and back, with a hard line between our own markup and everybody else's text."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer as Bpe

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


class Tokenizer:
    """A byte-level BPE with the chat tokens of Qwen3.5.

    `encode` is for untrusted text (issues, files, tool output): markup in it stays plain
    characters. `encode_markup` is for text of our own making, where markup becomes special ids.
    """

    def __init__(self, definition: str) -> None:
        """Reads a `tokenizer.json` text. Raises `ValueError` if a chat token is missing."""
        self._definition = definition
        self._markup = cast(Any, Bpe.from_str(definition))
        self._plain = cast(Any, Bpe.from_str(_without_added_tokens(definition)))
        missing = [each for each in SPECIALS if self._markup.token_to_id(each) is None]
        if missing:
            raise ValueError(f"expected the chat tokens {SPECIALS}, got none for {missing}: train with them")

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a `tokenizer.json` file. Raises `FileNotFoundError`, `ValueError`."""
        return cls(Path(path).read_text(encoding="utf-8"))

    @property
    def size(self) -> int:
        """Number of token ids."""
        return self._markup.get_vocab_size()

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the definition: equal digests mean equal token ids."""
        return hashlib.sha256(self._definition.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of untrusted text: never a special id, whatever the text says."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_markup(self, text: str) -> list[int]:
        """Ids of our own text: chat tokens in it become their special ids."""
        return self._markup.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out; invalid UTF-8 becomes U+FFFD."""
        return self._markup.decode(list(ids), skip_special_tokens=False)

    def special(self, token: str) -> int:
        """Id of a chat token. Raises `ValueError` for any other text."""
        if token not in SPECIALS:
            raise ValueError(f"expected a chat token of {SPECIALS}, got {token!r}")
        return self._markup.token_to_id(token)


def _without_added_tokens(definition: str) -> str:
    """Special tokens are found before BPE runs; without the list no text can spell one."""
    return json.dumps(json.loads(definition) | {"added_tokens": []})
