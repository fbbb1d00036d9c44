"""A small project for the grading tests: its bug, its hidden suite, and an image that has pytest."""

import asyncio
import atexit
import compileall
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from sandbox.base import Diff, Image, SandboxProvider
from sandbox.grading.suite import SuiteGrader
from sandbox.grading.verdict import Verdict
from sandbox.namespace import NamespaceProvider
from sandbox.tasks.schema import SuiteTests, TaskSpec

PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")

BROKEN = '''"""Sums of a shop."""


def total(prices):
    return sum(prices[1:])


def cheapest(prices):
    if not prices:
        raise ValueError("no prices")
    return min(prices)
'''
FIXED = BROKEN.replace("prices[1:]", "prices")
FILES = {
    "shop/__init__.py": "",
    "shop/sums.py": BROKEN,
    "shop/labels.py": "import json\nfrom pathlib import Path\n\n"
    "def label(code):\n    names = json.loads((Path(__file__).parent / 'names.json').read_text())\n"
    "    return names[code]\n",
    "shop/names.json": '{"a": "apple"}',
    "tests/test_sums.py": "def test_visible():\n    assert True\n",
    "pyproject.toml": "[tool.pytest.ini_options]\nxfail_strict = true\n",
    "README.md": "A shop.\n",
}
SUITE = b'''"""Hidden tests."""

import unittest

import pytest

from shop.labels import label
from shop.sums import cheapest, total


@pytest.fixture
def prices():
    return [3, 4]


def test_total(prices):
    assert total(prices) == 7


@pytest.mark.parametrize("count", [1, 2, 3])
def test_equal_prices(count):
    result = total([5] * count)
    assert result == 5 * count


class Refusals(unittest.TestCase):
    def test_total_of_one(self):
        self.assertEqual(total([2]), 2)

    def test_no_prices(self):
        with self.assertRaises(ValueError):
            cheapest([])


def test_cheapest():
    assert cheapest([2, 1]) == 1


def test_label():
    assert label("a") in ("apple", "APPLE")
'''
PATH = "tests/test_sums.py"
FAILING = tuple(
    f"{PATH}::{name}"
    for name in (
        "test_total",
        *(f"test_equal_prices[{n}]" for n in (1, 2, 3)),
        "Refusals::test_total_of_one",
    )
)
PASSING = tuple(f"{PATH}::{name}" for name in ("Refusals::test_no_prices", "test_cheapest", "test_label"))


def build_layer(folder: Path) -> None:
    """Copies the running interpreter's pytest into `folder`, which sandboxes may read."""
    folder.chmod(0o755)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).parent
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    packages = Path(pytest.__file__).parents[1]
    # A module that pytest brings beside its package, and what tells versions.
    shutil.copy(packages / "py.py", folder)
    for name in ("pytest", "pluggy"):
        (records,) = packages.glob(f"{name}-*.dist-info")
        shutil.copytree(records, folder / records.name)
    compileall.compile_dir(folder, quiet=1)


class Bench:
    """A grader with an image that has pytest, driven from synchronous tests."""

    def __init__(self, runner: asyncio.Runner, provider: SandboxProvider, image: Image) -> None:
        self.runner, self.provider, self.image = runner, provider, image
        self.grader = SuiteGrader(provider)

    def fresh(self) -> "Bench":
        """The same without what was graded before."""
        return Bench(self.runner, self.provider, self.image)

    def task(self, files: Mapping[str, str] = FILES, *, seconds: float = 60.0) -> TaskSpec:
        return shop_task(self.image, files, seconds=seconds)

    def grade(
        self, changes: Mapping[str, str | bytes | None], hidden: SuiteTests, task: TaskSpec | None = None
    ) -> Verdict:
        """Verdict on the patch that `changes` (path → content, None: deleted) is."""
        diff = Diff(
            files={path: data.encode() if isinstance(data, str) else data for path, data in changes.items()}
        )
        return self.runner.run(self.grader.grade(task or self.task(), hidden, diff))


@cache
def layer() -> Path:
    """One layer for all tests of this process, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="grading-layer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build_layer(folder)
    return folder


@contextmanager
def bench() -> Iterator[Bench]:
    """A bench whose sandboxes and loop end with the block."""
    image = Image(layers={"/opt/env": layer()}, environment={"PYTHONPATH": "/opt/env"})
    with asyncio.Runner() as runner:
        made = Bench(runner, NamespaceProvider(), image)
        try:
            yield made
        finally:
            runner.run(made.grader.close())
            runner.run(made.provider.close())


def shop_task(image: Image, files: Mapping[str, str] = FILES, *, seconds: float = 60.0) -> TaskSpec:
    """The shop with its bug."""
    return TaskSpec(instance_id="shop", problem_statement="", files=files, image=image, tests_timeout=seconds)


def shop_suite() -> SuiteTests:
    """The hidden suite of the shop."""
    return SuiteTests(
        instance_id="shop",
        files={PATH: SUITE},
        fail_to_pass=FAILING,
        pass_to_pass=PASSING,
        reference={"shop/sums.py": FIXED.encode()},
    )
