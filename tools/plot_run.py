"""Draws runs as one SVG: training pass rate by step, and held-out pass@k with 95% intervals.

    python tools/plot_run.py runs/quickstart [runs/control ...] --output docs/quickstart.svg

Reads the feed alone. The first run is drawn solid; further runs (a control, another seed) dashed.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from jaxrl.evaluation import from_event
from jaxrl.feed.reader import read_events, read_series

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 880, 330, 46, 40, 40
PANEL = 380
COLOURS = {"T=1 top_p=1": "#1f6feb", "T=0.1 top_p=0.95": "#d1570a"}
WINDOW = 5  # steps of the running mean

Point = tuple[float, float]


def running_mean(points: Sequence[tuple[int, float | None]]) -> list[Point]:
    """Mean over the last `WINDOW` steps that have a value."""
    known = [(step, value) for step, value in points if value is not None]
    windows = [known[max(0, i - WINDOW + 1) : i + 1] for i in range(len(known))]
    return [(w[-1][0], sum(value for _, value in w) / len(w)) for w in windows]


def panel(x: float, title: str, steps: int) -> tuple[list[str], Callable[[float, float], Point]]:
    """Axes of a panel whose y runs from 0 to 1, and the map from (step, rate) to the page."""
    base = HEIGHT - BOTTOM

    def place(step: float, rate: float) -> Point:
        return x + step / max(steps, 1) * PANEL, base - rate * (base - TOP)

    parts = [f'<text x="{x}" y="{TOP - 16}" font-weight="600">{escape(title)}</text>']
    for rate in (0, 0.25, 0.5, 0.75, 1):
        y = place(0, rate)[1]
        parts.append(f'<line x1="{x}" x2="{x + PANEL}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{rate:g}</text>')
    for step in (0, steps / 2, steps):
        parts.append(
            f'<text x="{place(step, 0)[0]:.1f}" y="{base + 18}" text-anchor="middle">{step:g}</text>'
        )
    parts.append(f'<text x="{x + PANEL / 2}" y="{base + 34}" text-anchor="middle">step</text>')
    return parts, place


def line(points: Sequence[Point], colour: str, *, dashed: bool) -> str:
    """A polyline in page coordinates."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'


def training(runs: Sequence[Path], steps: int) -> Iterator[str]:
    """The left panel: share of sampled rollouts that repaired their task."""
    parts, place = panel(LEFT, f"training: pass rate of rollouts (mean of {WINDOW} steps)", steps)
    yield from parts
    for number, run in enumerate(runs):
        points = running_mean(read_series(run, "reward/pass_rate"))
        yield line([place(*point) for point in points], "#57606a", dashed=number > 0)


def held_out(runs: Sequence[Path], steps: int) -> Iterator[str]:
    """The right panel: pass@k of every evaluation, over the tasks that it had."""
    parts, place = panel(LEFT + PANEL + 60, "held-out tasks: pass@k, 95% interval", steps)
    yield from parts
    for number, run in enumerate(runs):
        made = [from_event(row) for row in read_events(run, "eval")]
        for label, colour in COLOURS.items():
            series = [(each.step, each.pass_at(each.samples)) for each in made if each.label == label]
            yield line([place(step, rate.mean) for step, rate in series], colour, dashed=number > 0)
            for step, rate in series:
                (x, low), (_, mean), (_, high) = (place(step, y) for y in (rate.low, rate.mean, rate.high))
                yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
                yield f'<circle cx="{x:.1f}" cy="{mean:.1f}" r="3.5" fill="{colour}"/>'
    for row, (label, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + 2 * PANEL - 60, HEIGHT - BOTTOM - 30 + 16 * row
        yield f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/>'
        yield f'<text x="{x + 10}" y="{y}">{label}</text>'


def draw(runs: Sequence[Path]) -> str:
    """The SVG of `runs`. Raises `ValueError` if the first one has no step yet."""
    done = [row["step"] for row in read_events(runs[0], "step")]
    if not done:
        raise ValueError(f"{runs[0]}: expected a run with at least one finished step")
    body = "\n".join([*training(runs, max(done)), *held_out(runs, max(done))])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#24292f">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        drawn = draw(arguments.runs)
    except ValueError as error:
        parser.error(str(error))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
