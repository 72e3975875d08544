"""The checks of lab 4. A program is a list of rows (name, bytes, names it reads)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetu.teach.labs import Lab, Student, different

lab = Lab("4", "liveness: the memory a program needs", "lab4_liveness.py")
Row = tuple[str, int, list[str]]
CHAIN: list[Row] = [("a", 10, []), ("b", 20, ["a"]), ("c", 5, ["b"]), ("d", 1, ["c"])]
SKIP: list[Row] = [("a", 10, []), ("b", 20, ["a"]), ("c", 5, ["b"]), ("d", 1, ["c", "a"])]


@lab.check("a value lives until its last reader", hint="Walk the program; a later reader replaces an earlier one.")
def chain(student: Student) -> str:
    seen = different(student.last_use(SKIP, ["d"]), {"a": 3, "b": 2, "c": 3, "d": 3})
    ### BEGIN HIDDEN TESTS
    for program, _ in drawn(student.rng, several=True):
        asked = [program[-1][0]]
        seen = seen or different(read(student.last_use(program, asked), program), read(lives(program, asked), program))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "results live to the end", hint="The index of the last instruction, even if another reads the result before."
)
def results(student: Student) -> str:
    seen = different(student.last_use(CHAIN, ["b", "d"]), {"a": 1, "b": 3, "c": 3, "d": 3})
    ### BEGIN HIDDEN TESTS
    for program, asked in drawn(student.rng):
        got, wanted = student.last_use(program, asked), lives(program, asked)
        seen = seen or different(read(got, program, asked), read(wanted, program, asked))
    ### END HIDDEN TESTS
    return seen


@lab.check("a value nobody reads dies where it is made", hint="Begin with the instruction that makes the value.")
def unread(student: Student) -> str:
    seen = different(student.last_use([("a", 10, []), ("b", 20, [])], ["b"]), {"a": 0, "b": 1})
    ### BEGIN HIDDEN TESTS
    for program, asked in drawn(student.rng, unread=True):
        seen = seen or different(student.last_use(program, asked), lives(program, asked))
    ### END HIDDEN TESTS
    return seen


@lab.check("the peak of a chain", hint="While b is made from a, both are there. Which pair of neighbors is largest?")
def peak(student: Student) -> str:
    seen = different(student.peak_bytes(CHAIN, ["d"]), 30)
    ### BEGIN HIDDEN TESTS
    for _ in range(5):
        sizes = [int(n) for n in student.rng.integers(1, 1000, 9)]
        program: list[Row] = [(f"v{k}", n, [f"v{k - 1}"] if k else []) for k, n in enumerate(sizes)]
        seen = seen or different(student.peak_bytes(program, ["v8"]), held(program, ["v8"]))
    ### END HIDDEN TESTS
    return seen


@lab.check("the peak with a long-lived value", hint="a is read by d, so it is live while b and c are made.", points=2)
def skip(student: Student) -> str:
    seen = different(student.peak_bytes(SKIP, ["d"]), 35) or different(student.peak_bytes([], []), 0, "nothing: ")
    ### BEGIN HIDDEN TESTS
    for program, asked in drawn(student.rng, unread=True):
        seen = seen or different(student.peak_bytes(program, asked), held(program, asked))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a training step: what the forward pass made is read again, in the opposite order",
    hint="If the small examples pass and this does not, look at values that are read several times.",
)
def training_step(student: Student) -> str:
    program, asked = step([8] * 4)
    seen = different(student.peak_bytes(program, asked), 48)
    ### BEGIN HIDDEN TESTS
    for _ in range(3):
        program, asked = step([int(n) for n in student.rng.integers(1, 99, 12)])
        seen = seen or different(student.peak_bytes(program, asked), held(program, asked))
    ### END HIDDEN TESTS
    return seen


def step(sizes: list[int]) -> tuple[list[Row], list[str]]:
    """A chain, and the gradients of its values from the last to the first."""
    program: list[Row] = [(f"h{k}", n, [f"h{k - 1}"] if k else []) for k, n in enumerate(sizes)]
    program.append(("loss", 8, [f"h{len(sizes) - 1}"]))
    for k, n in reversed(list(enumerate(sizes))):
        program.append((f"g{k}", n, [f"h{k}", f"g{k + 1}" if k + 1 < len(sizes) else "loss"]))
    return program, ["loss", "g0"]


@lab.check(
    "an operand may be overwritten when it dies",
    hint="b, c and d can all lie in one place. An instruction that overwrites adds nothing to what was live before it.",
)
def in_place(student: Student) -> str:
    rows: list[Row] = [("a", 8, []), ("b", 8, ["a"]), ("c", 8, ["b"]), ("d", 8, ["c"])]
    seen = different(student.peak_in_place(rows, ["d"]), 8)
    ### BEGIN HIDDEN TESTS
    for _ in range(5):
        sizes = sorted(int(n) for n in student.rng.integers(1, 5, 9))
        program: list[Row] = [(f"v{k}", n, [f"v{k - 1}"] if k else []) for k, n in enumerate(sizes)]
        seen = seen or different(student.peak_in_place(program, ["v8"]), held_in_place(program, ["v8"]))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "but not one that is read later, or of another size",
    hint="Compare the last use of the operand with the index of this instruction, and the two sizes.",
    points=2,
)
def not_in_place(student: Student) -> str:
    later: list[Row] = [("a", 8, []), ("b", 8, ["a"]), ("c", 8, ["b", "a"])]
    smaller: list[Row] = [("a", 8, []), ("b", 4, ["a"])]
    both: list[Row] = [("a", 8, []), ("b", 8, []), ("c", 8, ["a", "b"])]
    got = [student.peak_in_place(p, [p[-1][0]]) for p in (later, smaller, both)]
    seen = different(got, [16, 12, 16])
    ### BEGIN HIDDEN TESTS
    for program, asked in drawn(student.rng, sizes=(4, 8)):
        seen = seen or different(student.peak_in_place(program, asked), held_in_place(program, asked))
    ### END HIDDEN TESTS
    return seen


### BEGIN HIDDEN TESTS
def drawn(
    rng: np.random.Generator, several: bool = False, unread: bool = False, sizes: tuple[int, ...] = ()
) -> list[tuple[list[Row], list[str]]]:
    """Programs whose instructions read random values made before; `unread`: some are read by nobody."""
    return [program(rng, several, unread, sizes) for _ in range(6)]


def program(
    rng: np.random.Generator, several: bool, unread: bool, sizes: tuple[int, ...]
) -> tuple[list[Row], list[str]]:
    names = [f"v{k}" for k in rng.permutation(99)[:12]]
    rows: list[Row] = []
    for k, name in enumerate(names):
        count = 0 if unread and rng.random() < 0.4 else int(rng.integers(2 if several else 1, 4))
        reads = [names[i] for i in sorted(rng.permutation(k)[:count])] if k else []
        rows.append((name, int(rng.choice(sizes) if sizes else rng.integers(1, 1000)), reads))
    asked = [names[i] for i in sorted({int(rng.integers(len(names))), len(names) - 1})]
    return rows, asked


def lives(program: list[Row], asked: list[str]) -> dict[str, int]:
    """By the definition: the last instruction that makes or reads a value, or the last of all."""
    return {
        name: len(program) - 1
        if name in asked
        else max(k for k, (made, _, reads) in enumerate(program) if name == made or name in reads)
        for name, _, _ in program
    }


def read(found: object, program: list[Row], asked: Sequence[str] = ()) -> dict[str, object]:
    """Of values that somebody reads, or that are asked for."""
    used = {name for _, _, reads in program for name in reads} | {*asked}
    return {k: v for k, v in found.items() if k in used} if isinstance(found, dict) else {"": found}


def held(program: list[Row], asked: list[str]) -> int:
    """The peak by the definition, instruction by instruction."""
    last = lives(program, asked)
    return max(sum(n for k, (name, n, _) in enumerate(program) if k <= at <= last[name]) for at in range(len(program)))


def held_in_place(program: list[Row], asked: list[str]) -> int:
    """As `held`, with the place of an operand that dies taken over by a result of its size."""
    last, sizes, peak = lives(program, asked), {name: n for name, n, _ in program}, 0
    for at, (_, n, reads) in enumerate(program):
        over = [r for r in reads if last[r] == at and sizes[r] == n]
        live = sum(m for k, (other, m, _) in enumerate(program) if k <= at <= last[other])
        peak = max(peak, live - (n if over else 0))
    return peak


### END HIDDEN TESTS
