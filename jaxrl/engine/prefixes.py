"""Prompts that several requests share: each distinct one is prefilled once.

A prefix can be taken over where the recurrent state at its end was kept: at the end of a prompt, which
all samples of a group share, and at a multiple of the prefill chunk where prompts are seen to part, as
they do behind a common system text. Both are edges of prefill pieces whoever computes them, so taking a
prefix over changes no bit of what follows.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

_REMEMBERED_EDGES = 1 << 16


@dataclass(eq=False)
class Prefix:
    """The first `length` tokens of a prompt: kept on the device, or about to be made by `builder`."""

    digest: bytes
    length: int
    builder: Hashable | None
    row: int | None = None
    pages: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    waiting: int = 0  # requests that wait for it
    gone: bool = False  # it will not come, or was given up: look again

    @property
    def ready(self) -> bool:
        """Whether it can be taken over."""
        return self.row is not None

    @property
    def pending(self) -> bool:
        """Whether its builder is still on the way."""
        return not self.ready and not self.gone


class Prefixes:
    """Finds what a prompt shares with those before it. Holds nothing itself; see `memory`."""

    def __init__(self, chunk: int):
        self._chunk = chunk
        self._known: OrderedDict[bytes, Prefix] = OrderedDict()  # least recently used first
        self._coming: dict[bytes, Hashable] = {}  # chunk edges that a builder has yet to reach
        self._passed: OrderedDict[bytes, None] = OrderedDict()  # edges that some prompt had
        self._routes: dict[Hashable, list[tuple[int, bytes]]] = {}  # edges still ahead of each builder

    def __iter__(self) -> Iterator[Prefix]:
        """Those ready to be taken over, least recently used first."""
        return (prefix for prefix in self._known.values() if prefix.ready)

    def match(self, feed: Sequence[int]) -> Prefix | None:
        """The longest prefix of `feed` that is kept, or that some builder is on its way to."""
        for length, digest in reversed(self._edges(feed)):
            if prefix := self._known.get(digest):
                self._known.move_to_end(digest)
                return prefix
            if builder := self._coming.get(digest):
                return self._expect(digest, length, builder)
        return None

    def announce(self, builder: Hashable, feed: Sequence[int], *, start: int) -> None:
        """`builder` is going to prefill feed[start:]; it will keep its end and the place where it parts."""
        edges = [(length, digest) for length, digest in self._edges(feed) if length > start]
        if not edges:
            return
        known = [edge for edge in edges[:-1] if edge[1] in self._passed]
        for length, digest in [*known[-1:], edges[-1]]:
            if digest not in self._known:
                self._expect(digest, length, builder)
        for _, digest in edges:
            self._coming.setdefault(digest, builder)
        self._routes[builder] = edges

    def reached(self, builder: Hashable, length: int) -> Prefix | None:
        """Notes how far `builder` is; the prefix that ends here and is to be kept, if any."""
        edges, wanted = self._routes.get(builder, []), None
        while edges and edges[0][0] <= length:
            end, digest = edges.pop(0)
            self._pass(builder, digest)
            prefix = self._known.get(digest)
            if end == length and prefix and prefix.builder is builder:
                wanted = prefix
        if not edges:
            self._routes.pop(builder, None)
        return wanted

    def abandon(self, builder: Hashable) -> None:
        """`builder` goes no further: what it had not reached will not come from it."""
        for _, digest in self._routes.pop(builder, []):
            if self._coming.get(digest) is builder:
                del self._coming[digest]
            prefix = self._known.get(digest)
            if prefix and prefix.builder is builder:
                self.forget(prefix)

    def forget(self, prefix: Prefix) -> None:
        """No longer offered; whoever waits for it looks again."""
        prefix.gone = True
        if self._known.get(prefix.digest) is prefix:
            del self._known[prefix.digest]

    def clear(self) -> list[Prefix]:
        """Forgets everything, for instance when weights change; returns those that were kept."""
        kept = list(self)
        for prefix in list(self._known.values()):
            self.forget(prefix)
        self._coming.clear()
        self._passed.clear()
        self._routes.clear()
        return kept

    def _expect(self, digest: bytes, length: int, builder: Hashable) -> Prefix:
        prefix = self._known[digest] = Prefix(digest, length, builder)
        return prefix

    def _pass(self, builder: Hashable, digest: bytes) -> None:
        if self._coming.get(digest) is builder:
            del self._coming[digest]
        self._passed[digest] = None
        self._passed.move_to_end(digest)
        while len(self._passed) > _REMEMBERED_EDGES:
            self._passed.popitem(last=False)

    def _edges(self, feed: Sequence[int]) -> list[tuple[int, bytes]]:
        """(length, digest) at every multiple of the chunk and at the end; each digest covers all before."""
        edges, digest = [], b""
        for start in range(0, len(feed), self._chunk):
            piece = np.asarray(feed[start : start + self._chunk], np.int32)
            digest = hashlib.blake2b(digest + piece.tobytes(), digest_size=16).digest()
            edges.append((start + len(piece), digest))
        return edges
