"""The checks of lab 11, and the machine: it holds the memory, so nothing that a kernel asks for goes unseen."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from hetu.teach.labs import Lab, NoAnswer, Student, different

lab = Lab("11", "kernels: threads, shared memory, and races", "lab11_kernels.py")
WARP = 8  # threads; as many numbers are served by one transaction


class Grid:
    """A launch: arrays by name, what threads asked for, and what they did wrong."""

    def __init__(self, block_size: int, **arrays: np.ndarray) -> None:
        self.block_size, self.arrays = block_size, arrays
        self.block, self.interval = -1, 0
        self.waiting: set[int] = set()
        self.running: set[int] = set()
        self.touched: dict[tuple[str, int], set[tuple[str, int, int, int]]] = defaultdict(set)
        self.beyond = self.race = self.divided = ""
        self.transactions: dict[str, int] = defaultdict(int)

    def step(self, block: int, asked: list[Any]) -> dict[int, Any]:
        """What threads of a block ask for at the same time; the answers to those that go on."""
        if block != self.block:
            self.block, self.waiting, self.running = block, set(), set(range(self.block_size))
            self.arrays["shared"] = np.full(self.block_size, np.nan)
            self.interval += 1
        requests = {int(k): tuple(request) for k, request in asked[: self.block_size]}
        self.running = set(requests)
        self.waiting |= {k for k, request in requests.items() if request == ("wait",)}
        self.served_together(requests)
        in_order = sorted(requests.items(), key=lambda pair: pair[1][0] != "read")
        answers = {k: self.touch(k, *request) for k, request in in_order if request != ("wait",)}
        if self.waiting and not answers:
            if len(self.waiting) < self.block_size and not self.divided:
                others = self.block_size - len(self.waiting)
                self.divided = f"{len(self.waiting)} threads of block {block} wait where {others} never come"
            answers, self.waiting = dict.fromkeys(self.waiting), set()
            self.interval += 1
        return answers

    def touch(self, thread: int, kind: str, array: str, index: int, value: float = 0.0) -> float | None:
        """One request; what lies beyond an array is noted, and reads as nothing."""
        if array not in self.arrays or kind not in ("read", "write", "add"):
            raise NoAnswer(f"a thread asks to {kind!r:.20} {array!r:.20}: there are {', '.join(self.arrays)}")
        memory, place = self.arrays[array], int(index)
        if not 0 <= place < len(memory):
            who = f"thread {thread} of block {self.block}"
            self.beyond = self.beyond or f"{who} asks for {array}[{place}] of {len(memory)}"
            return 0.0
        self.note(thread, kind, array, place)
        if kind == "read":
            return float(memory[place])
        memory[place] = float(value) + (memory[place] if kind == "add" else 0.0)
        return None

    def note(self, thread: int, kind: str, array: str, place: int) -> None:
        """Remember who touched a place, and whether another did who was not separated by a wait."""
        key = (f"{array} of block {self.block}" if array == "shared" else array, place)
        for other, block, who, interval in sorted(self.touched[key]):
            apart = (block == self.block and interval != self.interval) or (block, who) == (self.block, thread)
            if not apart and (kind, other) not in (("read", "read"), ("add", "add")):
                pair = f"thread {who} of block {block} ({other}) and thread {thread} of block {self.block} ({kind})"
                self.race = self.race or f"{array}[{place}]: {pair}, with no wait between them"
        self.touched[key].add((kind, self.block, thread, self.interval))

    def not_shared(self) -> str:
        """Whether a block's sums reached one thread through shared memory, and that one alone adds to `out`."""
        adders = [(block, who) for kind, block, who, _ in self.touched["out", 0] if kind != "read"]
        if len(set(adders)) > len({block for block, _ in adders}):
            return "several threads of a block add to out, wanted one"
        told: set[tuple[int, int]] = set()  # who has written what another has read
        for (array, _), notes in self.touched.items():
            readers = {(block, who) for kind, block, who, _ in notes if kind == "read"}
            writers = {(block, who) for kind, block, who, _ in notes if kind != "read"}
            told |= {writer for writer in writers if array.startswith("shared") and readers - {writer}}
        if len(told) < (self.block_size - 1) * len({block for block, _ in adders}):
            return "threads have put no sum into shared memory, or no other thread has read it there"
        return ""

    def served_together(self, requests: dict[int, Any]) -> None:
        """Count transactions: the threads of a warp that read from the same stretch of an array share one."""
        stretches = {
            (k // WARP, r[1], int(r[2]) // WARP) for k, r in requests.items() if r[0] == "read" and r[1] != "shared"
        }
        for _, array, _ in stretches:
            self.transactions[array] += 1


def launched(
    student: Student, kernel: str, blocks: int, block_size: int, args: list[Any], **arrays: np.ndarray
) -> tuple[np.ndarray, Grid]:
    """What is in `out` after a launch, and all that was seen."""
    grid = Grid(block_size, **{name: np.array(array, float) for name, array in arrays.items()})
    student.serves = {"step": grid.step}
    student.launch(kernel, blocks, block_size, args)
    return grid.arrays["out"], grid


@lab.check("how many blocks", hint="Round up: the last block may have threads without a number.")
def count(student: Student) -> str:
    found = different([student.blocks_for(n, 16) for n in (16, 17, 31)], [1, 2, 2])
    ### BEGIN HIDDEN TESTS
    for _ in range(3):
        n, size = int(student.rng.integers(1, 5000)), int(2 ** student.rng.integers(3, 10))
        found = found or different(student.blocks_for(n, size), int(np.ceil(n / size)), f"{n} by {size}: ")
    ### END HIDDEN TESTS
    return found


def saxpy(student: Student, x: np.ndarray, y: np.ndarray, a: float, blocks: int) -> tuple[np.ndarray, Grid]:
    return launched(student, "saxpy", blocks, 8, [len(x), a], x=x, y=y, out=np.zeros(len(x)))


@lab.check("every number has its thread", hint="Threads are counted from 0 in each block: where does a block begin?")
def indices(student: Student) -> str:
    x = np.arange(16.0)
    found = different(saxpy(student, x, x * 0 + 1, 2.0, 2)[0], 2 * x + 1)
    ### BEGIN HIDDEN TESTS
    x, y = student.rng.normal(size=(2, 32))
    found = found or different(saxpy(student, x, y, 3.0, 4)[0], 3 * x + y)
    ### END HIDDEN TESTS
    return found


@lab.check("threads beyond the end do nothing", hint="The last block has more threads than numbers: compare i.")
def guarded(student: Student) -> str:
    x = np.arange(11.0)
    out, grid = saxpy(student, x, x, 1.0, 2)
    found = grid.beyond or different(out, 2 * x)
    ### BEGIN HIDDEN TESTS
    x, y = student.rng.normal(size=(2, int(student.rng.integers(17, 24))))
    out, grid = saxpy(student, x, y, 2.0, 3)
    found = found or grid.beyond or different(out, 2 * x + y)
    ### END HIDDEN TESTS
    return found


def total(student: Student, x: np.ndarray, blocks: int, size: int) -> tuple[str, Grid]:
    out, grid = launched(student, "total", blocks, size, [len(x), blocks], x=x, out=np.zeros(1))
    return different(out, [x.sum()], f"{blocks} blocks of {size} threads: ") or grid.not_shared(), grid


@lab.check(
    "the sum, by one block",
    hint="Each thread writes its own sum to its own place in shared memory; in the end the whole is at 0.",
    points=2,
)
def one_block(student: Student) -> str:
    found, grid = total(student, np.arange(1.0, 9.0), 1, 8)
    found = found or grid.beyond or total(student, np.arange(21.0), 1, 8)[0]
    ### BEGIN HIDDEN TESTS
    for size in (4, 16):
        found = found or total(student, student.rng.normal(size=int(student.rng.integers(5, 60))), 1, size)[0]
    ### END HIDDEN TESTS
    return found


@lab.check(
    "the sum, by several blocks",
    hint="With b blocks a thread's next number is b block sizes further on; only one thread of a block adds to out.",
    points=2,
)
def several_blocks(student: Student) -> str:
    found = total(student, np.arange(40.0), 3, 8)[0]
    ### BEGIN HIDDEN TESTS
    for blocks in (2, 4):
        found = found or total(student, student.rng.normal(size=int(student.rng.integers(5, 90))), blocks, 8)[0]
    ### END HIDDEN TESTS
    return found


@lab.check(
    "no thread reads what another may not have written yet",
    hint="Between a write to shared memory and another thread's read there has to be a wait, in every round. Blocks "
    "cannot wait for each other: they add.",
    points=2,
)
def races(student: Student) -> str:
    found, grid = total(student, np.arange(40.0), 2, 8)
    found = grid.race or found
    ### BEGIN HIDDEN TESTS
    for blocks in (1, 3):
        seen, grid = total(student, student.rng.normal(size=50), blocks, 16)
        found = found or grid.race or seen
    ### END HIDDEN TESTS
    return found


@lab.check(
    "all threads of a block come to each wait",
    hint="A wait inside of `if t.thread < half` is reached by some threads only; a real block would hang.",
)
def waits(student: Student) -> str:
    found, grid = total(student, np.arange(40.0), 2, 8)
    found = grid.divided or found
    ### BEGIN HIDDEN TESTS
    seen, grid = total(student, student.rng.normal(size=int(student.rng.integers(20, 50))), 2, 16)
    found = found or grid.divided or seen
    ### END HIDDEN TESTS
    return found


@lab.check(
    "neighboring threads read neighboring numbers",
    hint="If each thread walks through a stretch of its own, the 8 threads of a warp ask for 8 stretches at a time.",
)
def together(student: Student) -> str:
    x = np.arange(96.0)
    ### BEGIN HIDDEN TESTS
    x = student.rng.normal(size=96)
    ### END HIDDEN TESTS
    found, grid = total(student, x, 2, 16)
    made = grid.transactions["x"]
    few = len(x) // WARP
    return found or (f"{made} transactions for {len(x)} numbers, wanted {few}" if made > few else "")


@lab.check("counts do not disturb each other", hint="Two threads that read, add 1 and write may lose one: add instead.")
def counts(student: Student) -> str:
    x = np.array([0, 2, 2, 1, 2, 0, 2, 2, 1, 2, 2])
    ### BEGIN HIDDEN TESTS
    x = student.rng.integers(0, 5, 30)
    ### END HIDDEN TESTS
    out, grid = launched(student, "histogram", -(-len(x) // 8), 8, [len(x)], x=x, out=np.zeros(5))
    return grid.race or grid.beyond or different(out, np.bincount(x, minlength=5))
