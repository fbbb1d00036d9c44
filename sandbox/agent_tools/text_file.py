"""A file as text that can be edited and written back without losing what was not edited."""

from dataclasses import dataclass

MAX_SIZE = 10 << 20  # bytes
_MOST_BROKEN = 0.1  # share of bytes that are not UTF-8 in what is still called a text


class NotTextError(Exception):
    """The file is binary or too large; the text says which, for the model."""


@dataclass(frozen=True)
class TextFile:
    """`text` has "\\n" for line ends; bytes that are no UTF-8 are surrogates in it."""

    text: str
    crlf: bool = False  # every line end of the file is "\\r\\n"

    @classmethod
    def parse(cls, content: bytes) -> "TextFile":
        """Reads a file's content. Raises `NotTextError`."""
        if len(content) > MAX_SIZE:
            raise NotTextError(f"the file has {len(content)} bytes; at most {MAX_SIZE} can be handled")
        text = content.decode(errors="surrogateescape")
        broken = sum("\udc80" <= character <= "\udcff" for character in text) if not text.isascii() else 0
        if "\0" in text or broken > _MOST_BROKEN * len(content):
            raise NotTextError("the file is binary")
        ends = text.count("\n")
        crlf = ends > 0 and text.count("\r\n") == ends == text.count("\r")
        return cls(text.replace("\r\n", "\n") if crlf else text, crlf)

    def content(self, text: str) -> bytes:
        """The bytes of `text` in this file's form. Raises `UnicodeEncodeError`."""
        return (text.replace("\n", "\r\n") if self.crlf else text).encode(errors="surrogateescape")
