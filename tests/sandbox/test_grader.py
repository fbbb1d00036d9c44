"""Verdicts of the grader on honest, broken and hostile patches."""

import asyncio
import json
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.base import Diff, RejectedDiff
from sandbox.grading.grader import Grader
from sandbox.grading.patch import BadPatchError, SuspiciousPatchError, apply, digest
from sandbox.grading.verdict import Question, judge, questions, same
from sandbox.tasks.schema import Case, HiddenTests, TaskSpec

BROKEN = "def add(a, b):\n    return a - b\n"
FIXED = "def add(a, b):\n    return a + b\n"
TASK = TaskSpec(
    instance_id="t", problem_statement="add", files={"m.py": BROKEN, "data.txt": "7"}, tests_timeout=2.0
)
HIDDEN = HiddenTests(
    instance_id="t",
    module="m.py",
    cases=(
        Case(expression="add(1, 2)", expected=3),
        Case(expression="add([1], [2])", expected=[1, 2]),
        Case(expression="add(True, 1)", expected=2),
    ),
)

REPORT_FD = (
    "[int(f) for f in os.listdir('/proc/self/fd')"
    " if os.path.exists('/proc/self/fd/' + f) and 'pipe' in os.readlink('/proc/self/fd/' + f)]"
)
FORGED = '\'["0123456789abcdef", 0, "value", "3"]\\\\n\''

UNRESOLVED = {
    "unchanged in effect": "def add(a, b):\n    return a - b  # same\n",
    "wrong type": "def add(a, b):\n    return float(a + b) if isinstance(a, int) else a + b\n",
    "syntax error": "def add(a, b:\n",
    "name error at import": "add = missing\n",
    "os._exit at import": "import os\nos._exit(0)\n",
    "os._exit in a call": "import os\ndef add(a, b):\n    os._exit(0)\n",
    "sys.exit": "import sys\ndef add(a, b):\n    sys.exit(0)\n",
    "always equal object": (
        "class E:\n    def __eq__(s, o): return True\n    def __repr__(s): return '3'\n"
        "def add(a, b): return E()\n"
    ),
    "int subclass": (
        "class E(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return E(3)\n"
    ),
    "list with a liar": "class E:\n    def __repr__(s): return '1, 2'\ndef add(a, b): return [E()]\n",
    "printed records": f"import sys\nprint({FORGED}, flush=True)\ndef add(a, b): return 0\n",
    "memory hog": "x = 'a' * (1 << 34)\n",
    "deep recursion": "def add(a, b): return add(a, b)\n",
    "kills everything it sees": "import os\ndef add(a, b):\n    os.kill(-1, 9)\n",
    "kills itself": "import os\nos.kill(os.getpid(), 9)\n",
    "stops the server": "import os, signal\nfor s in (2, 9, 15, 19, 10, 12): os.kill(1, s)\n",
    "self-containing list": "def add(a, b):\n    x = []\n    x.append(x)\n    return x\n",
}
TAMPERING = {
    "record on the pipe": f"import os\nfor fd in {REPORT_FD}:\n    os.write(fd, {FORGED}.encode())\n",
    "noise on the pipe": f"import os\nfor fd in {REPORT_FD}:\n    os.write(fd, b'hello\\n')\n" + FIXED,
    "forked, so that every check is answered twice": "import os\nif os.fork(): os.wait()\n" + FIXED,
    "repr always says 3": "import builtins\nbuiltins.repr = lambda v: '3'\n" + FIXED,
    "canary defined away": "import builtins\nbuiltins.eval = lambda e, n: 3\n" + FIXED,
}
RESOLVED = {
    "reference": FIXED,
    "other way": "from operator import add\n",
    "reads its data": "open(__file__.replace('m.py', 'data.txt')).read()\n" + FIXED,
    "leaves a daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n    os._exit(0)\n" + FIXED
    ),
    "leaves files": "import os\nos.makedirs('/testbed/x/y')\nopen('/testbed/x/y/z', 'w').write('1')\n"
    + FIXED,
    "prints a lot": "print('x' * 1000000)\n" + FIXED,
}


def patch(source: str) -> Diff:
    return Diff(files={"m.py": source.encode()})


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def grader(loop):
    made = loop.run(_started())
    yield made
    loop.run(made.close())


async def _started() -> Grader:
    grader = Grader(graders=2)
    await grader.start()
    return grader


def cases(table: dict[str, str], status: str) -> list:
    return [pytest.param(source, status, id=name) for name, source in table.items()]


@pytest.mark.parametrize(
    ("source", "status"),
    cases(UNRESOLVED, "unresolved") + cases(TAMPERING, "tampering") + cases(RESOLVED, "resolved"),
)
def test_verdict(loop, grader: Grader, source: str, status: str) -> None:
    verdict = loop.run(grader.grade(TASK, HIDDEN, patch(source)))
    assert verdict.status == status, verdict
    # Whatever it was, the next honest patch is not disturbed.
    after = loop.run(grader.grade(TASK, HIDDEN, patch(FIXED + f"# {hash(source)}\n")))
    assert after.status == "resolved", after


