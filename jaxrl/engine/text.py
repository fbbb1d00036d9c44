"""Text that is streamed: characters that span tokens, and strings at which it ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_CUT = "\ufffd"  # what an incomplete character decodes to


@dataclass
class TextStream:
    """Turns sampled ids into text that may be shown, piece by piece: no half character, no stop string.

    Pieces and `flush` together are the text of all ids, cut before the first stop string.
    """

    decode: Callable[[Sequence[int]], str]
    stops: Sequence[str] = ()
    stopped: bool = False
    _ids: list[int] = field(default_factory=list)  # since the last whole character
    _shown: int = 0  # characters of their text
    _held: str = ""  # may begin a stop string

    def push(self, token: int) -> str:
        """Text that is certain now."""
        self._ids.append(token)
        text = self.decode(self._ids)
        whole = text.removesuffix(_CUT)
        new, self._shown = whole[self._shown :], len(whole)
        if whole == text:
            self._ids, self._shown = [], 0
        return self._release(new)

    def flush(self) -> str:
        """What was held back, at the end of the ids."""
        rest = self._release(self.decode(self._ids)[self._shown :])
        held, self._held, self._ids, self._shown = self._held, "", [], 0
        return rest + held

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
