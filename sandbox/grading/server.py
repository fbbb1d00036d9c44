"""Runs inside a grader sandbox as its first process: one handler and its child per request.

The source of this file is passed to `python -I -S -B -c`, so it uses the standard library alone.
It knows expressions, never expected values. Requests and answers are JSON lines on stdin and stdout.
A request has nonce, files, module, expressions, timeout, memory; the answer has the child's
records, why it ended, and whether everything it left could be removed.

The first process never reads a request or an answer: each handler is forked from it, so that a patch
that searches its memory finds neither the patches graded before it nor their right answers.

Being the first process of its pid namespace, it cannot be killed or stopped from inside, and
adopts every orphan, so that killing all others and waiting for them leaves none.
"""

import ctypes
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import sys
import time

PR_SET_DUMPABLE = 4
MAX_RECORDS = 1 << 20
EXACT = (int, float, complex, str, bytes, bool, type(None))
SEQUENCES = (list, tuple, set, frozenset)


def exact(value, depth=20):
    """Whether `value` is made of builtin literals only: a subclass could lie about itself."""
    kind = type(value)
    if kind in EXACT:
        return True
    if depth == 0:
        return False
    if kind in SEQUENCES:
        return all(exact(item, depth - 1) for item in value)
    return kind is dict and all(exact(k, depth - 1) and exact(v, depth - 1) for k, v in value.items())


def evaluate(expression, namespace):
    """One record: the literal text of a value, or the kind of failure."""
    try:
        value = eval(expression, namespace)
        return ["value", repr(value)] if exact(value) else ["other", type(value).__name__]
    except BaseException as error:  # noqa: BLE001 (SystemExit of the code under test, too)
        return ["raised", type(error).__name__]


def load(workdir, module):
    """Imports the module under test by its path. The repository comes last on the import path."""
    sys.path.append(workdir)
    name = module[: -len(".py")].replace("/", ".").removesuffix(".__init__")
    spec = importlib.util.spec_from_file_location(name, os.path.join(workdir, module))
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return vars(loaded)


def confine(request):
    for name, value in (("RLIMIT_AS", request["memory"]), ("RLIMIT_CPU", int(request["timeout"]) + 1)):
        resource.setrlimit(getattr(resource, name), (value, value))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def child(request, report):
    """The handler's forked process: loads the code under test, reports one record per expression."""
    confine(request)
    write, dumps, leave = os.write, json.dumps, os._exit
    try:
        namespace = load(request["workdir"], request["module"])
    except BaseException as error:  # noqa: BLE001
        write(report, (dumps([request["nonce"], -1, "raised", type(error).__name__]) + "\n").encode())
        leave(0)
    for index, expression in enumerate(request["expressions"]):
        record = [request["nonce"], index, *evaluate(expression, namespace)]
        write(report, (dumps(record) + "\n").encode())
    leave(0)


def place(workdir, files):
    for path, text in files.items():
        target = os.path.join(workdir, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="utf-8", newline="") as file:
            file.write(text)


def collect(pid, report, deadline):
    """Reads records until the child ends. Returns them and how it ended."""
    data, pidfd = bytearray(), os.pidfd_open(pid)
    try:
        while True:
            left = deadline - time.monotonic()
            ready = select.select([report, pidfd], [], [], max(left, 0))[0] if left > 0 else []
            if not ready:
                return data, "timeout"
            chunk = os.read(report, 1 << 16) if report in ready else b""
            data += chunk
            if len(data) > MAX_RECORDS:
                return data, "flood"
            if not chunk and pidfd in ready:
                return data, "ended"
            if not chunk and report in ready:
                select.select([pidfd], [], [], max(left, 0))
    finally:
        os.close(pidfd)


def sweep(workdir):
    """Kills every other process, waits for its own, empties the working directory. Whether it is empty."""
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    for entry in os.scandir(workdir):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
    return not os.listdir(workdir)


def serve(request):
    """Grades one request, in its handler."""
    started = time.monotonic()
    place(request["workdir"], request["files"])
    report, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(report)
        child(request, end)
    os.close(end)
    data, ended = collect(pid, report, started + request["timeout"])
    clean = sweep(request["workdir"])
    os.close(report)
    return {"ended": ended, "records": data.decode(errors="replace"), "clean": clean}


def receive():
    """One request. The owner sends no other before it has the answer."""
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(0, 1 << 16) or b"null\n"
    return json.loads(line)


def say(message):
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def handle():
    """The forked process of one request; the code under test may kill it, but nothing else."""
    try:
        answer = serve(receive())
    except Exception as error:  # noqa: BLE001 (the owner hears of it and replaces the sandbox)
        answer = {"ended": "error", "records": "", "clean": False, "error": repr(error)}
    say(answer)
    os._exit(0)


def main():
    # Otherwise the code under test, which has the same uid, could trace this process.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # A first process is immune to every signal that it has no handler for, and Python handles this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    requests, workdir, clean = select.poll(), os.getcwd(), True
    requests.register(0, select.POLLIN)
    say({"ready": True})
    while clean and requests.poll()[0][1] & select.POLLIN:
        if (handler := os.fork()) == 0:
            handle()
        _, status = os.waitpid(handler, os.WUNTRACED)  # or stopped by the code under test
        clean = sweep(workdir)
        if status:
            say({"ended": "killed", "records": "", "clean": False})


if __name__ == "__main__":
    main()