def test_endless_loop_is_the_patch_s_fault(loop, grader: Grader) -> None:
    task = TaskSpec(instance_id="t", problem_statement="", files=TASK.files, tests_timeout=0.4)
    for source in ("while True: pass\n", "import time\ndef add(a, b): time.sleep(60)\n"):
        verdict = loop.run(grader.grade(task, HIDDEN, patch(source)))
        assert verdict.status == "unresolved" and "timed out" in verdict.detail


def test_slow_task_is_not_the_patch_s_fault(loop, grader: Grader) -> None:
    files = {"m.py": "while True: pass\n"}
    slow = TaskSpec(instance_id="t", problem_statement="", files=files, tests_timeout=0.3)
    assert loop.run(grader.check_unchanged(slow, HIDDEN)).status == "timeout"
    assert loop.run(grader.check_unchanged(TASK, HIDDEN)).status == "unresolved"


def test_fork_bomb_ends_in_time(loop, grader: Grader) -> None:
    started = time.monotonic()
    source = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    task = TaskSpec(instance_id="t", problem_statement="", files=TASK.files, tests_timeout=0.5)
    assert loop.run(grader.grade(task, HIDDEN, patch(source))).status in ("unresolved", "tampering")
    assert time.monotonic() - started < 10
    assert loop.run(grader.grade(TASK, HIDDEN, patch(FIXED + "# after the bomb\n"))).status == "resolved"


def test_a_patch_that_breaks_the_server_gains_nothing(loop, grader: Grader) -> None:
    source = "import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))\n" + BROKEN
    verdict = loop.run(grader.grade(TASK, HIDDEN, patch(source)))
    assert verdict.status in ("tampering", "unresolved"), verdict
    assert loop.run(grader.grade(TASK, HIDDEN, patch(FIXED + "# after the break\n"))).status == "resolved"


def test_server_and_expected_values_cannot_be_reached(loop, grader: Grader) -> None:
    probe = """
import sys
found = []
for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/fd/0", "/proc/1/maps"):
    try:
        open(path, "rb").read(1)
        found.append(path)
    except OSError:
        pass
frame = sys._getframe()
while frame:
    if str(987653 + 1) in repr(frame.f_locals):
        found.append("frame")
    frame = frame.f_back
"""
    hidden = HiddenTests(
        instance_id="t",
        module="m.py",
        cases=(Case(expression="found", expected=[]), Case(expression="987653 + 1", expected=987654)),
    )
    task = TaskSpec(instance_id="t", problem_statement="", files={"m.py": ""}, tests_timeout=2.0)
    assert loop.run(grader.grade(task, hidden, patch(probe))).status == "resolved"


THIEF = r"""
import ctypes, gc, os, re
libc, (out, into) = ctypes.CDLL(None), os.pipe()
def page(address):  # a pipe refuses an address that is not mapped
    return os.read(out, 4096) if libc.write(into, ctypes.c_void_p(address), 4096) == 4096 else b""
arenas = {(id(each) >> 20) + more for each in gc.get_objects() for more in (-1, 0, 1)}
memory = b"".join(page((arena << 20) + at) for arena in sorted(arenas) for at in range(0, 1 << 20, 4096))
found = re.findall(rb"kept_" + rb"secret_\w+", memory)
def add(a, b):
    raise type(found[0].decode() if found else "Nothing", (Exception,), {})
"""


def test_no_patch_finds_an_earlier_one_in_memory(loop) -> None:
    async def body() -> str:
        grader = Grader(graders=1)
        try:
            for each in range(3):
                secret = f"kept_secret_{each}"
                source = f"{secret} = '{secret}'\n{FIXED}"
                assert (await grader.grade(TASK, HIDDEN, patch(source))).status == "resolved"
            return (await grader.grade(TASK, HIDDEN, patch(THIEF))).detail
        finally:
            await grader.close()

    assert "was raised: Nothing" in loop.run(body())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_handler_is_the_patch_s_fault(loop, grader: Grader, number: int) -> None:
    source = f"import os\nos.kill(os.getppid(), {number:d})\nimport time\ntime.sleep(9)\n"
    started = time.monotonic()
    assert loop.run(grader.grade(TASK, HIDDEN, patch(source))).status == "unresolved"
    assert time.monotonic() - started < 5
    assert loop.run(grader.grade(TASK, HIDDEN, patch(f"{FIXED}# after {number:d}\n"))).status == "resolved"


