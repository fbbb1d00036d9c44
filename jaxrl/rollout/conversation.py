"""Conversations to train on, as plain data that goes through JSON lines."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jaxrl.rollout.calls import Call, render_call

Role = Literal["system", "user", "assistant", "tool", "document"]
ACTION_WEIGHT, OTHER_WEIGHT, DOCUMENT_WEIGHT = 1.0, 0.1, 0.3


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn, or a document outside any chat.

    `weight` is the loss weight of the turn's own tokens; headers always weigh `OTHER_WEIGHT`.
    """

    role: Role
    content: str = ""
    calls: Sequence[Call] = ()
    weight: float = OTHER_WEIGHT

    @property
    def text(self) -> str:
        """Content, then the calls in the model's syntax."""
        calls = "\n".join(render_call(call.name, call.arguments) for call in self.calls)
        return "\n\n".join(part for part in (self.content, calls) if part)


Conversation = Sequence[Message]


def to_json(conversation: Conversation) -> str:
    """One line of JSON."""
    return json.dumps({"messages": [asdict(message) for message in conversation]}, ensure_ascii=False)


def from_json(line: str) -> Conversation:
    """Reads what `to_json` wrote. Raises `ValueError` for anything else."""
    try:
        return tuple(_message(each) for each in json.loads(line)["messages"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"expected a conversation written by to_json, got {line[:80]!r}: {error}") from error


def _message(fields: dict[str, Any]) -> Message:
    return Message(**{**fields, "calls": tuple(Call(**call) for call in fields["calls"])})
