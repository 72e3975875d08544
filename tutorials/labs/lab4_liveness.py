"""Lab 4: when is a value dead, and how much memory does a program need? After tutorial 4.

A program is a list of instructions, in the order they run. An instruction makes one value from values made before it.
`results` are the names of the values that are returned at the end.

A value is *live* from the instruction that makes it to the last one that reads it, both included: while an instruction
runs, what it reads and what it makes must lie in memory together. A result is live to the end. A value that nobody
reads still needs memory while it is made.

Check yourself with `hetu lab check 4`.
"""

from typing import NamedTuple


class Instruction(NamedTuple):
    name: str  # of the value it makes
    nbytes: int
    reads: tuple[str, ...] = ()


def last_use(program, results):
    """A dict: for each value, the index of the last instruction during which it is live."""
    ### BEGIN SOLUTION
    last = {}
    for index, instruction in enumerate(program):
        last[instruction.name] = index
        for name in instruction.reads:
            last[name] = index
    return last | dict.fromkeys(results, len(program) - 1)
    ### END SOLUTION


def peak_bytes(program, results):
    """The most bytes that are live during any one instruction; 0 for an empty program."""
    ### BEGIN SOLUTION
    last = last_use(program, results)
    live = peak = 0
    for index, instruction in enumerate(program):
        live += instruction.nbytes
        peak = max(peak, live)
        live -= sum(i.nbytes for i in program[: index + 1] if last[i.name] == index)
    return peak
    ### END SOLUTION


def peak_in_place(program, results):
    """As `peak_bytes`, if an instruction may overwrite a value it reads: one of equal size, for the last time.

    Its result then takes no new memory. At most one value can be overwritten by each instruction.
    """
    ### BEGIN SOLUTION
    last = last_use(program, results)
    sizes = {i.name: i.nbytes for i in program}
    live = peak = 0
    for index, instruction in enumerate(program):
        dying = {name for name in instruction.reads if last[name] == index}
        overwritten = next((name for name in dying if sizes[name] == instruction.nbytes), None)
        if overwritten is None:
            live += instruction.nbytes
        peak = max(peak, live)
        live -= sum(sizes[name] for name in dying - {overwritten})
        if last[instruction.name] == index and instruction.name not in results:
            live -= instruction.nbytes
    return peak
    ### END SOLUTION
