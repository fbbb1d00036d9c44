"""Runs a hidden pytest suite inside a grader sandbox, beside the code under test but never in one process.

The source of this file is passed to the project's own interpreter (3.7 or newer) by `python -s -B -c`, with
the path of a job and the source of `suite_template.py` as arguments. Three kinds of process:

- the *driver* (this file) reads the job (key, patch, hidden files, runs), places files, judges nothing and
  answers with one line on stdout, authenticated by the key.
- the *template* is forked from the driver before the driver knows anything, and has imported pytest while the
  tree was still the image's own. It forks one process per run and learns only what that process may know.
- the *run* imports the code under test and the tests of one file, and writes records to a pipe that the
  driver reads.

Driver and template refuse to be traced. Between runs everything else is killed and the hidden files are
written anew, so that one run cannot prepare the next.
"""

import array
import base64
import ctypes
import hashlib
import hmac
import json
import os
import select
import signal
import socket
import stat
import sys
import time
import zlib

MARK = "graded:"
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
STRETCH = 4  # how often the time of the tests may pass while they wait for processors
TICK = 0.5  # seconds between two looks
MAX_RECORDS, MAX_LOG = 16 << 20, 16 << 10  # bytes


def set_process(option, value):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed; the grader cannot protect itself here")


def encode(message):
    return json.dumps(message).encode() + b"\n"


class Template:
    """The driver's side of the template process."""

    def __init__(self, source):
        self.control, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.control.close()
            names: dict = {"__name__": "template"}
            try:
                exec(compile(source, "template", "exec"), names)
                names["serve"](theirs)
            except BaseException as error:  # noqa: BLE001 (the driver hears of it)
                theirs.sendall(encode({"error": f"{type(error).__name__}: {error}"}))
            finally:
                os._exit(1)
        theirs.close()
        self.buffer = b""

    def send(self, request, fds):
        text = json.dumps(request).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self.control.sendmsg([len(text).to_bytes(8, "big")], rights)
        self.control.sendall(text)

    def messages(self):
        """What has come, waiting for at least something. Raises `EOFError` when the template is gone."""
        chunk = self.control.recv(1 << 16)
        if not chunk:
            raise EOFError("the template process is gone")
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        return [json.loads(line.decode()) for line in lines]


def place(workdir, files, *, follow):
    """Writes (base64) or deletes (None) files. Raises `OSError`, also for a path through a link."""
    for path, text in files.items():
        target = os.path.join(workdir, path)
        parents = [target[:i] for i in range(len(workdir) + 1, len(target)) if target[i] == "/"]
        through = [parent for parent in parents if os.path.islink(parent)]
        if through and not follow:
            raise OSError(f"{path} goes through the link {through[0]}")
        # Whatever else may lie there, such as a pipe that nobody reads, must not be opened.
        if os.path.lexists(target) and (text is None or not regular(target)):
            os.unlink(target)
        if text is not None:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as file:
                file.write(base64.b64decode(text))
            forget_compiled(target)


def regular(path):
    return stat.S_ISREG(os.lstat(path).st_mode)


def forget_compiled(path):
    """Removes compiled forms of a source: one of equal size and time would be taken for it."""
    folder, name = os.path.split(path)
    cache = os.path.join(folder, "__pycache__")
    if name.endswith(".py") and os.path.isdir(cache):
        for each in os.listdir(cache):
            if each.startswith(name[:-2]):
                os.unlink(os.path.join(cache, each))


def intact(workdir, files):
    """Whether the sources among the files are still what was placed."""
    sources = {path: text for path, text in files.items() if path.endswith(".py")}  # tests may write data
    try:
        for path, text in sources.items():
            target = os.path.join(workdir, path)
            if not regular(target):
                return False
            with open(target, "rb") as file:
                if file.read() != base64.b64decode(text):
                    return False
    except OSError:
        return False
    return True


def parents():
    """Process id → parent's, of every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                pass
    return found


def sweep(spared):
    """Kills every descendant but the template. Orphans come to the driver, so that none escapes."""
    for _ in range(1000):
        table, ours = parents(), {os.getpid()}
        while True:
            more = {pid for pid, parent in table.items() if parent in ours} - ours
            if not more:
                break
            ours |= more
        for pid in ours - {os.getpid(), spared}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if not ours - {os.getpid(), spared}:
            return True
        time.sleep(0.002)
    return False


def waited(pid):
    """Seconds for which the threads of a process were ready and had no processor."""
    total = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                total += int(file.read().split()[1])
    except (OSError, IndexError):  # it ended, or the kernel does not count
        pass
    return total / 1e9


class Clock:
    """The time that is left to the runs. Waiting for a processor costs none of it, up to a bound."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds
        self.last = self.end + (STRETCH - 1) * seconds
        self.current = self.looked = 0.0

    def look(self, pid):
        """Counts what the run has waited so far; seldom, unless its time is over."""
        if self.left() <= 0 or time.monotonic() > self.looked + TICK:
            self.current = max(self.current, waited(pid))
            self.looked = time.monotonic()

    def left(self):
        return min(self.end + self.current, self.last) - time.monotonic()

    def next_run(self):
        self.end, self.current = self.end + self.current, 0.0


