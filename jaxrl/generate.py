"""Samples from a checkpoint and streams the text to the terminal; see `python -m jaxrl.generate --help`."""

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

from flax import nnx

from jaxrl.algorithm import parametrisation
from jaxrl.assembly import build_model, resource
from jaxrl.config import ConfigError, load
from jaxrl.contracts import Generation, SampleKey, Sampling
from jaxrl.engine.engine import Engine, EngineError, EngineOptions
from jaxrl.engine.text import TextStream
from jaxrl.model.hub import HubError, load_hub
from jaxrl.model.transformer import Transformer
from jaxrl.rl.checkpoint import CheckpointStore
from jaxrl.rollout.tokenizer import Tokenizer

COMMAND = "python -m jaxrl.generate"
STOPS = ("<|im_end|>", "<|endoftext|>")
MOST_TOGETHER = 32

DESCRIPTION = """\
CHECKPOINT is a folder in hub layout (config.json, model.safetensors) or a run of jaxrl.train,
whose newest checkpoint is taken. The text goes to stdout as it is sampled, figures to stderr."""


class GenerateError(Exception):
    """Wrong arguments; the message is for the person who gave them."""


def main(argv: Sequence[str]) -> None:
    """Entry point of `python -m jaxrl.generate`."""
    args = parser().parse_args(argv)
    try:
        asyncio.run(run(args))
    except (GenerateError, ConfigError, EngineError) as error:
        sys.exit(f"{COMMAND}: {error}")
    except BrokenPipeError:  # whoever read the text has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)  # as shells report it


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog=COMMAND, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("checkpoint", metavar="CHECKPOINT", type=Path, help="folder of a model or of a run")
    add("prompt", metavar="PROMPT", help="text to go on from; - reads stdin, less one final newline")
    add("--chat", action="store_true", help="the prompt is a user's message; default: raw text with markup")
    add("-n", type=count, default=1, metavar="N", help="samples (1)")
    add("--max-tokens", type=count, default=256, metavar="N", help="most new tokens (256)")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (1)")
    add("--top-p", type=float, default=1.0, metavar="P", help="smallest set with this probability (1: off)")
    add("--top-k", type=int, default=0, metavar="K", help="most likely tokens kept (0: off)")
    add("--min-p", type=float, default=0.0, metavar="P", help="least part of the best's probability (0: off)")
    add("--seed", type=int, default=0, metavar="N", help="the same seed gives the same samples (0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--context", type=count, default=4096, metavar="N", help="most tokens with the prompt (4096)")
    add(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json; default: the checkpoint's or the run's",
    )
    return made


async def run(args: argparse.Namespace) -> None:
    """Loads, samples, prints. Raises `GenerateError`, `ConfigError`."""
    tokenizer = load_tokenizer(find_tokenizer(args.checkpoint, args.tokenizer))
    prompt = prompt_ids(tokenizer, read_prompt(args.prompt), chat=args.chat)
    if len(prompt) >= args.context:
        raise GenerateError(
            f"prompt of {len(prompt)} tokens: expected fewer than the context of {args.context}; "
            "raise --context or shorten it"
        )
    sampling = checked_sampling(args)
    if "" in args.stop:
        raise GenerateError("--stop '': expected a text that is not empty")
    model = load_model(args.checkpoint)
    if tokenizer.size > model.spec.vocab_size:
        raise GenerateError(
            f"tokenizer of {tokenizer.size} ids: expected at most the model's {model.spec.vocab_size}; "
            "give the model's own with --tokenizer"
        )
    options = EngineOptions(
        slots=min(args.n, MOST_TOGETHER),
        context=min(args.context, len(prompt) + args.max_tokens),
        prefill_rows=1,
        parked=1,
    )
    async with Engine(model, options, text_of=tokenizer.decode) as engine:
        samples = Samples(engine, tokenizer, prompt, sampling, args)
        ends = Counter(await samples.run())
    reasons = ", ".join(end if args.n == 1 else f"{end} ({count})" for end, count in sorted(ends.items()))
    note(f"prompt {len(prompt)} tokens; {samples.figures()}; ended by {reasons}")


