"""What travels between a grader and a student's process, and what is told when nothing right comes back."""

from __future__ import annotations

import io
import itertools
import os
import struct
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest

from hetu.teach.labs import Allowance, Lab, Outcome, Student, different
from hetu.teach.labs.checks import outcome
from hetu.teach.labs.inside import codec
from hetu.teach.labs.inside.clock import Clock
from hetu.teach.labs.process import Ended, Process
from hetu.teach.labs.report import report
from hetu.teach.labs.student import NoAnswer
from hetu.teach.labs.submission import Code, text_of_cells

PLAIN = [
    *(None, True, False, 0, -1, 1 << 200, -(1 << 64), 0.5, float("inf"), "", "ß\n", [], (), {}),
    *([1, [2, (3, "x")]], {"a": 1, (1, 2): [None]}, {1: {2: 3}}),
]
ARRAYS = [np.arange(6.0).reshape(2, 3), np.zeros((0, 4), np.int8), np.array(True), np.float32([1, 2])[::-1]]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_comes_back(value: Any) -> None:
    back = codec.decode(codec.encode(value))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_an_array_comes_back(array: np.ndarray) -> None:
    back = codec.decode(codec.encode(array))
    assert back.dtype == array.dtype and back.shape == array.shape and np.array_equal(back, array)
    assert back.flags.writeable  # it is one's own


@pytest.mark.parametrize("value", [{1}, 1j, object(), np.array([None]), np.array(["a"]), 1 << 5000, b"x"], ids=type)
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(codec.NotPlain, match="cannot be handed over"):
        codec.encode(value)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"X", b"NN", b"L\xff\xff\xff\xff", b"S\x05\x00\x00\x00ab", b"I\xff\xff\x00\x00" + bytes(65535)),
        b"S\x01\x00\x00\x00\xff",
        b"M\x01\x00\x00\x00L\x00\x00\x00\x00N",
        b"L\x01\x00\x00\x00" * 50 + b"N",
        b"A\x02f8\x01" + struct.pack("<Q", 1 << 60),
        b"A\x02f8\x02" + struct.pack("<QQ", 1 << 40, 1 << 40),
        b"A\x02O8\x00" + bytes(8),
        b"A\x02f8\xff" + bytes(64),
        b"L" + struct.pack("<I", 1_000_001) + b"N" * 1_000_001,
        b"M" + struct.pack("<I", 10_001) + b"".join(b"D" + struct.pack("<d", k) + b"N" for k in range(10_001)),
    ],
    ids=lambda data: str(data[:20]),
)
def test_bytes_that_are_no_value_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        codec.decode(data)


def test_a_frame_has_a_limit() -> None:
    with pytest.raises(ValueError, match="where 16,777,216 are allowed"):
        codec.receive(io.BytesIO(struct.pack("<Q", 1 << 60)))
    with pytest.raises(EOFError):
        codec.receive(io.BytesIO(struct.pack("<Q", 10) + b"abc"))
    for value, told in (
        ("x" * (20 << 20), "bytes are too many"),
        ([0] * 600_000, "use an array"),
        (dict.fromkeys(range(20_000)), "more than 10,000 keys"),
    ):
        with pytest.raises(codec.NotPlain, match=told):
            codec.encode(value)


def lab_of(test: Any, seconds: float = 3.0, **options: Any) -> Lab:
    lab = Lab("9", "double", "lab9.py", limits=Allowance(seconds, total=2 * seconds), **options)
    lab.check("twice as much", hint="add it to itself")(test)
    return lab


def seen(lab: Lab, text: str) -> Outcome:
    with Student(lab.code({lab.file: text}), lab.limits) as student:
        return outcome(lab.checks[0], student)


def doubled(student: Student) -> str:
    return different(student.double(2), 4)


@pytest.mark.parametrize(
    ("text", "state", "told"),
    [
        ("def double(x): return x + x", "pass", ""),
        ("def double(x): return x", "FAIL", "got 2., wanted 4."),
        ("def double(x): return [x, x]", "FAIL", "got shape (2,), wanted ()"),
        ("def double(x):\n    raise NotImplementedError", "blank", ""),
        ("x = 1", "error", "NameError: nothing defines double: its line is gone, or its cell was not run"),
        ("def double(x):\n    return x.y", "error", "no attribute 'y'\nin line 2: return x.y"),
        ("def double(x):\n    return {x}", "error", "NotPlain: a set cannot be handed over"),
        ("def double(:", "error", "SyntaxError: invalid syntax\nin line 1: def double(:"),
        ("import hetu", "error", "while the file is loaded: ModuleNotFoundError: No module named 'hetu'\nin line 1"),
        ("import numpy as np\ndef double(x):\n    while True: pass", "error", "still running after 0.8 s"),
        ("def double(x):\n    while True: pass", "error", "does a loop never end?\nin line 2: while True: pass"),
        (text_of_cells([(3, "%x\nimport math"), (7, "\ndef double(x):\n    return y")]), "error", "in cell 7, line 3:"),
    ],
)
def test_what_is_told(text: str, state: str, told: str) -> None:
    found = seen(lab_of(doubled, 1.0 if "while True" in text else 3.0), text)
    assert found.state == state and told in found.seen, found.seen


def test_a_driver_stands_beside_the_code_and_is_not_its_fault() -> None:
    lab = lab_of(doubled, driver="def double(student, x):\n    return student.times(x, 2)\n")
    assert seen(lab, "def times(x, y): return x * y").state == "pass"
    assert seen(lab, "def times(x, y): return x.z").seen.endswith("in line 1: def times(x, y): return x.z")
    assert seen(lab, "").seen == "NameError: nothing defines times: its line is gone, or its cell was not run"


