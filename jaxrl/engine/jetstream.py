"""JetStream's engine interface (google-jetstream 0.2.2) over our device programs, for its orchestrator.

    engine = JetStreamEngine(model, "tokenizer.json", SlotOptions(slots=16, context=1024))
    driver = jetstream.core.orchestrator.Driver(
        prefill_engines=[engine], generate_engines=[engine],
        prefill_params=[engine.load_params()], generate_params=[engine.load_params()],
        interleaved_mode=True,
    )

The library is archived and pulls in TensorFlow, so nothing else of ours imports this module. What it cannot
say, its users do without: requests with settings of their own, log-probabilities, sessions, weight swaps.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int
from tokenizers import Tokenizer

from jaxrl.engine.slots import DecodeState, Prefix, SlotOptions, Slots
from jaxrl.engine.step import Params
from jaxrl.mesh import make_mesh
from jaxrl.model.transformer import Transformer

try:
    from jetstream.engine import (  # pyright: ignore[reportMissingImports]
        engine_api,
        token_utils,
        tokenizer_api,
        tokenizer_pb2,
    )
except ImportError as error:
    raise ImportError(
        "jaxrl.engine.jetstream needs google-jetstream 0.2.2, the extra `jetstream`, which pulls in "
        "TensorFlow: `make jetstream` builds an environment of its own with it in .cache/jetstream"
    ) from error

# Its orchestrator deletes inserted prefixes by a name that JAX has dropped.
if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree.map  # pyright: ignore[reportAttributeAccessIssue]

PREFILL_LENGTHS = tuple(2**n for n in range(4, 16))  # the paddings that JetStream knows
NO_BOS = -1
_STOPS = ("<|im_end|>", "<|endoftext|>")
_log = logging.getLogger(__name__)


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """A `tokenizer.json` as JetStream wants it.

    Our models know no token that begins a text, and JetStream puts one before every prompt: it is given
    `NO_BOS`, which `JetStreamEngine.prefill` leaves out.
    """

    bos_id = NO_BOS
    pad_id = 0  # never read: the true length says where a prompt ends

    def __init__(self, path: str | Path):
        self._tokenizer: Any = Tokenizer.from_file(str(path))
        self._bytes = _byte_of_character()
        stops = [self._tokenizer.token_to_id(token) for token in _STOPS]
        self._stops = [stop for stop in stops if stop is not None]

    @property
    def eos_id(self) -> int:
        """Ends a turn."""
        return self._stops[0]

    @property
    def stop_tokens(self) -> set[int]:
        """End a sequence; they are not part of the text."""
        return set(self._stops)

    def encode(self, s: str, **options: Any) -> tuple[Int[Array | np.ndarray, " T"], int]:
        """Padded ids, and how many are the text's. `options` are those of `token_utils.pad_tokens`."""
        options["is_bos"] = False
        ids = self._tokenizer.encode(s, add_special_tokens=False).ids
        return token_utils.pad_tokens(np.array(ids, np.int32), self.bos_id, self.pad_id, **options)

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """Text; a lone token that is one byte of a longer character becomes `<0xE5>`, which JetStream joins.

        JetStream decodes token by token: a token of several bytes that begins or ends within a character
        comes out as U+FFFD. Who needs such text exactly asks for ids and decodes them all at once.
        """
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        if text == "\ufffd" and len(token_ids) == 1:
            byte = self._bytes.get(self._tokenizer.id_to_token(token_ids[0]))
            return text if byte is None else f"<0x{byte:02X}>"
        return text


class JetStreamEngine(engine_api.Engine):
    """One model as prefill engine, generate engine or both. Weights are passed to every call."""

    def __init__(self, model: Transformer, tokenizer: str | Path, options: SlotOptions):
        """`tokenizer` is a `tokenizer.json` file, whose stop tokens end sequences beside `options.stop_ids`.

        Raises:
            ValueError: sizes that do not fit together, or a prefill length that JetStream does not pad to.
        """
        if options.prefill_length not in PREFILL_LENGTHS:
            raise ValueError(
                f"expected prefill_length to be one of JetStream's paddings, {PREFILL_LENGTHS}; "
                f"got {options.prefill_length}"
            )
        self._path = str(tokenizer)
        stops = JetStreamTokenizer(tokenizer).stop_tokens | set(options.stop_ids)
        self._slots = Slots(model, replace(options, stop_ids=tuple(sorted(stops))))
        self._freed: set[int] = set()

    def load_params(self, params: Params | None = None) -> Params:
        """`params`, or the weights that the model came with."""
        return self._slots.params if params is None else params

    def init_decode_state(self) -> DecodeState:
        """Every slot is empty."""
        return self._slots.init_state()

    def prefill(
        self,
        *,
        params: Params,
        padded_tokens: Int[Array | np.ndarray, " T"],
        true_length: int,
        existing_prefix: Prefix | None = None,
    ) -> Prefix:
        """A prompt's cache. Of a prompt that is too long, JetStream has kept the last tokens only.

        A request that cannot be served is logged and gets a prefix behind which nothing is sampled: an
        exception here would kill the server, with all its other requests.
        """
        tokens = np.asarray(padded_tokens)[:true_length].tolist()
        tokens = tokens[1:] if tokens[:1] == [NO_BOS] else tokens
        try:
            return self._slots.prefill(params, tokens, after=existing_prefix)
        except ValueError as error:
            _log.error("request refused: %s", error)
            return self._slots.refused()

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Copies a prefix into a slot; `decode_state` is given up."""
        self._freed.discard(slot)
        return self._slots.insert(prefix, decode_state, slot=slot)

    def bulk_insert(self, prefix: Prefix, decode_state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """One prefix into many slots, as JetStream's unreleased interface has it."""
        for slot in slots:
            decode_state = self.insert(prefix, decode_state, slot)
        return decode_state

    def generate(self, params: Params, decode_state: DecodeState) -> tuple[DecodeState, Any]:
        """A token for every live slot; returns before the device is done. `decode_state` is given up."""
        freed, self._freed = self._freed, set()
        state, sampled = self._slots.generate(params, self._slots.free(decode_state, slots=sorted(freed)))
        return state, engine_api.ResultTokens(
            data=jnp.stack(sampled, axis=1).astype(jnp.int32),
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=self.samples_per_slot,
        )

    def free_resource(self, slot: int) -> None:
        """Nothing more is sampled for `slot` until the next insert, as the unreleased interface has it."""
        self._freed.add(slot)

    def get_tokenizer(self) -> Any:
        """Says where the tokenizer lies."""
        return tokenizer_pb2.TokenizerParameters(path=self._path)

    def build_tokenizer(self, metadata: Any) -> JetStreamTokenizer:
        """From what `get_tokenizer` said."""
        return JetStreamTokenizer(metadata.path)

    def get_prefix_destination_sharding(self) -> NamedSharding:
        """Prefixes are replicated."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self._slots.options.slots

    @property
    def samples_per_slot(self) -> int:
        """One."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Tokens."""
        return self._slots.options.prefill_length

    @property
    def mesh(self) -> Mesh:
        """Where the weights lie."""
        weights = jax.tree.leaves(self._slots.params)[0]
        if isinstance(weights.sharding, NamedSharding) and isinstance(weights.sharding.mesh, Mesh):
            return weights.sharding.mesh
        return make_mesh(devices=[*weights.devices()])

    @property
    def colocated_cpus(self) -> list[Any]:
        """This process's."""
        return jax.local_devices(backend="cpu")


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE spells bytes that are no printable Latin-1 characters by ones from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
