"""The chat format, token-exact: a context only grows, and sampled ids are never re-encoded."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from jaxtyping import Float32, Int32

from jaxrl.rollout.calls import Parsed, parse_calls
from jaxrl.rollout.conversation import OTHER_WEIGHT, Conversation, Message
from jaxrl.rollout.harness import Harness
from jaxrl.rollout.tokenizer import Tokenizer
from sandbox.tasks.schema import TaskSpec

END_OF_TURN, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
_NEXT = f"{END_OF_TURN}\n"


class Renderer:
    """Ids of what the policy reads, and the meaning of what it wrote, for one harness."""

    def __init__(self, tokenizer: Tokenizer, harness: Harness) -> None:
        self.tokenizer = tokenizer
        self.harness = harness
        self._end_of_turn = tokenizer.special(END_OF_TURN)
        self.stop_ids: Sequence[int] = (self._end_of_turn, tokenizer.special(END_OF_TEXT))
        self._header = tokenizer.encode_markup(f"<|im_start|>assistant\n{harness.assistant_prefix}")
        self._next = tokenizer.encode_markup(_NEXT)

    def initial(self, task: TaskSpec) -> list[int]:
        """The prompt's ids, ending with the assistant header."""
        preface = self.harness.preface(task)
        spoken = preface or self.harness.tool_block
        system = [Message(role="system", content=preface)] if spoken else []
        return self._open([*system, Message(role="user", content=self.harness.ask(task))])

    def observation(self, texts: Sequence[str], *, closed: bool) -> list[int]:
        """Ids after an assistant turn: the results of its calls, and the next assistant header.

        Unless the turn is `closed` (its last id ends the turn), the missing id comes first; it was
        not sampled, so it must stay outside the loss.
        """
        return self._closing(closed) + self._open([Message(role="tool", content=text) for text in texts])

    def reply(self, text: str, *, closed: bool) -> list[int]:
        """Ids after an assistant turn without a call that the user answers; `closed` as above."""
        return self._closing(closed) + self._open([Message(role="user", content=text)])

    def closed(self, ids: Sequence[int]) -> bool:
        """Whether sampled ids end their turn themselves."""
        return bool(ids) and ids[-1] == self._end_of_turn

    def parse(self, ids: Sequence[int]) -> Parsed:
        """What a sampled turn says. Never raises."""
        kept = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return parse_calls(self.tokenizer.decode(kept))

    def render_training(
        self, conversation: Conversation
    ) -> tuple[Int32[np.ndarray, " T"], Float32[np.ndarray, " T"]]:
        """Ids of a whole conversation, equal to what an episode with those turns would hold.

        Returns (ids int32, loss weight of each id as a target float32).
        """
        pieces = [*self._pieces(conversation)]
        weights = [np.full(len(ids), weight, np.float32) for ids, weight in pieces]
        return np.array([each for ids, _ in pieces for each in ids], np.int32), np.concatenate(weights)

    def _closing(self, closed: bool) -> list[int]:
        return self._next[1:] if closed else self._next

    def _open(self, messages: Conversation) -> list[int]:
        return [each for ids, _ in self._pieces(messages) for each in ids] + self._next + self._header

    def _pieces(self, messages: Conversation) -> Iterator[tuple[list[int], float]]:
        """(ids, weight) spans; the last turn's closing newline is left out, as in an episode."""
        turns = [[*group] for _, group in groupby(enumerate(messages), key=_turn_key)]
        for position, turn in enumerate(turns):
            first = turn[0][1]
            if first.role == "document":
                yield self.tokenizer.encode(first.content) + [self.stop_ids[1]], first.weight
                continue
            if position:
                yield self._separator(turns[position - 1][0][1]), OTHER_WEIGHT
            yield from self._turn([message for _, message in turn])

    def _separator(self, previous: Message) -> list[int]:
        """What stands between turns: an assistant turn brought its own end."""
        return self._next[1:] if previous.role == "assistant" else self._next

    def _turn(self, messages: Sequence[Message]) -> Iterator[tuple[list[int], float]]:
        markup = self.tokenizer.encode_markup
        first = messages[0]
        if first.role == "assistant":
            yield self._header, OTHER_WEIGHT
            yield markup(first.text) + [self._end_of_turn], first.weight
        elif first.role == "tool":
            yield markup("<|im_start|>user\n"), OTHER_WEIGHT
            for position, message in enumerate(messages):
                yield self._result(message.content, first=not position), message.weight
        else:
            yield markup(f"<|im_start|>{first.role}\n{self._tools(first)}"), OTHER_WEIGHT
            yield self.tokenizer.encode(first.content), first.weight

    def _tools(self, message: Message) -> str:
        """The harness's tools, which stand before the system's own text."""
        block = self.harness.tool_block if message.role == "system" else ""
        return f"{block}\n\n" if block and message.content else block

    def _result(self, text: str, *, first: bool) -> list[int]:
        markup = self.tokenizer.encode_markup
        start = markup("<tool_response>\n" if first else "\n<tool_response>\n")
        return start + self.tokenizer.encode(text.strip("\n")) + markup("\n</tool_response>")


def _turn_key(item: tuple[int, Message]) -> tuple[str, int]:
    """Consecutive tool results share one user turn; everything else stands alone."""
    position, message = item
    return ("tool", -1) if message.role == "tool" else (message.role, position)
