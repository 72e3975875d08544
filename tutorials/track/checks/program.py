"""The checks of lab 3. A plan is looked at as numbers: who is alive with whom, and who lies where."""

from __future__ import annotations

from typing import Any

import numpy as np

from hetu.teach.labs import Lab, Student, different, first

lab = Lab("3", "a program with a memory plan", "program.py", needs=("values.py",))
Row = list[Any]
Block = tuple[int, int, int]


def placeholder(*size: int) -> Row:
    return ["placeholder", [], {"size": list(size)}]


def view(i: int, *size: int) -> Row:
    return ["reshape", [i], {"size": list(size)}]


def e(i: int) -> Row:
    return ["exp", [i], {}]


CHAIN: list[Row] = [placeholder(6), e(0), e(1), e(2), e(3)]
VIEWS: list[Row] = [placeholder(6), e(0), view(1, 2, 3), view(2, 3, 2), e(2), e(3), ["add", [4, 4], {}]]


@lab.check("a reshape lies in the memory of its input", hint="A reshape of a reshape: go on until it is none.")
def storage(student: Student) -> str:
    seen = different(student.storage(VIEWS), [0, 1, 1, 1, 4, 5, 6])
    ### BEGIN HIDDEN TESTS
    depth = int(student.rng.integers(3, 9))
    rows = [placeholder(6), e(0), *(view(k + 1, 6) for k in range(depth))]
    seen = seen or different(student.storage(rows), [0, 1, *[1] * depth])
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a value is alive until its last reader, and what nobody reads for its own call",
    hint="Begin with [k, k] at the call that makes it; each reader moves the end.",
)
def lifetimes(student: Student) -> str:
    rows = [*CHAIN, ["add", [4, 1], {}]]
    seen = different(student.alive(rows, [5]), [[1, 1, 5], [2, 2, 3], [3, 3, 4], [4, 4, 5], [5, 5, 6]])
    seen = seen or different(student.alive(CHAIN, [3]), [[1, 1, 2], [2, 2, 3], [3, 3, 5], [4, 4, 4]], "row 4 unread: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        rows = drawn(student.rng, views=False)
        seen = seen or different(student.alive(rows, [len(rows) - 1]), spans(rows, [len(rows) - 1]))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "reading a view is reading what it views",
    hint="The end that moves is that of storage_of(x), not of x: a view has no memory of its own.",
    points=2,
)
def views(student: Student) -> str:
    seen = different(student.alive(VIEWS, [6]), [[1, 1, 5], [4, 4, 6], [5, 5, 5], [6, 6, 7]])
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        rows = drawn(student.rng)
        seen = seen or different(student.alive(rows, [len(rows) - 1]), spans(rows, [len(rows) - 1]))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "outputs live until after the last call, also where they are views; placeholders are not in the arena",
    hint="The result is read when all calls are done: at len(order). What an output views must live as long.",
)
def outputs(student: Student) -> str:
    seen = different(student.alive(VIEWS, [3, 0, 4]), [[1, 1, 7], [4, 4, 7], [5, 5, 5], [6, 6, 6]])
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        rows = drawn(student.rng)
        asked = [int(i) for i in student.rng.permutation(len(rows))[:3]]
        seen = seen or different(student.alive(rows, asked), spans(rows, asked), f"outputs {sorted(asked)}: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "no two that are alive together overlap",
    hint="Spans include both ends, since a call must not write where it still reads: [0, 1] and [1, 2] meet. Go "
    "through the placed blocks in the order of their offsets, and never move back down.",
    points=2,
)
def apart(student: Student) -> str:
    blocks: list[Block] = [(64, 0, 1), (64, 1, 2), (64, 2, 3)]
    offsets, arena = student.plan(blocks)
    seen = collision(blocks, offsets, arena)
    ### BEGIN HIDDEN TESTS
    for count in (3, 8, 20, 40):
        for _ in range(4):
            blocks = some_blocks(student.rng, count)
            seen = seen or collision(blocks, *student.plan(blocks))
    ### END HIDDEN TESTS
    return seen


