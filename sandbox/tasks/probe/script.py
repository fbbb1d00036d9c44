"""Runs inside a sandbox: pytest is imported once, every run of a test file is a fork of this process.

The source of this file is passed to the image's interpreter by `-c`; it uses the standard library and
pytest. Requests and answers are JSON lines on stdin and stdout. A request has files (path → text or
null, put in place for this run alone), tests (paths), timeout (seconds, each) and trace (path prefixes
whose executed lines are wanted). Only honest project code runs here: verdicts are not made of this.
"""

import ast
import importlib
import json
import os
import select
import signal
import sys
import textwrap
import time

import pytest

PRELOADED = ("_pytest.assertion.rewrite", "_pytest.unittest", "asyncio", "unittest.mock", "ssl", "decimal")
MAX_MESSAGE, MAX_ARGUMENT = 800, 120  # characters
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Recorder:
    """Outcome of every test over its phases, and for a failed one what went wrong and where."""

    def __init__(self):
        self.results, self.reasons, self.broken = {}, {}, False

    def pytest_collectreport(self, report):
        self.broken = self.broken or report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed and call.excinfo is not None:
            self.reasons.setdefault(report.nodeid, reason(item, call.excinfo, report))
        return report

    def pytest_runtest_logreport(self, report):
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        before = self.results.get(report.nodeid, "passed")
        self.results[report.nodeid] = outcome if before == "passed" else before


def reason(item, excinfo, report):
    """Type, message, the statements of the test up to the one that failed, and whether that one raised."""
    folder = os.path.dirname(item.path) + "/"  # a test may be inherited from a module beside its own
    inner = [entry for entry in excinfo.traceback if str(entry.path).startswith(folder)]
    crash = getattr(report.longrepr, "reprcrash", None)
    return {
        "type": excinfo.type.__name__,
        "message": str(crash.message if crash else excinfo.value)[:MAX_MESSAGE],
        "statement": leading_to(inner) if inner else "",
        "arguments": arguments_of(item),
        "asserted": bool(inner) and inner[-1] is excinfo.traceback[-1],
    }


def leading_to(entries):
    """The last statements of the test's body, the failing one at the end; no name, no docstring.

    If that one calls a helper of the test file, the helper's come after it.
    """
    text = statements(entries[0], MAX_MESSAGE)
    if entries[-1].frame.code.raw is not entries[0].frame.code.raw:
        inner = statements(entries[-1], MAX_MESSAGE - len(text))
        text = f"{text}\n# and there:\n{inner}" if inner else text
    return text


def statements(entry, room):
    """What of the function's body comes before and with the running statement, in at most `room` letters."""
    lines, number = list(entry.frame.code.fullsource), entry.lineno + 1
    around = [node for node in ast.walk(ast.parse("\n".join(lines))) if hasattr(node, "body")]
    holders = [
        node for node in around if isinstance(node, FUNCTIONS) and node.lineno <= number <= node.end_lineno
    ]
    if not holders:
        return ""
    body = max(holders, key=lambda node: node.lineno).body
    end = next((node.end_lineno for node in body if number <= node.end_lineno), number)
    best = ""
    for node in reversed([node for node in body if node.lineno <= number]):
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        text = textwrap.dedent("\n".join(lines[first - 1 : end])).strip("\n")
        if len(text) > room or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            break
        best = text
    return best or textwrap.dedent(str(entry.statement))[: max(room, 0)]


def arguments_of(item):
    """Short texts of a parametrised test's arguments."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    texts = {str(name): repr(value) for name, value in given.items()}
    return {name: text for name, text in texts.items() if len(text) <= MAX_ARGUMENT and " at 0x" not in text}


def traced(prefixes):
    """Starts to note executed lines of files below `prefixes`; returns where they are noted."""
    lines, monitoring = {}, sys.monitoring
    top = os.getcwd() + "/"

    def line(code, number):
        path = code.co_filename
        if path.startswith(top) and path[len(top) :].startswith(prefixes):
            lines.setdefault(path[len(top) :], set()).add(number)
        return monitoring.DISABLE

    monitoring.use_tool_id(monitoring.COVERAGE_ID, "prober")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, line)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
    return lines


def run(path, trace, report):
    """One test file, in the forked process."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    lines = traced(tuple(trace)) if trace else {}
    recorder = Recorder()
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir", os.getcwd(), "--tb=short", path]
    status = pytest.main(arguments, plugins=[recorder])
    answer = {
        "status": int(status),
        "broken": recorder.broken,
        "results": recorder.results,
        "reasons": recorder.reasons,
        "lines": {file: sorted(numbers) for file, numbers in lines.items()},
    }
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(report, data) :]
    os._exit(0)


def forked(path, trace, timeout):
    """The answer of one test file, and how its process ended."""
    started = time.monotonic()
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        try:
            run(path, trace, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    data, ended = drain(ours, started + timeout)
    os.close(ours)
    sweep()
    answer = json.loads(data) if ended == "ended" and data.endswith(b"}") else {"results": {}, "broken": True}
    return {"ended": ended, "seconds": time.monotonic() - started, **answer}


def drain(fd, deadline):
    data = bytearray()
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([fd], [], [], left)[0]:
            break
        chunk = os.read(fd, 1 << 20)
        if not chunk:
            return bytes(data), "ended"
        data += chunk
    return bytes(data), "timeout"


def sweep():
    """Kills and reaps everything else: this is the first process of its pid namespace."""
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break


def place(files, stamp):
    """Puts texts in place; returns what undoes it. A time stamp of its own keeps byte code apart."""
    before = {}
    for path, text in files.items():
        if os.path.exists(path):
            with open(path, "rb") as file:
                before[path] = file.read(), os.stat(path).st_mtime_ns
            os.unlink(path)
        else:
            before[path] = None
        if text is not None:
            write(path, text.encode(), stamp)
    return before


def write(path, data, stamp):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    os.utime(path, ns=(stamp, stamp))


def restore(before):
    for path, saved in before.items():
        if os.path.exists(path):
            os.unlink(path)
        if saved is not None:
            write(path, *saved)


def main():
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode, sys.pycache_prefix = False, "/tmp/bytecode"
    for name in PRELOADED:
        importlib.import_module(name)
    out = os.fdopen(os.dup(1), "w")
    print(json.dumps({"ready": True}), file=out, flush=True)
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        before = place(request["files"], (number + 1) * 1_000_000_000)
        answers = {}
        for path in request["tests"]:
            answers[path] = forked(path, request["trace"], request["timeout"])
        restore(before)
        print(json.dumps(answers), file=out, flush=True)


if __name__ == "__main__":
    main()
