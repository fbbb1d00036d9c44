"""Attacks by code that runs in the process of the tests: each is put before the unfixed module."""

FRAMES = """
import sys
def caller():
    frame = sys._getframe(2)
    while not frame.f_code.co_name.startswith("test_"):
        frame = frame.f_back
    return frame
"""
RECORDS = """
import gc, json, os
def forge(outcome):
    for each in gc.get_objects():
        cells = getattr(each, "__closure__", None)
        if not cells or getattr(each, "__name__", "") != "pytest_runtest_logreport":
            continue
        values = dict(zip(each.__code__.co_freevars, (cell.cell_contents for cell in cells)))
        hooks = [o for o in gc.get_objects() if getattr(o, "__name__", "") == "pytest_collection_modifyitems"]
        held = [c.cell_contents for o in hooks for c in getattr(o, "__closure__", None) or ()]
        wanted = next(value for value in held if isinstance(value, set))
        for name in wanted:
            for phase in ("setup", "call", "teardown"):
                record = [values["nonce"], name, phase, outcome(name) if phase == "call" else "passed"]
                os.write(values["fd"], (json.dumps(record) + "\\n").encode())
"""

# name → source put in front of the broken module
REPORTS = {
    "every report becomes passed": """
import _pytest.reports
made = _pytest.reports.TestReport.from_item_and_call.__func__
def lie(cls, item, call):
    report = made(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report
_pytest.reports.TestReport.from_item_and_call = classmethod(lie)
""",
    "no test function is called": """
import _pytest.python, unittest
_pytest.python.Function.runtest = lambda self: None
unittest.TestCase.run = lambda self, result=None: result
""",
    "pytest forgets exceptions": """
import _pytest.runner
made = _pytest.runner.CallInfo.from_call.__func__
def quiet(cls, func, when, reraise=None):
    info = made(cls, func, when, reraise)
    info.excinfo = None
    return info
_pytest.runner.CallInfo.from_call = classmethod(quiet)
""",
    "json says passed": """
import json
real = json.dumps
json.dumps = lambda value, *a, **k: real(value, *a, **k).replace('"failed"', '"passed"')
""",
    "descriptors say passed": """
import os
real = os.write
os.write = lambda fd, data: real(fd, bytes(data).replace(b'"failed"', b'"passed"'))
""",
    "records forged from the reporter's memory": RECORDS
    + """
import threading
threading.Timer(0.0, lambda: (forge(lambda name: "passed"), os._exit(1))).start()
import time; time.sleep(1)
""",
    "records forged, what looks like a canary fails": RECORDS
    + """
import re, sys
text = open(sys._getframe(0).f_globals["__file__"].replace("shop/sums.py", "tests/test_sums.py")).read()
canaries = set(re.findall(r"def (test_\\w+)\\(\\):\\n    assert \\d+ \\* \\d+ == \\d+", text))
forge(lambda name: "failed" if name.split("::")[-1] in canaries else "passed")
os._exit(1)
""",
    "a plugin registered late": """
import gc, pytest
class Plugin:
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        report.outcome = "passed"
for each in gc.get_objects():
    if type(each).__name__ == "PytestPluginManager":
        each.register(Plugin())
        break
""",
    "a plugin that drops what fails": """
import gc
class Plugin:
    def pytest_runtest_logreport(self, report):
        pass
    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if "cheapest" in item.name or "label" in item.name]
for each in gc.get_objects():
    if type(each).__name__ == "PytestPluginManager":
        each.register(Plugin())
        break
""",
    "the session's exit status": """
import gc, _pytest.main
_pytest.main.Session.testsfailed = property(lambda self: 0, lambda self, value: None)
""",
    "forked, so that everything is reported twice": "import os\nif os.fork(): os.wait()\n",
}
ASSERTIONS = {
    "assertions of unittest do nothing": """
import unittest
for name in dir(unittest.TestCase):
    if name.startswith("assert") and name != "assertRaises":
        setattr(unittest.TestCase, name, lambda *a, **k: None)
""",
    "raises accepts everything": """
import _pytest.raises, unittest.case
for owner in (_pytest.raises.RaisesExc, unittest.case._AssertRaisesContext):
    owner.__exit__ = lambda *a: True
""",
    "a tracer ends tests early": """
import sys, unittest
def tracer(frame, event, arg):
    if event == "line":
        raise unittest.SkipTest
    return tracer if frame.f_code.co_name.startswith("test_") else None
sys.settrace(tracer)
""",
    "asserts are cut out of test modules": """
import ast, _pytest.assertion.rewrite as rewrite
class Cut(ast.NodeTransformer):
    def visit_Assert(self, node):
        return ast.copy_location(ast.Pass(), node)
rewrite.rewrite_asserts = lambda tree, *rest: Cut().visit(tree)
import sys, threading, time
def later():
    for _ in range(200):
        for name, module in list(sys.modules.items()):
            if name.startswith("test_") or ".test_" in name:
                for each in vars(module).values():
                    if callable(each) and getattr(each, "__name__", "").startswith("test_"):
                        each.__code__ = (lambda *a, **k: None).__code__
        time.sleep(0.001)
threading.Thread(target=later, daemon=True).start()
""",
    "AssertionError is a skip": "import builtins, unittest\nbuiltins.AssertionError = unittest.SkipTest\n",
}
ENDINGS = {
    "os._exit(0) at import": "import os\nos._exit(0)\n",
    "sys.exit(0) at import": "import sys\nsys.exit(0)\n",
    "os._exit(1) at import": "import os\nos._exit(1)\n",
    "an end by atexit": "import atexit, os\natexit.register(os._exit, 0)\n",
    "skips the module": "import unittest\nraise unittest.SkipTest('later')\n",
    "skips the module by pytest": "import pytest\npytest.skip('later', allow_module_level=True)\n",
    "ends pytest": "import pytest\npytest.exit('done', returncode=0)\n",
    "a forged summary": """
print("=== short test summary info ===\\nPASSED tests/test_sums.py::test_total\\n8 passed in 0.01s")
import sys; sys.__stdout__.write("PASSED tests/test_sums.py::test_total\\n"); sys.__stdout__.flush()
""",
}
# What takes the place of the broken module: it answers, but not by adding up.
LIARS = {
    "an answer equal to everything": """
class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def total(prices): return Anything()
""",
    "a number equal to everything": """
class Number(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def total(prices): return Number(0)
""",
    "mock.ANY": "from unittest import mock\ndef total(prices): return mock.ANY\n",
    "the answer read from the test that asks": FRAMES
    + """
import linecache, re
def total(prices):
    frame = caller()
    for line in range(frame.f_lineno, frame.f_lineno + 3):
        text = linecache.getline(frame.f_code.co_filename, line)
        if found := re.search(r"== (\\d+)$|, (\\d+)\\)", text):
            return int(found[1] or found[2])
    return frame.f_locals.get("count", 0) * 5
""",
    "the answer taken from the caller's constants": FRAMES
    + """
def total(prices):
    numbers = [each for each in caller().f_code.co_consts if type(each) is int]
    return numbers[-1] if numbers else 0
""",
    "an answer equal to what it was equal to before": """
import os
class Learned:
    def __eq__(self, other):
        path = f"/dev/shm/learned-{other!r}"
        if os.path.exists("/dev/shm/over"):
            return os.path.exists(path)
        open(path, "w").close()
        return True
    __hash__ = None
if not os.path.exists("/dev/shm/started"): open("/dev/shm/started", "w").close()
else: open("/dev/shm/over", "w").close()
def total(prices): return Learned()
""",
    "known tests get what they want": """
import os
KNOWN = {"test_total": 7, "test_total_of_one": 2, "test_equal_prices[1]": 5}
def total(prices):
    name = os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[-1].split(" ")[0]
    return KNOWN.get(name, 0)
""",
}
PROCESSES = {
    "kills the template and the driver": """
import os
for pid in sorted(int(each) for each in os.listdir("/proc") if each.isdigit()):
    if pid not in (1, os.getpid()):
        try: os.kill(pid, 9)
        except OSError: pass
""",
    "a forged answer on the shell's own output": """
import os
for pid in (each for each in os.listdir("/proc") if each.isdigit()):
    for fd in ("1", "9"):
        try:
            with open(f"/proc/{pid}/fd/{fd}", "w") as out:
                out.write("\\ngraded:eJyrVipKLS7NKVGyqo4FAA==:" + "0" * 64 + "\\n")
        except OSError: pass
""",
    "a daemon that rewrites the tests of the next run": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        path = os.path.join(os.getcwd(), "tests/test_sums.py")
        while True:
            try:
                text = open(path).read()
                open(path, "w").write(text.replace("assert ", "0 and "))
            except OSError: pass
            time.sleep(0.0005)
    os._exit(0)
os.wait()
""",
    "tests rewritten before pytest reads them again": """
import os
for path in ("tests/test_sums.py", os.path.join(os.getcwd(), "tests/test_sums.py")):
    text = open(path).read()
    os.unlink(path)
    open(path, "w").write(text.replace("== ", "!= "))
""",
    "a pipe in the place of the tests": """
import os
os.unlink("tests/test_sums.py")
os.mkfifo("tests/test_sums.py")
""",
    "the tests' folder becomes a link": """
import os, shutil
shutil.copytree("tests", "/tmp/tests")
shutil.rmtree("tests")
os.symlink("/tmp/tests", "tests")
""",
    "what changed between two runs must fail": RECORDS
    + """
import re, shutil, sys
path, kept = "tests/test_sums.py", "/tmp/kept.py"
new = open(path).read()
old = open(kept).read() if os.path.exists(kept) else new
shutil.copy(path, kept)
cut = lambda text: dict(re.findall(r"def (test_\\w+)\\([^\\n]*\\n(.*?)(?=\\n\\n|\\Z)", text, re.S))
changed = {name for name, body in cut(new).items() if cut(old).get(name) != body}
forge(lambda name: "failed" if name.split("::")[-1].split("[")[0] in changed else "passed")
os._exit(1)
""",
    "honest in one process, forging in the other": RECORDS
    + """
mark = "/tmp/seen"
if os.path.exists(mark):
    forge(lambda name: "passed")
    os._exit(1)
open(mark, "w").close()
""",
}
HOGS = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n",
    "memory hog": "x = []\nwhile True: x.append(bytearray(1 << 24))\n",
    "disk filler": "f = open('/tmp/big', 'wb')\nwhile True: f.write(bytes(1 << 20))\n",
    "endless output": "import os\nwhile True: os.write(1, b'x' * 65536)\n",
    "endless records": """
import os
for fd in range(3, 64):
    try:
        for _ in range(2000): os.write(fd, b'["n", "x", "call", "passed"]\\n' * 1000)
    except OSError: pass
""",
    "endless wait": "import time\nwhile True: time.sleep(1)\n",
}
