"""The template and the run of a hidden suite: what the code under test shares a process with.

The source of this file is executed by `suite_driver.py`, in the project's own interpreter (3.7 or newer): it
uses the standard library and the project's pytest alone. It knows node ids, never what is expected of them.
"""

import array
import ctypes
import importlib
import json
import os
import socket
import sys

PR_SET_DUMPABLE = 4
# They change which tests run, or how often.
SKIPPED_PLUGINS = ("randomly", "random_order", "random-order", "forked", "flaky")


def set_process(option, value):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed; the grader cannot protect itself here")


def encode(message):
    return json.dumps(message).encode() + b"\n"


def reporter(pytest, request, fd):
    """A pytest plugin that keeps the wanted tests and reports every phase of each."""
    from _pytest.reports import TestReport

    write, dumps, wanted, nonce = os.write, json.dumps, set(request["ids"]), request["nonce"]

    class Reporter:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, config, items):
            dropped = [item for item in items if item.nodeid not in wanted]
            if dropped:
                config.hook.pytest_deselected(items=dropped)
                items[:] = [item for item in items if item.nodeid in wanted]

        def pytest_runtest_logreport(self, report):
            phase = report.when if type(report) is TestReport else "part"
            outcome = "xfail" if hasattr(report, "wasxfail") else report.outcome
            for name in ("last_exc", "last_value", "last_traceback", "last_type"):
                sys.__dict__.pop(name, None)  # a failed test must not keep its objects alive
            data = (dumps([nonce, report.nodeid, phase, outcome]) + "\n").encode()
            while data:
                data = data[write(fd, data) :]

    return Reporter()


def arguments(request, plugins):
    chosen = [part for plugin in plugins for part in ("-p", plugin[1])]
    names = [name for name, _ in plugins]
    if "xdist" in names:
        chosen += ["-n", "0"]
    if "pytest_cov" in names:
        chosen += ["--no-cov"]
    if "hypothesispytest" in names:
        chosen += ["--hypothesis-seed=0"]
    fixed = [
        "--rootdir",
        request["workdir"],
        "-o",
        "cache_dir=/tmp/pytest_cache",
        "--maxfail=0",
        "--tb=line",
        "-q",
    ]
    return [*chosen, *fixed, os.path.join(request["workdir"], request["path"])]


def run_tests(pytest, request, plugins, fds):
    """The forked process of one run. It knows its node ids, not what anyone expects of them."""
    record, log = fds
    set_process(PR_SET_DUMPABLE, 1)  # as the project's tests would find it anywhere else
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(request["workdir"])
    if request["workdir"] not in sys.path:  # behind everything, so that it shadows nothing
        sys.path.append(request["workdir"])
    leave, sys.argv = os._exit, ["pytest"]
    code = int(pytest.main(arguments(request, plugins), plugins=[reporter(pytest, request, record)]))
    sys.stdout.flush()
    leave(code)


def trusted_plugins():
    """(name, module) of the plugins that the image's own packages offer, found before the patch exists."""
    try:
        from importlib.metadata import distributions
    except ImportError:  # Python 3.7, where pytest depends on the backport
        from importlib_metadata import distributions  # pyright: ignore[reportMissingImports]
    points = {(p.name, p.value) for d in distributions() for p in d.entry_points if p.group == "pytest11"}
    points = {point for point in points if point[0] not in SKIPPED_PLUGINS}
    return sorted((name, name if ":" in value else value) for name, value in points)


def preload():
    """Imports what pytest would import later, when the repository could shadow it."""
    import unittest.mock

    import pytest
    from _pytest import config

    for name in config.default_plugins:
        importlib.import_module(f"_pytest.{name}")
    return pytest, unittest.mock


def receive(control):
    """One request and its two descriptors, or None after the driver's end."""
    size = array.array("i").itemsize * 2
    head, ancillary, _, _ = control.recvmsg(8, socket.CMSG_LEN(size))
    if not head:
        return None, ()
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data[:size])
    length, text = int.from_bytes(head, "big"), b""
    while len(text) < length:
        text += control.recv(length - len(text))
    return json.loads(text.decode()), tuple(fds)


def serve(control):
    """Imports pytest, says so, then forks a run per request and reports its pid and its end."""
    set_process(PR_SET_DUMPABLE, 0)
    pytest, _ = preload()
    plugins = trusted_plugins()
    control.sendall(encode({"ready": pytest.__version__}))
    while True:
        request, fds = receive(control)
        if request is None:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            control.close()
            run_tests(pytest, request, plugins, fds)
        for fd in fds:
            os.close(fd)
        control.sendall(encode({"pid": pid}))
        _, status = os.waitpid(pid, 0)
        control.sendall(encode({"status": status >> 8 if status & 0x7F == 0 else -(status & 0x7F)}))