@lab.check("offsets are multiples of 64", hint="Round the end of the block below up to the next multiple of ALIGNMENT.")
def aligned(student: Student) -> str:
    blocks: list[Block] = [(100, 0, 1), (50, 0, 1), (10, 0, 1)]
    offsets, arena = student.plan(blocks)
    seen = different(offsets, [0, 128, 192]) or different(arena, 202, "arena: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        blocks = [(int(student.rng.integers(1, 300)), 0, 1) for _ in range(5)]
        odd = [offset for offset in student.plan(blocks)[0] if offset % 64]
        seen = seen or (f"an offset is {odd[0]}" if odd else "") or collision(blocks, *student.plan(blocks))
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "the arena is as small as greedy by size makes it",
    hint="The largest block is placed first, and each goes to the lowest offset where it fits: also into a gap.",
    points=2,
)
def small(student: Student) -> str:
    blocks: list[Block] = [(64, 0, 1), (128, 1, 2), (256, 2, 3)]
    seen = different(student.plan(blocks)[1], 384, "arena: ")
    ### BEGIN HIDDEN TESTS
    for count in (6, 12, 25):
        for _ in range(4):
            blocks = some_blocks(student.rng, count)
            offsets, arena = student.plan(blocks)
            seen = seen or collision(blocks, offsets, arena) or different(arena, greedy(blocks), f"{blocks}: arena: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a program computes what the graph means",
    hint="The list of calls holds the arrays themselves: each result's place in the arena, each view of it.",
    points=2,
)
def meaning(student: Student) -> str:
    x = np.array([0.0, 1.0])
    rows = [placeholder(2), e(0), view(1, 1, 2), ["multiply", [2, 0], {}]]
    seen = different(student.runs(rows, [3], [{0: x}])[0][0], [[0, np.e]])
    ### BEGIN HIDDEN TESTS
    for _ in range(6):
        rows = drawn(student.rng)
        x, asked = student.rng.random(6), [len(rows) - 1, len(rows) // 2]
        for got, wanted in zip(student.runs(rows, asked, [{0: x}])[0], computed(rows, asked, x)):
            seen = seen or different(got, wanted)
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "the next run reads what it is fed",
    hint="The calls read the arrays that they were made with: write into those, do not put others in their place.",
)
def fed_again(student: Student) -> str:
    rows = [placeholder(2), placeholder(2), ["add", [0, 1], {}]]
    one, two = np.array([1.0, 2.0]), np.array([10.0, 20.0])
    got = student.runs(rows, [2], [{0: one, 1: one}, {0: two}])
    seen = different(got[1][0], [11, 22], "row 1 keeps its value: ")
    ### BEGIN HIDDEN TESTS
    rows, xs = drawn(student.rng), student.rng.random((3, 6))
    got = student.runs(rows, [len(rows) - 1], [{0: x} for x in xs])
    last = len(rows) - 1
    seen = seen or first(different(g[0], computed(rows, [last], x)[0], "a run: ") for g, x in zip(got, xs))
    ### END HIDDEN TESTS
    return seen


@lab.check("results belong to the caller", hint="The arena is written again in the next run. Give away copies.")
def owned(student: Student) -> str:
    x = 1.0
    ### BEGIN HIDDEN TESTS
    x = float(student.rng.integers(1, 9))
    ### END HIDDEN TESTS
    rows = [placeholder(1), ["add", [0, 0], {}], view(1)]
    got = student.runs(rows, [1, 2], [{0: np.array([x])}, {0: np.array([-5.0])}])
    return different([float(np.ravel(y)[0]) for y in got[0]], [2 * x, 2 * x], "the first run, after the second: ")