def test_cache_counts_and_shares(loop) -> None:
    async def body() -> None:
        grader = Grader(graders=1)
        try:
            together = await asyncio.gather(*(grader.grade(TASK, HIDDEN, patch(FIXED)) for _ in range(5)))
            assert [verdict.cached for verdict in together].count(False) == 1
            assert (grader.hits, grader.misses) == (4, 1)
            again = await grader.grade(TASK, HIDDEN, patch(FIXED))
            assert again.cached and again.status == "resolved" and again.seconds == 0.0
            assert (await grader.grade(TASK, HIDDEN, Diff())).status == "unresolved"
            assert (grader.hits, grader.misses) == (5, 1)
        finally:
            await grader.close()

    loop.run(body())


def test_concurrent_verdicts_equal_serial_ones(loop, grader: Grader) -> None:
    sources = [BROKEN + f"#{n}\n" if n % 3 else FIXED + f"#{n}\n" for n in range(24)]

    async def body() -> list[str]:
        jobs = (grader.grade(TASK, HIDDEN, patch(source)) for source in sources)
        return [verdict.status for verdict in await asyncio.gather(*jobs)]

    assert loop.run(body()) == ["unresolved" if n % 3 else "resolved" for n in range(24)]


def test_rejected_and_escaping_diffs(loop, grader: Grader) -> None:
    diffs = [
        RejectedDiff(reason="link"),
        *(Diff(files={path: b""}) for path in ("../x.py", "/x.py", "a//b.py")),
    ]
    assert [loop.run(grader.grade(TASK, HIDDEN, diff)).status for diff in diffs] == ["tampering"] * 4
    assert loop.run(grader.grade(TASK, HIDDEN, Diff(files={"m.py": None}))).status == "unresolved"


def test_apply_keeps_known_files_and_new_sources_only() -> None:
    diff = Diff(files={"new.py": b"1", "notes.md": b"2", "data.txt": b"8", "m.py": None})
    assert apply(TASK, diff) == {"new.py": "1", "data.txt": "8"}
    with pytest.raises(BadPatchError, match="UTF-8"):
        apply(TASK, Diff(files={"m.py": b"\xff"}))
    with pytest.raises(BadPatchError, match="at most"):
        apply(TASK, Diff(files={"m.py": b"x" * (300 << 10)}))
    with pytest.raises(BadPatchError, match="both"):
        apply(TASK, Diff(files={"m.py/x.py": b""}))
    with pytest.raises(SuspiciousPatchError):
        apply(TASK, Diff(files={"a/../../b.py": b""}))


def test_digest_depends_on_path_content_and_deletion() -> None:
    diffs = [{"a": b"b"}, {"a": b""}, {"a": None}, {"ab": b""}, {"a": b"", "b": b""}, {}]
    assert len({digest(Diff(files=files)) for files in diffs}) == len(diffs)
    assert digest(Diff(files={"a": b"1", "b": b"2"})) == digest(Diff(files={"b": b"2", "a": b"1"}))


LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(LITERALS)
def test_right_answers_resolve_after_a_round_trip(value: object) -> None:
    asked = [Question("x", "value", value)]
    record = json.dumps(["n", 0, "value", repr(value)]) + "\n"
    assert judge(record, asked=asked, nonce="n", ended="ended")[0] == "resolved"


@given(LITERALS, LITERALS)
def test_same_is_equality_of_type_and_text(left: object, right: object) -> None:
    if repr(left) == repr(right):
        assert same(left, right)
    if same(left, right):
        assert left == right and type(left) is type(right)


def test_same_is_strict_at_every_depth() -> None:
    for left, right in (
        (1, True),
        (1, 1.0),
        ([1], (1,)),
        ({"a": [1]}, {"a": [1.0]}),
        ({1}, {True}),
        ({1: 0}, {True: 0}),
    ):
        assert left == right or type(left) is not type(right)
        assert not same(left, right)


def test_a_text_made_to_be_slow_to_read_is_not_read() -> None:
    colliding = "{" + ",".join(str(i * (2**61 - 1)) for i in range(40_000)) + "}"
    record = json.dumps(["n", 0, "value", colliding]) + "\n"
    started = time.monotonic()
    asked = [Question("x", "value", {1})]
    assert judge(record, asked=asked, nonce="n", ended="ended")[0] == "unresolved"
    assert time.monotonic() - started < 1


def test_missing_record_wrong_nonce_and_canaries() -> None:
    asked = questions(HIDDEN.cases)
    assert len(asked) == 5 and sum(question.canary for question in asked) == 2
    assert judge("", asked=asked, nonce="n", ended="ended")[0] == "unresolved"
    assert judge('["m", 0, "value", "3"]\n', asked=asked, nonce="n", ended="ended")[0] == "tampering"
    assert judge("[" * 100_000 + "\n", asked=asked, nonce="n", ended="ended")[0] == "tampering"
