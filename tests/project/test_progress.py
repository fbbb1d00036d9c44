"""The terminal view: complete on a tty, one line per fact elsewhere, never markup from data."""

import io

import pytest
from rich.console import Console

from jaxrl.progress import Progress, StepLine, clock_text
from jaxrl.statistics import Interval


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, height=40, color_system=None)


def output_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(step: int, **parts: float) -> StepLine:
    rate = Interval(0.5, 0.25, 0.75)
    return StepLine(
        step=step, pass_rate=rate, mixed=7, groups=16, loss=-0.01, grad_norm=0.5, seconds=6.0, parts=parts
    )


def rendered(progress: Progress) -> str:
    plain = console(terminal=False)
    plain.print(progress.render())
    return output_of(plain)


def test_without_a_tty_every_fact_is_a_line():
    target = console(terminal=False)
    with Progress("demo", steps=34, console=target, clock=Clock()) as progress:
        progress.phase("evaluation")
        progress.evaluation(0, "T=1", {"pass@4": Interval(0.43, 0.37, 0.49)})
        progress.live(rollouts="3/128")
        progress.step(line(1, generation=3.0, training=2.5))
        progress.note("[bold]resumed[/bold] from step 1")
    assert output_of(target).splitlines() == [
        "evaluation ...",
        "evaluation after step 0 at T=1: pass@4 0.430 [0.370, 0.490]",
        "step 1/34  pass rate 0.500 [0.250, 0.750]  mixed 7/16  loss -0.0100  grad 0.500  6.0s"
        ", generation 3.0, training 2.5",
        "[bold]resumed[/bold] from step 1",
    ]


def test_what_takes_long_is_a_line_now_and_then():
    target, clock = console(terminal=False), Clock()
    with Progress("demo", steps=34, console=target, clock=clock) as progress:
        for number in range(1, 301):  # half a minute
            progress.busy(f"task {number}")
            clock.now += 0.1
        assert "now task 300" in rendered(progress)
        progress.phase("evaluation")
        assert "task" not in rendered(progress)
    lines = output_of(target).splitlines()
    assert lines[0] == "task 1" and lines[1] in ("task 51", "task 52") and len(lines) == 7


def test_the_live_view_shows_progress_phase_state_and_pace():
    clock = Clock()
    progress = Progress("demo", steps=34, console=console(terminal=False), clock=clock)
    for step in range(1, 11):
        progress.step(line(step, generation=3.0) if step < 10 else line(step, training=2.5))
    clock.now += 65
    progress.phase("generation")
    clock.now += 3
    progress.live(rollouts="3/128", sandboxes=5)
    progress.live(rollouts="4/128")
    text = rendered(progress)
    assert "demo · step 10/34 · 1:08, 2:24 to go · generation 3s · rollouts 4/128 · sandboxes 5" in text
    rows = [row.split() for row in text.splitlines() if "[0.250," in row]
    assert [row[0] for row in rows] == [str(step) for step in range(3, 11)]
    assert (rows[0][-1], rows[-1][-1]) == ("3.0", "2.5")


def test_on_a_tty_the_view_is_live_and_the_terminal_is_left_in_order():
    target = console(terminal=True)
    with pytest.raises(RuntimeError, match="lost"), Progress("demo", steps=3, console=target) as progress:
        progress.step(line(1))
        raise RuntimeError("lost")
    assert "demo · step 1/3" in output_of(target)
    assert output_of(target).rstrip("\n").rfind("\x1b[?25h") > output_of(target).rfind("\x1b[?25l")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3661, "1:01:01")])
def test_times_read_as_a_clock(seconds, text):
    assert clock_text(seconds) == text
