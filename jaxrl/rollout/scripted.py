"""A generator that says what is written for each task: the turn loop without a model."""

from collections.abc import Mapping, Sequence

from jaxrl.contracts import Generation, SampleKey, Sampling
from jaxrl.rollout.calls import render_call
from jaxrl.rollout.known_fix import Turn
from jaxrl.rollout.renderer import END_OF_TURN
from jaxrl.rollout.tokenizer import Tokenizer


class Scripted:
    """See `contracts.Generator`. Every token has probability 1 and weight version 0.

    Args:
      turns: the calls of each turn, by task.
      context: most tokens of a session.
    """

    def __init__(
        self, turns: Mapping[str, Sequence[Turn]], *, tokenizer: Tokenizer, context: int = 1 << 20
    ) -> None:
        """Raises `ValueError` for calls that the tokenizer cannot carry to the letter."""
        self.context = context
        self.ids = {
            task: [_ids(calls, tokenizer, where=f"{task}, turn {n}") for n, calls in enumerate(each)]
            for task, each in turns.items()
        }

    def open_session(self) -> "ScriptedSession":
        """A new conversation."""
        return ScriptedSession(self)


class ScriptedSession:
    """See `contracts.Session`. A script that has ended says nothing more, as an empty turn."""

    def __init__(self, generator: Scripted) -> None:
        self._generator, self.length = generator, 0

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        key: SampleKey,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> Generation:
        """The turn `key.turn` of the task, cut at `max_tokens` as a model's would be."""
        turns = self._generator.ids[key.task]
        said = turns[key.turn] if key.turn < len(turns) else [stop_ids[0]]
        made = said[:max_tokens]
        self.length += len(tokens) + len(made)
        certain = [0.0] * len(made)
        return Generation(
            tokens=made,
            logprobs=certain,
            full_logprobs=certain,
            versions=[0] * len(made),
            finish="stop" if made and made[-1] in stop_ids else "length",
        )

    def close(self) -> None:
        """Nothing is held."""


def _ids(calls: Turn, tokenizer: Tokenizer, *, where: str) -> list[int]:
    text = "\n".join(render_call(call.name, call.arguments) for call in calls) + END_OF_TURN
    ids = tokenizer.encode_markup(text)
    if tokenizer.decode(ids) != text:
        raise ValueError(f"{where}: expected a text that the tokenizer gives back as it was")
    return ids
