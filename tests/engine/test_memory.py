"""Whatever is asked of the memory, in any order: every place has exactly the holders that say so."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxrl.engine.cache import Sizes
from jaxrl.engine.context import Context, Place
from jaxrl.engine.memory import Memory
from jaxrl.engine.ops import CopyPages, Fill, Offload, Park, Restore, Unpark
from jaxrl.engine.prefixes import Prefixes

SIZES = Sizes(slots=3, context=64, page_size=8, pages=12, parked=2)
PICK = st.integers(0, 100)


class FakeDevice:
    """Places that remember which tokens they hold, so that a misplaced move is seen."""

    def __init__(self):
        self.slots, self.rows, self.pages = {}, {}, {}

    def run(self, ops) -> None:
        for op in ops:
            match op:
                case CopyPages(source, target):
                    self.pages[target] = list(self.pages[source])
                case Park(source, target):
                    self.rows[target] = self.slots[source]
                case Unpark(source, target):
                    self.slots[target] = self.rows[source]
                case Offload(stored, pages, slot, row):
                    state = self.slots[slot] if row is None else self.rows[row]
                    stored.copy = (state, [list(self.pages[page]) for page in pages])  # pyright: ignore
                case Restore(stored, pages, slot):
                    state, kept = stored.copy  # pyright: ignore
                    self.slots[slot] = state
                    self.pages |= dict(zip(pages, map(list, kept), strict=True))
                case Fill(slots, rows, pages):
                    for held, places in ((self.slots, slots), (self.rows, rows), (self.pages, pages)):
                        for place in places:
                            held[place] = ["poison"] * SIZES.page_size if held is self.pages else "poison"


class MemoryMachine(RuleBasedStateMachine):
    """Contexts grow, rest, share and leave; each must always find its own tokens again."""

    def __init__(self):
        super().__init__()
        self.prefixes = Prefixes(8)
        self.memory = Memory(SIZES, self.prefixes, page_bytes=10, row_bytes=7, host_bytes=150, poison=True)
        self.device = FakeDevice()
        self.contexts: list[Context] = []
        self.held: set[Context] = set()  # as a running request holds its context: not to be driven out
        self.next_token = 0

    def write(self, context: Context, count: int) -> None:
        """What a program does: adds tokens to pages and state."""
        size = SIZES.page_size
        for position in range(context.cached, context.cached + count):
            page = self.device.pages.setdefault(context.pages[position // size], [None] * size)
            page[position % size] = context.tokens[position]
        context.cached += count
        self.device.slots[context.slot] = tuple(context.tokens[: context.cached])

    def check(self, context: Context) -> None:
        size, cached = SIZES.page_size, context.cached
        if context.place is Place.NOWHERE or not cached:
            return
        if context.place is Place.HOST:
            assert context.stored is not None
            state, pages = context.stored.copy  # pyright: ignore
        else:
            row = context.row is not None
            state = self.device.rows[context.row] if row else self.device.slots[context.slot]
            pages = [self.device.pages[page] for page in context.pages]
        assert state == tuple(context.tokens[:cached])
        assert [page[i] for page in pages for i in range(size)][:cached] == context.tokens[:cached]

    @rule()
    def open(self):
        if len(self.contexts) < 8:
            self.contexts.append(Context())

    @rule(pick=PICK, count=st.integers(1, 20))
    def extend(self, pick, count):
        if not self.contexts:
            return
        context = self.contexts[pick % len(self.contexts)]
        count = min(count, SIZES.context - context.cached)
        if context in self.held or not self.memory.make_live(context):
            return
        if not self.memory.make_writable(context, context.cached + count):
            return self.memory.rest(context)
        self.run_ops()
        del context.tokens[context.cached :]
        for _ in range(count):
            self.next_token += 1
            context.tokens.append(self.next_token)
        self.write(context, count)
        self.memory.rest(context)

    @rule(pick=PICK)
    def hold(self, pick):
        if self.contexts and len(self.held) < 2:
            context = self.contexts[pick % len(self.contexts)]
            if context not in self.held and self.memory.make_live(context):
                self.held.add(context)

    @rule()
    def let_go(self):
        if self.held:
            self.memory.rest(self.held.pop())

    @rule(pick=PICK)
    def suspend(self, pick):
        if self.held:
            self.memory.suspend(self.held.pop())

    @rule(pick=PICK)
    def fork(self, pick):
        if self.contexts and len(self.contexts) < 8:
            context = self.contexts[pick % len(self.contexts)]
            twin = Context(tokens=list(context.tokens))
            self.memory.fork(context, twin)
            self.contexts.append(twin)

    @rule(pick=PICK)
    def close(self, pick):
        if self.contexts:
            context = self.contexts.pop(pick % len(self.contexts))
            self.held.discard(context)
            self.memory.release(context)

    @rule(pick=PICK)
    def keep_and_adopt(self, pick):
        if not self.contexts:
            return
        context = self.contexts[pick % len(self.contexts)]
        if context.place is not Place.LIVE or not context.cached or context in self.held:
            return
        self.run_ops()
        self.memory.make_live(context)
        feed = context.tokens[: context.cached]
        self.prefixes.announce(context, feed, start=0)
        prefix = self.prefixes.reached(context, context.cached)
        if prefix is not None:
            self.memory.keep(prefix, context)
        self.memory.rest(context)
        found = self.prefixes.match(feed)
        self.prefixes.abandon(context)
        if found is not None and found.ready and found.length == len(feed) and len(self.contexts) < 8:
            twin = Context(tokens=list(context.tokens))
            self.memory.adopt(found, twin, version=0)
            self.memory.rest(twin)
            self.contexts.append(twin)

    @rule()
    def lose_device(self):
        if not self.held:
            self.memory.lose_device()
            self.device = FakeDevice()

    def run_ops(self) -> None:
        self.device.run(self.memory.take_ops())

    @invariant()
    def every_context_finds_its_tokens(self):
        self.run_ops()
        for context in self.contexts:
            self.check(context)

    @invariant()
    def places_have_the_holders_that_say_so(self):
        memory, kept = self.memory, list(self.prefixes)
        rows = Counter([c.row for c in self.contexts if c.row is not None] + [p.row for p in kept])
        pages = Counter(page for holder in [*self.contexts, *kept] for page in holder.pages)
        slots = Counter(c.slot for c in self.contexts if c.slot is not None)
        for pool, holders in ((memory.rows, rows), (memory.pages, pages), (memory.slots, slots)):
            assert pool._holders == [holders[place] for place in range(pool.count)]
            assert sorted(pool._free) == [place for place in range(pool.count) if not holders[place]]
        stored = {id(c.stored): c.stored.nbytes for c in self.contexts if c.stored is not None}
        assert memory.host_used == sum(stored.values()) <= memory.host_bytes
        assert set(memory.away) == {c for c in self.contexts if c.place is Place.HOST}
        resting = {c for c in self.contexts if c.place in (Place.LIVE, Place.PARKED)} - self.held
        assert set(memory.idle) == resting

    def teardown(self):
        for context in self.contexts:
            self.memory.release(context)
        for prefix in self.prefixes.clear():
            self.memory.discard(prefix)
        memory = self.memory
        assert all(pool.free == pool.count for pool in (memory.slots, memory.rows, memory.pages))
        assert memory.host_used == 0 and not memory.idle and not memory.away


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
