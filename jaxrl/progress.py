"""What a run shows in the terminal: a live table on a tty, plain lines elsewhere.

A display, not a record: everything durable goes to the run feed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrl.statistics import Interval

RECENT = 8
"""Steps in the live table."""
SECONDS = 5.0
"""Between two lines about one thing that takes long."""


class Seldom:
    """Passes the first text on, then at most one in five seconds."""

    def __init__(self, show: Callable[[str], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock, self._next = show, clock, 0.0

    def __call__(self, text: str) -> None:
        if self._clock() >= self._next:
            self._show(text)
            self._next = self._clock() + SECONDS


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """One finished step."""

    step: int
    pass_rate: Interval  # over the step's tasks
    mixed: int  # groups with unequal rewards
    groups: int
    loss: float
    grad_norm: float
    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds by name: generation, training, ...


class Progress:
    """Shows the run while it is entered as a context. `live` fields are free: busy slots, sandboxes, ..."""

    def __init__(
        self,
        run_name: str,
        *,
        steps: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_name, self._steps, self._clock = run_name, steps, clock
        self._console = console or Console()
        self._started = self._phase_started = clock()
        self._phase = "starting"
        self._state: dict[str, str] = {}
        self._lines: list[StepLine] = []
        self._notes: list[str] = []
        self._live: Live | None = None
        self._seldom = Seldom(self._print, clock=clock)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """What the run does from now on: `generation`, `training`, `evaluation`, ..."""
        self._phase, self._phase_started, self._state = name, self._clock(), {}
        if self._live is None and not self._lines:
            self._print(f"{name} ...")

    def live(self, **state: object) -> None:
        """State inside the phase, shown as it changes: `live(rollouts="37/128", sandboxes=12)`."""
        self._state |= {name: str(value) for name, value in state.items()}

    def busy(self, text: str) -> None:
        """What is being done where a phase takes long: in the live view, elsewhere a line now and then."""
        self.live(now=text)
        if self._live is None:
            self._seldom(text)

    def step(self, line: StepLine) -> None:
        """A step is done."""
        self._lines.append(line)
        if self._live is None:
            self._print(plain(line, steps=self._steps))

    def evaluation(self, step: int, label: str, scores: Mapping[str, Interval]) -> None:
        """Scores of held-out tasks after `step`, by name: `{"pass@1": ..., "pass@4": ...}`."""
        values = ", ".join(f"{name} {score}" for name, score in scores.items())
        self.note(f"evaluation after step {step} at {label}: {values}")

    def note(self, text: str) -> None:
        """Something worth keeping on the screen."""
        self._notes.append(text)
        if self._live is None:
            self._print(text)

    def render(self) -> RenderableType:
        """The live view as it is now."""
        parts = [self._headline(), ProgressBar(total=max(self._steps, 1), completed=self._done(), width=60)]
        if self._lines:
            parts.append(self._table())
        return Group(*parts, *map(Text, self._notes))

    def _done(self) -> int:
        return self._lines[-1].step if self._lines else 0

    def _headline(self) -> Text:
        since = self._clock() - self._phase_started
        state = "".join(f" · {name} {value}" for name, value in self._state.items())
        total = clock_text(self._clock() - self._started)
        text = f"{self._run_name} · step {self._done()}/{self._steps} · {total}{self._remaining()}"
        return Text(f"{text} · {self._phase} {since:.0f}s{state}")

    def _remaining(self) -> str:
        """Time to go at the mean pace of the recent steps."""
        recent = self._lines[-RECENT:]
        if not recent:
            return ""
        pace = sum(line.seconds for line in recent) / len(recent)
        return f", {clock_text(pace * (self._steps - self._done()))} to go"

    def _table(self) -> Table:
        names = list(dict.fromkeys(name for line in self._lines[-RECENT:] for name in line.parts))
        table = Table(box=None, pad_edge=False)
        for heading in ("step", "pass rate [95%]", "mixed", "loss", "grad norm", "seconds", *names):
            table.add_column(heading, justify="right")
        for line in self._lines[-RECENT:]:
            seconds = [f"{line.parts[name]:.1f}" if name in line.parts else "" for name in names]
            table.add_row(*cells(line), *seconds)
        return table

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def cells(line: StepLine) -> tuple[str, ...]:
    """A step's numbers as text: step, pass rate, mixed groups, loss, gradient norm, seconds."""
    mixed = f"{line.mixed}/{line.groups}"
    numbers = (f"{line.loss:+.4f}", f"{line.grad_norm:.3f}", f"{line.seconds:.1f}")
    return (str(line.step), str(line.pass_rate), mixed, *numbers)


def plain(line: StepLine, *, steps: int) -> str:
    """A step as one line of text."""
    step, rate, mixed, loss, norm, seconds = cells(line)
    parts = "".join(f", {name} {value:.1f}" for name, value in line.parts.items())
    return (
        f"step {step}/{steps}  pass rate {rate}  mixed {mixed}  loss {loss}  grad {norm}  {seconds}s{parts}"
    )


def clock_text(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