@lab.check(
    "the arena of a program holds float32, and no more than the plan says",
    hint="A block has as many bytes as its numbers in the program's dtype; views and placeholders have no block.",
)
def bytes_used(student: Student) -> str:
    seen = different(student.arena([placeholder(32), *(e(k) for k in range(9))], [9]), 256)
    ### BEGIN HIDDEN TESTS
    size, count = int(student.rng.integers(17, 99)) * 16, int(student.rng.integers(5, 12))
    rows = [placeholder(size), *(e(k) for k in range(count)), view(count, 16, size // 16)]
    blocks = [(size * 4, k, k + 1) for k in range(count)]
    seen = seen or different(student.arena(rows, [count + 1]), greedy(blocks), f"{count} results of {size} numbers: ")
    ### END HIDDEN TESTS
    return seen


def collision(blocks: list[Block], offsets: Any, arena: Any) -> str:
    """The first two blocks that are alive together and overlap, or one that is outside of the arena."""
    if len(offsets) != len(blocks):
        return f"{len(offsets)} offsets for {len(blocks)} blocks"
    for i, (n, first_i, last_i) in enumerate(blocks):
        if offsets[i] < 0 or offsets[i] + n > arena:
            return f"block {i} lies at {offsets[i]} to {offsets[i] + n}, outside of an arena of {arena}"
        for j, (m, first_j, last_j) in enumerate(blocks[:i]):
            together = first_i <= last_j and first_j <= last_i
            if together and offsets[i] < offsets[j] + m and offsets[j] < offsets[i] + n:
                return f"blocks {j} and {i} of {blocks if len(blocks) < 5 else len(blocks)} overlap: {list(offsets)}"
    return ""


### BEGIN HIDDEN TESTS
def drawn(rng: np.random.Generator, views: bool = True) -> list[Row]:
    """A random graph of six numbers in each value; multiplications by 1/2 keep them small."""
    rows: list[Row] = [placeholder(6), ["constant", [], {"value": 0.5}], e(0)]
    whole = [0, 2]
    for _ in range(10):
        i, j = (int(rng.choice(whole[-5:])) for _ in range(2))
        kind = rng.integers(3 if views else 2)
        if kind == 2:
            rows += [view(i, 2, 3), view(len(rows), 3, 2), view(len(rows) + 1, 6)]
        elif kind == 1:
            rows += [["add", [i, j], {}], ["multiply", [len(rows), 1], {}]]
        else:
            rows.append(["multiply", [i, j], {}])
        whole.append(len(rows) - 1)
    return rows


def spans(rows: list[Row], asked: list[int]) -> list[list[int]]:
    """By the definition: of each row with memory, all calls that read it or a view of it."""

    def root(i: int) -> int:
        return root(rows[i][1][0]) if rows[i][0] == "reshape" else i

    found = []
    for i, row in enumerate(rows):
        if row[0] not in ("placeholder", "reshape"):
            readers = [k for k, other in enumerate(rows) if i in [root(x) for x in other[1]]]
            ends = [len(rows)] if i in [root(k) for k in asked] else []
            found.append([i, i, max([i, *readers, *ends])])
    return found


def computed(rows: list[Row], asked: list[int], x: np.ndarray) -> list[np.ndarray]:
    known: list[Any] = []
    for kind, inputs, attrs in rows:
        read = [known[i] for i in inputs]
        if kind in ("placeholder", "constant"):
            known.append(x if kind == "placeholder" else attrs["value"])
        elif kind == "reshape":
            known.append(read[0].reshape(attrs["size"]))
        else:
            known.append(
                np.exp(read[0]) if kind == "exp" else read[0] + read[1] if kind == "add" else read[0] * read[1]
            )
    return [known[i] for i in asked]


def some_blocks(rng: np.random.Generator, count: int) -> list[Block]:
    found = []
    for _ in range(count):
        start, length = int(rng.integers(0, 12)), int(rng.integers(0, 6))
        found.append((int(rng.choice([64, 100, 192, 320, 512, 1000])), start, start + length))
    return found


def greedy(blocks: list[Block]) -> int:
    """Largest first, each at the lowest multiple of 64 at which it meets nobody, tried one after the other."""
    places: dict[int, int] = {}
    for i in sorted(range(len(blocks)), key=lambda i: (-blocks[i][0], i)):
        n, start, end = blocks[i]
        near = [j for j in places if blocks[j][1] <= end and start <= blocks[j][2]]
        at = 0
        while any(at < places[j] + blocks[j][0] and places[j] < at + n for j in near):
            at += 64
        places[i] = at
    return max(at + blocks[i][0] for i, at in places.items())


### END HIDDEN TESTS