class Samples:
    """All samples of one prompt at once, shown one behind the other, each as it comes."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampling: Sampling,
        args: argparse.Namespace,
    ) -> None:
        self._engine, self._tokenizer, self._prompt, self._args = engine, tokenizer, prompt, args
        self._stop_ids = [tokenizer.special(stop) for stop in STOPS]
        self._settings = {
            "sampling": sampling,
            "max_tokens": args.max_tokens,
            "stop_ids": self._stop_ids,
            "stop_strings": args.stop,
        }
        self._queues: list[asyncio.Queue[str | None]] = [asyncio.Queue() for _ in range(args.n)]
        self._started = time.perf_counter()
        self._first: tuple[float, int] | None = None  # seconds until tokens came, and how many came

    async def run(self) -> list[str]:
        """How each sample ended."""
        tasks = [asyncio.create_task(self._sample(number)) for number in range(len(self._queues))]
        try:
            await show(self._queues)
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def figures(self) -> str:
        """Speed, for people. The first tokens wait for the compiler, the others do not."""
        seconds, count = time.perf_counter() - self._started, self._engine.stats.sampled_tokens
        wait, early = self._first or (seconds, count)
        rate = f", then {(count - early) / (seconds - wait):.1f} tokens/s" if count > early else ""
        return f"{count} tokens sampled, the first after {wait:.1f} s with compiling{rate}"

    async def _sample(self, number: int) -> str:
        text, queue, finish = TextStream(self._tokenizer.decode, self._args.stop), self._queues[number], ""
        try:
            async with aclosing(self._parts(number)) as parts:
                async for part in parts:
                    for token in part.tokens:
                        if token not in self._stop_ids:
                            queue.put_nowait(text.push(token))
                    finish = part.finish or finish
            queue.put_nowait(text.flush())
        finally:
            queue.put_nowait(None)
        return finish

    async def _parts(self, number: int) -> AsyncGenerator[Generation, None]:
        session, key = self._engine.open_session(), SampleKey(self._args.seed, "generate", 0, number, 0)
        try:
            async for part in session.stream(self._prompt, key=key, **self._settings):
                self._first = self._first or (
                    time.perf_counter() - self._started,
                    self._engine.stats.sampled_tokens,
                )
                yield part
        finally:
            session.close()


async def show(queues: Sequence["asyncio.Queue[str | None]"]) -> None:
    """Prints each queue up to its None, with a headline where there are several."""
    for number, queue in enumerate(queues, start=1):
        if len(queues) > 1:
            print(f"[{number}/{len(queues)}]", flush=True)
        while (text := await queue.get()) is not None:
            print(text, end="", flush=True)
        print(flush=True)


def note(text: str) -> None:
    """To stderr, which is not part of the text."""
    print(text, file=sys.stderr, flush=True)


def read_prompt(given: str) -> str:
    """The prompt, from stdin for `-`. Raises `GenerateError` if it is empty."""
    text = sys.stdin.read().removesuffix("\n") if given == "-" else given
    if not text:
        raise GenerateError("empty prompt: expected at least one character")
    return text


def prompt_ids(tokenizer: Tokenizer, text: str, *, chat: bool) -> list[int]:
    """Raw text with its markup, or a user's message in which markup is plain characters."""
    if not chat:
        return tokenizer.encode_markup(text)
    before, after = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode_markup(before) + tokenizer.encode(text) + tokenizer.encode_markup(after)


def checked_sampling(args: argparse.Namespace) -> Sampling:
    """Raises `GenerateError` for a setting out of its range."""
    rules = {
        "temperature": (args.temperature >= 0, "0 or more"),
        "top_p": (0 < args.top_p <= 1, "above 0, at most 1"),
        "top_k": (args.top_k >= 0, "0 or more"),
        "min_p": (0 <= args.min_p < 1, "0 or more, below 1"),
    }
    for name, (holds, wanted) in rules.items():
        if not holds:
            raise GenerateError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected {wanted}")
    return Sampling(**{name: getattr(args, name) for name in rules})


def find_tokenizer(checkpoint: Path, given: Path | None) -> Path:
    """The tokenizer of a checkpoint: in its folder or the one above, or what a run's settings name.

    Raises `GenerateError` if there is none, or no checkpoint.
    """
    if not checkpoint.is_dir():
        raise GenerateError(f"{checkpoint}: expected the folder of a model or of a run, found none")
    folders = (checkpoint, checkpoint.resolve().parent)
    tried = [given] if given else [folder / "tokenizer.json" for folder in folders]
    for folder in folders:
        if not given and (folder / "config.yaml").is_file():
            tried.append(resource(load(folder / "config.yaml").model.tokenizer))
    found = next((path for path in tried if path.is_file()), None)
    if found is None:
        raise GenerateError(
            f"no tokenizer: expected one of {', '.join(map(str, tried))}; give its file with --tokenizer"
        )
    return found


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises `GenerateError` for a file that is none of ours."""
    try:
        return Tokenizer.load(path)
    except Exception as error:
        raise GenerateError(f"{path}: expected a byte-level tokenizer of Qwen3.5's kind: {error}") from error


def load_model(checkpoint: Path) -> Transformer:
    """The model of a hub folder, or a run's newest checkpoint. Raises `GenerateError`, `ConfigError`."""
    try:
        if (checkpoint / "config.yaml").is_file() and not (checkpoint / "config.json").is_file():
            return _of_run(checkpoint)
        return load_hub(checkpoint)
    except FileNotFoundError as error:
        raise GenerateError(
            f"{checkpoint}: expected config.json and model.safetensors, or a run's config.yaml: {error}"
        ) from error
    except (HubError, ValueError, KeyError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise GenerateError(f"{checkpoint}: {error}") from error


def _of_run(run: Path) -> Transformer:
    store = CheckpointStore(run / "checkpoints", report=lambda _, facts: note(f"skipped: {facts['reason']}"))
    if not store.paths() and (run / "model").is_dir():  # supervised training writes no other
        return load_hub(run / "model")
    config = load(run / "config.yaml")
    model = build_model(config)
    parameters = parametrisation(config, model.spec)
    graph, state = nnx.split(model)
    params, fixed = parameters.split(state)
    restored = store.latest({"params": params, "rest": parameters.saved(fixed)})
    if restored is None:
        raise GenerateError(f"{run}: expected a checkpoint, but the run has not written one yet")
    note(f"{run}: step {restored.step}")
    fixed = parameters.restored(restored.state["rest"], fixed)
    return nnx.merge(graph, parameters.merge(restored.state["params"], fixed))


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


if __name__ == "__main__":
    main(sys.argv[1:])