class Collector:
    """What one run says: records, log, its end."""

    def __init__(self, made, record, log):
        self.made, self.record, self.log = made, record, log
        self.records, self.said = bytearray(), bytearray()
        self.pid = self.status = None
        self.poll = select.poll()
        for fd in (record, log, made.control.fileno()):
            self.poll.register(fd, select.POLLIN)

    def collect(self, clock):
        """How it ended."""
        while self.status is None:
            self.take(self.poll.poll(min(max(clock.left(), 0), TICK) * 1000))
            if len(self.records) > MAX_RECORDS:
                return "flood"
            clock.look(self.pid)
            if clock.left() <= 0:
                return "timeout"
        return "ended" if self.drain() else "flood"

    def drain(self):
        """Takes what has come by now, for a second at most. False if it is too much."""
        end = time.monotonic() + 1
        while len(self.records) <= MAX_RECORDS and time.monotonic() < end:
            ready = self.poll.poll(0)
            if not ready:
                break
            self.take(ready)
        return len(self.records) <= MAX_RECORDS

    def take(self, ready):
        """Reads what is there."""
        for fd, _ in ready:
            if fd == self.made.control.fileno():
                self.hear()
                continue
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                self.poll.unregister(fd)
            elif fd == self.record:
                self.records += chunk
            else:
                self.said += chunk
                del self.said[:-MAX_LOG]

    def hear(self):
        for message in self.made.messages():
            self.pid, self.status = message.get("pid", self.pid), message.get("status", self.status)

    def stop(self):
        """Kills a run that has not ended, and waits until the template has seen it end."""
        while self.status is None:
            if self.pid is not None:
                os.kill(self.pid, signal.SIGKILL)
            self.hear()


def execute(made, job, run, clock):
    """One run: fresh hidden files, a process of its own, nothing left of it."""
    placed = dict(job["hidden"], **run["files"])
    place(job["workdir"], placed, follow=True)
    (record, record_end), (log, log_end) = os.pipe(), os.pipe()
    request = {name: run[name] for name in ("path", "ids", "nonce")}
    made.send(dict(request, workdir=job["workdir"]), (record_end, log_end))
    os.close(record_end)
    os.close(log_end)
    try:
        run = Collector(made, record, log)
        ended = run.collect(clock)
        run.stop()
        clock.next_run()
    finally:
        os.close(record)
        os.close(log)
    clean = sweep(made.pid)
    kept = intact(job["workdir"], placed)
    records = "" if ended == "flood" else run.records.decode(errors="replace")
    result = {"records": records, "log": run.said.decode(errors="replace"), "ended": ended}
    return dict(result, status=run.status, intact=kept, clean=clean)


def all_passed(run, result):
    """Whether the next run can still matter."""
    passed = set(result["records"].split("\n"))
    wanted = ((name, phase) for name in run["passing"] for phase in ("setup", "call", "teardown"))
    return all(json.dumps([run["nonce"], *each, "passed"]) in passed for each in wanted)


def perform(made, job):
    clock = Clock(job["timeout"])
    try:
        place(job["workdir"], job["patch"], follow=False)
    except OSError as error:
        return {"problem": str(error)}
    results = []
    for run in job["runs"]:
        try:
            results.append(execute(made, job, run, clock))
        except (EOFError, OSError) as error:
            lost = {"records": "", "log": str(error), "ended": "killed", "status": None}
            results.append(dict(lost, intact=True, clean=False))
        if results[-1]["ended"] != "ended" or not results[-1]["clean"] or not all_passed(run, results[-1]):
            break
    return {"results": results}


def answer(key, message):
    data = base64.b64encode(zlib.compress(json.dumps(message).encode()))
    sign = hmac.new(bytes.fromhex(key), data, hashlib.sha256).hexdigest()
    sys.stdout.write(f"\n{MARK}{data.decode()}:{sign}\n")
    sys.stdout.flush()


def main():
    sys.path[:] = [entry for entry in sys.path if entry]
    made = Template(sys.argv[2])
    set_process(PR_SET_DUMPABLE, 0)
    set_process(PR_SET_CHILD_SUBREAPER, 1)
    try:
        ready = made.messages()[0]
    except EOFError:
        ready = {"error": "the template process ended"}
    with open(sys.argv[1], "rb") as file:
        job = json.loads(file.read().decode())
    os.unlink(sys.argv[1])
    answer(job["key"], {"fault": ready["error"]} if "error" in ready else perform(made, job))
    os.kill(made.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
