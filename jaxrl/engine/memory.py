"""Who holds which slot, spare row, page and host byte.

Decisions only: work for the device is appended to `ops`, in the order in which it has to be done before
the next program runs. A place given back is free at once, since whatever takes it does so later in that
order.
"""

from collections import OrderedDict
from collections.abc import Callable

from jaxrl.engine.cache import Sizes
from jaxrl.engine.context import Context, Place, Stored
from jaxrl.engine.ops import CopyPages, Fill, Offload, Op, Park, Restore, Unpark
from jaxrl.engine.pool import CountedPool
from jaxrl.engine.prefixes import Prefix, Prefixes


class Memory:
    """Slots, rows, pages and host bytes, and who has to leave when they run out.

    Those that leave first: kept prefixes nobody waits for, idle sessions (least recently used first),
    then prefixes that are waited for.
    """

    def __init__(
        self,
        sizes: Sizes,
        prefixes: Prefixes,
        *,
        page_bytes: int,
        row_bytes: int,
        host_bytes: int,
        poison: bool = False,
        worth_storing: Callable[[int, int], bool] = lambda nbytes, tokens: True,
    ):
        """`worth_storing(nbytes, tokens)` says if copying that much beats prefilling so many tokens."""
        self.sizes, self.prefixes = sizes, prefixes
        self.page_bytes, self.row_bytes, self.host_bytes = page_bytes, row_bytes, host_bytes
        self.host_used = 0
        self.offloads = self.restores = self.drops = self.dropped_tokens = 0
        self._poison, self._worth_storing = poison, worth_storing
        self.slots = CountedPool(sizes.slots)
        self.rows = CountedPool(sizes.parked)
        self.pages = CountedPool(sizes.pages)
        self.idle: OrderedDict[Context, None] = OrderedDict()  # on the device; least recently used first
        self.away: dict[Context, None] = {}  # in host memory
        self.ops: list[Op] = []

    def take_ops(self) -> list[Op]:
        """The work decided on since the last call."""
        ops, self.ops = self.ops, []
        return ops

    # --- what a turn needs -------------------------------------------------------------------------

    def make_live(self, context: Context) -> bool:
        """Brings `context` into a slot with all that is cached of it; False if there is no room now."""
        self.idle.pop(context, None)
        if context.slot is not None:
            return True
        needed = self._page_count(context.cached) if context.place is Place.HOST else 0
        if not (self._free_slot() and self._free_pages(needed)):
            self.rest(context)
            return False
        context.slot, context.cleared = self.slots.take(), False
        if context.row is not None:
            self.ops.append(Unpark(context.row, context.slot))
            self._give_row(context)
        elif context.stored is not None:
            context.pages = [self.pages.take() for _ in range(needed)]
            self.ops.append(Restore(context.stored, tuple(context.pages), context.slot))
            self.restores += 1
            self._give_stored(context)
        return True

    def make_writable(self, context: Context, stop: int) -> bool:
        """Gives `context` pages of its own for the positions from `cached` to `stop`; False without room."""
        size, held = self.sizes.page_size, len(context.pages)
        new = max(self._page_count(stop) - held, 0)
        while True:
            shared = [i for i in range(context.cached // size, held) if self.pages.shared(context.pages[i])]
            if self.pages.free >= new + len(shared):
                break
            if not self._evict():
                return False
        for i in shared:
            page = self.pages.take()
            if i * size < context.cached:
                self.ops.append(CopyPages(context.pages[i], page))
            self._give_page(context.pages[i])
            context.pages[i] = page
        context.pages += [self.pages.take() for _ in range(new)]
        return True

    def slot_to_have(self) -> bool:
        """Whether a slot is free or held by an idle session."""
        return bool(self.slots.free) or any(context.slot is not None for context in self.idle)

    def touch(self, context: Context) -> None:
        """`context` is about to be needed: others leave first."""
        if context in self.idle:
            self.idle.move_to_end(context)

    def rest(self, context: Context) -> None:
        """`context` waits for its next turn; what it holds stays until somebody needs the room."""
        if not context.cached:
            self.release(context)
        elif context.place is not Place.HOST:
            self.idle[context] = None
            self.idle.move_to_end(context)

    def release(self, context: Context) -> None:
        """Gives back everything; the cached prefix is gone."""
        self.idle.pop(context, None)
        if context.slot is not None:
            self._give_slot(context)
        if context.row is not None:
            self._give_row(context)
        if context.stored is not None:
            self._give_stored(context)
        for page in context.pages:
            self._give_page(page)
        context.pages, context.cached, context.oldest_version = [], 0, None
        context.routes = []

    def suspend(self, context: Context) -> None:
        """Takes `context` off the device: to the host, or else its tokens are to be prefilled again."""
        if not context.cached:
            return self.release(context)
        nbytes = self.row_bytes + self.page_bytes * self._page_count(context.cached)
        fits = self.host_used + nbytes <= self.host_bytes
        if fits and self._worth_storing(nbytes, context.cached):
            self._offload(context, nbytes)
        else:
            self.drops += 1
            self.dropped_tokens += context.cached
            self.release(context)

    def lose_device(self) -> None:
        """Whatever lay on the device is gone, or on its way to the host; requests have ended before."""
        on_their_way = [context for context in self.away if context.stored and context.stored.copy is None]
        for context in on_their_way:
            self.release(context)
        for context in list(self.idle):
            self.release(context)
        for prefix in self.prefixes.clear():
            self.discard(prefix)
        self.ops.clear()

    def forget_all(self) -> None:
        """Gives back everything, as when the engine stops: sessions begin anew from their tokens."""
        for context in list(self.away):
            self.release(context)
        self.lose_device()

    # --- sharing -----------------------------------------------------------------------------------

    def keep(self, prefix: Prefix, context: Context) -> None:
        """Keeps the state and pages of `context`, which has reached the end of `prefix`."""
        assert context.slot is not None
        if not self._free_row():
            return self.prefixes.forget(prefix)
        prefix.row, prefix.builder = self.rows.take(), None
        self.ops.append(Park(context.slot, prefix.row))
        prefix.pages = [self.pages.share(page) for page in context.pages[: self._page_count(prefix.length)]]
        prefix.routes = list(context.routes)

    def adopt(self, prefix: Prefix, context: Context, *, version: int) -> None:
        """`context`, which holds nothing, goes on from `prefix`."""
        assert prefix.row is not None and context.place is Place.NOWHERE
        context.row = self.rows.share(prefix.row)
        context.pages = [self.pages.share(page) for page in prefix.pages]
        context.cached, context.oldest_version = prefix.length, version
        context.routes = list(prefix.routes)

    def discard(self, prefix: Prefix) -> None:
        """Gives back what a kept prefix holds."""
        self.prefixes.forget(prefix)
        if prefix.row is not None:
            row, prefix.row = prefix.row, None
            if self.rows.release(row):
                self._fill(rows=(row,))
        for page in prefix.pages:
            self._give_page(page)
        prefix.pages = []

    def fork(self, context: Context, twin: Context) -> None:
        """`twin`, which holds nothing, gets all that is cached of `context`; both may go on.

        Without a spare row for the state it gets nothing, and its tokens are to be prefilled.
        """
        if not context.cached:
            return
        match context.place:
            case Place.LIVE:
                if not self._spare_row():
                    return
                assert context.slot is not None
                twin.row = self.rows.take()
                self.ops.append(Park(context.slot, twin.row))
            case Place.PARKED:
                assert context.row is not None
                twin.row = self.rows.share(context.row)
            case Place.HOST:
                assert context.stored is not None
                twin.stored, context.stored.holders = context.stored, context.stored.holders + 1
                self.away[twin] = None
            case Place.NOWHERE:
                return
        twin.pages = [self.pages.share(page) for page in context.pages]
        twin.cached, twin.oldest_version = context.cached, context.oldest_version
        twin.routes, twin.furthest = list(context.routes), context.furthest
        self.rest(twin)

    # --- making room -------------------------------------------------------------------------------

    def _free_slot(self) -> bool:
        while not self.slots.free:
            live = next((c for c in self.idle if c.slot is not None), None)
            if live is None:
                return False
            if not self._park(live):
                self.suspend(live)
        return True

    def _free_row(self) -> bool:
        """A spare row, if need be one of a kept prefix that nobody waits for or of an idle session."""
        while not self._spare_row():
            parked = next((c for c in self.idle if c.row is not None), None)
            if parked is None:
                return False
            self.suspend(parked)
        return True

    def _free_pages(self, count: int) -> bool:
        while self.pages.free < count:
            if not self._evict():
                return False
        return True

    def _evict(self) -> bool:
        """Makes the next in line give back its pages; False when nobody is left who could."""
        if self._discard_first(lambda prefix: not prefix.waiting):
            return True
        if self.idle:
            self.suspend(next(iter(self.idle)))
            return True
        return self._discard_first(lambda prefix: True)

    def _discard_first(self, which: Callable[[Prefix], bool]) -> bool:
        prefix = next(filter(which, self.prefixes), None)
        if prefix:
            self.discard(prefix)
        return prefix is not None

    def _spare_row(self) -> bool:
        """Whether a spare row is free, or can be had from a kept prefix that nobody waits for."""
        while not self.rows.free and self._discard_first(lambda prefix: not prefix.waiting):
            pass
        return bool(self.rows.free)

    def _park(self, context: Context) -> bool:
        """Moves the state of a live context to a spare row, if one can be had without driving others out."""
        if not self._spare_row():
            return False
        assert context.slot is not None
        context.row = self.rows.take()
        self.ops.append(Park(context.slot, context.row))
        self._give_slot(context)
        return True

    def _offload(self, context: Context, nbytes: int) -> None:
        stored = Stored(nbytes)
        pages = tuple(context.pages[: self._page_count(context.cached)])
        self.ops.append(Offload(stored, pages, slot=context.slot, row=context.row))
        cached, version, routes = context.cached, context.oldest_version, context.routes
        self.release(context)
        self.away[context] = None
        context.stored, context.cached, context.oldest_version, context.routes = (
            stored,
            cached,
            version,
            routes,
        )
        self.host_used += nbytes
        self.offloads += 1

    # --- giving back -------------------------------------------------------------------------------

    def _give_slot(self, context: Context) -> None:
        assert context.slot is not None
        self.slots.release(context.slot)
        self._fill(slots=(context.slot,))
        context.slot = None

    def _give_row(self, context: Context) -> None:
        assert context.row is not None
        if self.rows.release(context.row):
            self._fill(rows=(context.row,))
        context.row = None

    def _give_page(self, page: int) -> None:
        if self.pages.release(page):
            self._fill(pages=(page,))

    def _give_stored(self, context: Context) -> None:
        assert context.stored is not None
        context.stored.holders -= 1
        if not context.stored.holders:
            self.host_used -= context.stored.nbytes
        context.stored = None
        del self.away[context]

    def _fill(self, *, slots=(), rows=(), pages=()) -> None:
        if self._poison:
            self.ops.append(Fill(slots=slots, rows=rows, pages=pages))

    def _page_count(self, tokens: int) -> int:
        return -(-tokens // self.sizes.page_size)