def test_other_files_of_the_student_are_there() -> None:
    lab = lab_of(doubled, needs=("one.py",))
    with Student(lab.code({lab.file: "from one import double", "one.py": "def double(x): return x.z"})) as student:
        found = outcome(lab.checks[0], student)
    assert found.seen.endswith("in one.py, line 1: def double(x): return x.z")


def summed(student: Student) -> str:
    ran = student.on_ranks(3, "add", [[1.0], [2.0], [3.0]])
    counts = [(m.source, m.to, m.numbers, m.nbytes) for m in ran.messages]
    return different(ran.values, [6.0] * 3) or different(
        sorted(counts), [(0, 1, 1, 8), (0, 2, 1, 8), (1, 0, 1, 8), (2, 0, 1, 8)]
    )


RIGHT = """
def add(comm, x):
    if comm.rank:
        comm.send(0, x)
        return comm.recv(0)
    total = x + sum(comm.recv()[1] for _ in range(comm.world_size - 1))
    for to in range(1, comm.world_size):
        comm.send(to, total)
    return total
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("", "", ""),
        ("return comm.recv(0)", "return x", "nobody can go on: rank 0 has sent to rank 1, which does not receive"),
        ("comm.send(0, x)", "pass", "rank 0 waits for a message from any rank; rank 1 waits for a message from rank 0"),
        (
            "comm.send(to, total)",
            "comm.all_reduce(x)",
            "rank 0: AttributeError: comm.all_reduce is not there in this lab",
        ),
        ("comm.send(0, x)", "comm.send(7, x)", "rank 1: ValueError: there is no rank 7: ranks are 0 to 2"),
        ("comm.send(0, x)", "comm.send(comm.rank, x)", "rank 1: ValueError: rank 1 sends to itself"),
        ("comm.send(0, x)", "comm.send(0, [x] * 2)", "rank 0: TypeError"),
        ("return comm.recv(0)", "raise NotImplementedError", "blank"),
    ],
)
def test_ranks_are_switched_and_counted(old: str, new: str, told: str) -> None:
    found = seen(lab_of(summed), RIGHT.replace(old, new))
    assert found.state == ("blank" if told == "blank" else "error" if told else "pass"), found
    assert told in (found.seen or found.state), found.seen


def test_ranks_are_asked_again_after_one_has_failed() -> None:
    lab = lab_of(summed)
    with Student(lab.code({lab.file: RIGHT.replace("comm.send(0, x)", "raise OSError")}), lab.limits) as student:
        for _ in range(2):
            with pytest.raises(NoAnswer, match=r"rank 1: OSError\nin line 4: raise OSError\nrank 0 waits for"):
                student.on_ranks(3, "add", [[1.0]] * 3)


def test_a_buffer_of_another_size_is_told() -> None:
    lab = lab_of(lambda student: str(student.on_ranks(2, "swap", [[], []]).values))
    text = (
        "import numpy as np\ndef swap(comm):\n    other, got = 1 - comm.rank, np.zeros(3)\n"
        "    comm.exchange([(other, np.ones(2))], [(other, got)])\n"
    )
    assert "rank 0 receives float64[2] from rank 1, into a buffer of float64[3]" in seen(lab, text).seen


def test_seeds_can_be_given_again() -> None:
    lab = lab_of(lambda student: str(student.rng.random()))
    code = lab.code({lab.file: ""})
    drawn = []
    for seed in (None, None, 5, 5):
        with Student(code, lab.limits, seed) as student:
            drawn.append((outcome(lab.checks[0], student).seen, student.seed))
    assert drawn[2] == drawn[3] and len({*drawn}) == 3


def test_a_page_tells_the_same_reason_once() -> None:
    lab = lab_of(doubled)
    lab.check("four times as much", hint="and again")(doubled)
    outcomes = [
        Outcome(check, "error", f"rank {k}: OSError\nin line 4: raise OSError") for k, check in enumerate(lab.checks)
    ]
    assert report(lab, outcomes) == (
        "lab 9: double\n  error  twice as much\n         rank 0: OSError\n         in line 4: raise OSError\n"
        "  error  four times as much\n         the same as under: twice as much\n0 of 2 points"
    )


def test_who_waits_for_a_core_is_not_late() -> None:
    """Deadlines go by the clock of the process, which stands while the machine has no core for it."""
    process = Process(Code({"lab9.py": ""}, "lab9.py"), Allowance(seconds=0.02))
    looks = itertools.count()

    def standing() -> float:
        if next(looks) == 8:  # later than on the wall
            process.frames.put(["value", 1])
        return 0.0

    process.clock.now = standing  # type: ignore[method-assign]
    assert process.read() == ["value", 1]
    process.clock.now = lambda: 0.01 * next(looks)  # type: ignore[method-assign]
    with pytest.raises(Ended, match="no answer within"):
        process.read()


@pytest.mark.skipif(Clock().told < 0, reason="this system does not say how long a process has waited for a core")
def test_its_clock_stands_while_another_has_the_core() -> None:
    mine = os.sched_getaffinity(0)
    one = {min(mine)}
    burner = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {one}); exec('while 1: pass')"]
    )
    try:
        os.sched_setaffinity(0, one)
        clock, wall, until = Clock(), monotonic(), monotonic() + 20
        began, before = clock.now(), clock.held_up
        while clock.held_up == before and monotonic() < until:
            clock.now()
        if Path("/proc/self/schedstat").read_text().split()[1] == "0":
            pytest.skip("this system does not count how long a process has waited for a core")
        assert before < clock.held_up and clock.now() - began < monotonic() - wall
    finally:
        os.sched_setaffinity(0, mine)
        burner.kill()
        burner.wait()
