"""How a project's tests behave unchanged: what passes every time, how long, and which lines run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandbox.tasks.probe.client import FileRun, Prober

_RUNS = 2  # besides the traced one


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """`stable`: node ids by test file that passed in every run; `seconds`: the slowest run by file.

    `lines`: executed lines by test file, then by source file.
    """

    stable: Mapping[str, frozenset[str]]
    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[str, frozenset[int]]]

    def covering(self, path: str, lines: tuple[int, int]) -> tuple[str, ...]:
        """Test files that execute one of the lines `lines[0]` to `lines[1]` of `path`, fastest first."""
        wanted = range(lines[0], lines[1] + 1)
        found = [test for test in self.stable if any(n in self.lines[test].get(path, ()) for n in wanted)]
        return tuple(sorted(found, key=lambda test: (self.seconds[test], test)))


async def measure(prober: Prober, tests: Sequence[str], code: Sequence[str], *, timeout: float) -> Baseline:
    """Runs every test file three times; files that do not pass whole and in time are left out."""
    traced = await prober.run(tests, {}, timeout=4 * timeout, trace=sorted(set(code)))
    usable = [path for path in tests if _usable(traced[path])]
    runs = [await prober.run(usable, {}, timeout=timeout) for _ in range(_RUNS)]
    kept = [path for path in usable if all(_usable(run[path]) for run in runs)]
    return Baseline(
        stable={
            path: frozenset.intersection(
                traced[path].ids("passed"), *(run[path].ids("passed") for run in runs)
            )
            for path in kept
        },
        seconds={path: max(run[path].seconds for run in runs) for path in kept},
        lines={path: traced[path].lines for path in kept},
    )


def _usable(run: FileRun) -> bool:
    return run.whole and bool(run.ids("passed"))
