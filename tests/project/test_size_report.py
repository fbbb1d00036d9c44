"""The size report counts what is there and fails on what is too long."""

import importlib.util
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "size_report.py"


def load_tool():
    spec = importlib.util.spec_from_file_location("size_report", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


size_report = load_tool()


def module_with(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (lines - 1)


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_functions_are_measured_nested_and_async_ones_too():
    source = "class A:\n    async def f(self):\n        def g():\n            pass\n\n        return g\n"
    assert size_report.function_sizes(source) == [("f", 2, 5), ("g", 3, 2)]


def test_the_distribution_names_median_ninth_decile_and_maximum():
    line = size_report.distribution("functions", list(range(1, 21)))
    assert line.split() == ["functions", "20", "of", "median", "10,", "p90", "18,", "max", "20", "lines"]


def test_only_what_is_over_a_cap_is_a_complaint(tmp_path):
    write(tmp_path, "jaxrl/long_function.py", module_with(101))
    write(tmp_path, "jaxrl/at_the_cap.py", module_with(100) + "x = 1\n" * 300)
    write(tmp_path, "kernels/long_function.py", module_with(101))
    write(tmp_path, "sandbox/long_file.py", "x = 1\n" * 401)
    write(tmp_path, "jaxrl/__init__.py", "")
    files, functions = size_report.measure(tmp_path)
    assert len(files) == 4
    assert size_report.too_long(files, functions) == [
        "sandbox/long_file.py: 401 lines, expected at most 400; split it by idea",
        "jaxrl/long_function.py:1: f has 101 lines, expected at most 100; name its steps",
    ]


def test_it_runs_on_this_checkout():
    loaded = set(sys.modules)
    files, functions = size_report.measure(size_report.ROOT)
    assert not [name for name in set(sys.modules) - loaded if name.startswith("jaxrl")]  # it only reads
    assert Path("jaxrl/contracts.py") in files
    assert len(functions) > 50
