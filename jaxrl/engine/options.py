"""Sizes and policies of the engine, and how a memory budget becomes a number of pages."""

from dataclasses import dataclass
from typing import Literal

from jaxrl.engine.cache import Sizes, page_bytes, row_bytes
from jaxrl.engine.checks import check_count
from jaxrl.engine.errors import EngineError
from jaxrl.model.spec import ModelSpec

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine may use, and what its compiled programs are made for."""

    slots: int = 128  # sequences decoded together
    context: int = 192  # most tokens of a sequence
    page_size: int = 32  # tokens whose keys and values lie together
    cache_bytes: int | None = None  # device memory for keys, values and states; None: room for every slot
    parked: int = 16  # spare state rows: prompts shared by a group, sessions whose tool runs
    host_bytes: int = 4 * GIB  # host memory for idle sessions that had to leave the device
    eviction: Literal["offload", "recompute", "measured"] = "offload"
    """What becomes of an idle session that has to leave the device: copied to the host while `host_bytes`
    last (exact to the last bit); forgotten and prefilled again; or what measured speeds say is cheaper."""
    prefill_rows: int = 16  # sequences prefilled together
    prefill_buckets: tuple[int, ...] = (16, 64)  # tokens of a piece, ascending; the last one is the chunk
    decode_steps: int = 4  # tokens per dispatch
    top_logprobs: int = 0  # most-likely tokens that a request may ask for
    routed_experts: bool = False  # record which experts every token went to
    poison_freed: bool = False  # tests: freed pages and rows are filled with NaN

    def sizes(self, spec: ModelSpec) -> Sizes:
        """The sizes of the device programs; as many pages as `cache_bytes` allow.

        Raises:
            EngineError: an option out of its range, or a budget that holds no sequence of full length.
        """
        self._check()
        if self.top_logprobs > spec.vocab_size:
            raise EngineError(
                f"top_logprobs = {self.top_logprobs}: expected at most the vocabulary's {spec.vocab_size}"
            )
        pages_each = -(-self.context // self.page_size)
        return Sizes(
            slots=self.slots,
            context=pages_each * self.page_size,
            page_size=self.page_size,
            pages=self._pages(spec, pages_each),
            parked=self.parked,
            prefill_rows=self.prefill_rows,
            prefill_buckets=self.prefill_buckets,
            decode_steps=self.decode_steps,
            top_logprobs=self.top_logprobs,
            routed_experts=self.routed_experts,
        )

    def _pages(self, spec: ModelSpec, pages_each: int) -> int:
        if self.cache_bytes is None:
            return (self.slots + self.parked) * pages_each
        page, row = page_bytes(spec, self.page_size), row_bytes(spec)
        rows = (self.slots + self.parked) * row
        pages = (self.cache_bytes - rows) // page if page else pages_each
        if pages < pages_each:
            raise EngineError(
                f"cache_bytes = {self.cache_bytes}: expected at least {rows + pages_each * page}, which is "
                f"{self.slots} slots and {self.parked} parked rows of {row} bytes and one sequence of "
                f"{pages_each} pages of {page} bytes; allow more, or ask for fewer slots or a shorter context"
            )
        return min(pages, (self.slots + self.parked) * pages_each)

    def _check(self) -> None:
        for name in ("slots", "context", "page_size", "parked", "prefill_rows", "decode_steps"):
            check_count(name, getattr(self, name), 1)
        for name in ("host_bytes", "top_logprobs"):
            check_count(name, getattr(self, name), 0, 2**62)
        if self.cache_bytes is not None:
            check_count("cache_bytes", self.cache_bytes, 1, 2**62)
        buckets = self.prefill_buckets
        for bucket in buckets:
            check_count("prefill_buckets", bucket, 1)
        if not buckets or list(buckets) != sorted(set(buckets)):
            raise EngineError(f"prefill_buckets = {buckets}: expected ascending, distinct numbers from 1")
        if self.eviction not in ("offload", "recompute", "measured"):
            raise EngineError(f"eviction = {self.eviction!r}: expected offload, recompute or measured")
