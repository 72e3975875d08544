"""Processes that are killed at a point of their own choice, counted in changes of files: nothing is left to luck.

`python -m tests.killed FOLDER WAY`: processes save, one of them is killed at its first point, then at its second, ...,
until it has no more; what is loaded each time is whole, and of the last save or the one before. It prints how many
points there were, and after how many of them the new save was the one that was found.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import hetu as ht
from hetu import checkpoint

CHANGES = "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"  # audited before each is done
SIZE = 6000
RANKS = 3


def die_at(point: int, folder: Path) -> None:
    """Have this process killed before its `point`-th change below a folder; at 0 in the middle of a large write."""
    if point == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, SIZE))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores
    left, below = [point], f"{folder}{os.sep}"

    def count(event: str, args: tuple[object, ...]) -> None:
        if event in CHANGES and str(args[0]).startswith(below):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def values(step: int) -> np.ndarray:
    return np.full(SIZE, step, "float32")


def executor(step: int) -> ht.Executor:
    return ht.Executor([ht.variable("w", values(step))])


def plainly(folder: Path, step: int) -> list[Callable[[], object]]:
    """`Executor.save`."""
    return [lambda: executor(step).save(folder / "run", {"step": step})]


def in_a_folder(folder: Path, step: int) -> list[Callable[[], object]]:
    """The same where ranks have saved, as of one rank."""
    return [lambda: ((folder / "run").mkdir(exist_ok=True), *(act() for act in plainly(folder, step)))]


def meanwhile(folder: Path, step: int) -> list[Callable[[], object]]:
    """`Checkpoints`, by a thread."""

    def act() -> None:
        checkpoints = ht.Checkpoints(executor(step), folder / "run", keep=2)
        checkpoints.save({"step": step})
        checkpoints.wait()

    return [act]


def meanwhile_in_folders(folder: Path, step: int) -> list[Callable[[], object]]:
    """The same, each a folder as of ranks."""

    def act() -> None:
        checkpoints = ht.Checkpoints(executor(step), folder / "run", keep=2)
        (folder / "run" / str(checkpoints.number + 1)).mkdir()
        checkpoints.save({"step": step})
        checkpoints.wait()

    return [act]


def in_parts(folder: Path, step: int) -> list[Callable[[], object]]:
    """What the threads of ranks do, once the ranks know the number of the save and the sizes of all parts."""
    number, third = checkpoint.begin(folder / "run"), SIZE // RANKS
    boxes = [((third * rank, third * rank + third),) for rank in range(RANKS)]
    parts = [{"w": values(step)[low:high]} for ((low, high),) in boxes]
    sizes = [checkpoint.part_size(number, part) for part in parts]
    table = {"w": {"shape": [SIZE], "dtype": "float32", "pieces": [*enumerate(boxes)]}}
    last = checkpoint.manifest(number, sizes, table, {"step": step})
    return [
        lambda rank=rank, part=part: checkpoint.write_one(
            folder / "run", number, sizes, rank, None if rank else last, part
        )
        for rank, part in enumerate(parts)
    ]


WAYS = {way.__name__: way for way in (plainly, in_a_folder, meanwhile, meanwhile_in_folders, in_parts)}


def forked(act: Callable[[], object]) -> int:
    """A child that does it and ends; its number."""
    if child := os.fork():
        return child
    code = 1
    try:
        act()
        code = 0
    finally:
        os._exit(code)


def saved(folder: Path, way: str, step: int, victim: int = 0, point: int | None = None) -> bool:
    """Have processes save; whether the victim ended before it came to its point."""
    children = []
    for number, act in enumerate(WAYS[way](folder, step)):
        if number == victim and point is not None:
            children.append(forked(lambda act=act: (die_at(point, folder), act())))
        else:
            children.append(forked(act))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert all(code in (0, -signal.SIGKILL, -signal.SIGXFSZ) for code in codes), codes
    return not any(codes)


def found(folder: Path) -> int:
    """The step of what is loaded, of which all numbers must be, as those of all that is kept."""
    ex, there = executor(-1), checkpoint.generations(folder / "run")
    for path in (*(folder / "run" / str(number) for number in there), folder / "run"):
        step = ex.load(path)["step"]
        assert (ex.state["w"] == step).all(), "two steps are mixed"
    return int(step)


def files(folder: Path) -> int:
    return len([*folder.rglob("*")])


def main(folder: Path, way: str) -> None:
    saved(folder, way, 1)
    saved(folder, way, 2)
    step, usual, victims = 2, files(folder), len(WAYS[way](folder, 0))
    for victim in range(victims):
        point, new, ended = 0, 0, False
        while not ended:
            before, step = found(folder), step + 1
            ended = saved(folder, way, step, victim, point)
            now = found(folder)
            assert now == step or (now == before and not ended), (point, before, now, step)
            new, point = new + (now == step), point + 1
        assert saved(folder, way, step + 1) and files(folder) == usual, sorted(folder.rglob("*"))
        step += 1
        print(f"victim {victim}: {point - 1} points, the new save was there after {new - 1}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
