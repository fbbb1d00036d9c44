"""What a run gained, from its evaluations: pass rates at start and end, and the paired difference."""

from collections.abc import Sequence

from jaxrl.evaluation import Evaluation
from jaxrl.statistics import paired_gain


def gains(evaluations: Sequence[Evaluation]) -> list[str]:
    """A line per sampling and k: first and last evaluation over the same tasks, and the gain by task.

    Evaluations of other task sets than the first one's are left out.
    """
    lines = []
    for label in dict.fromkeys(each.label for each in evaluations):
        same = [each for each in evaluations if each.label == label]
        same = [each for each in same if each.resolved.keys() == same[0].resolved.keys()]
        if len(same) > 1:
            lines += [_gain(same[0], same[-1], k) for k in sorted({1, same[0].samples})]
    return lines


def _gain(first: Evaluation, last: Evaluation, k: int) -> str:
    gain = paired_gain(first.per_task(k), last.per_task(k))
    return (
        f"{last.label}  pass@{k}  {first.pass_at(k).mean:.3f} -> {last.pass_at(k)}  "
        f"gain {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]  "
        f"({len(last.resolved)} tasks x {last.samples}, step {first.step} -> {last.step})"
    )
