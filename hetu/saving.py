"""What an executor saves and loads: at once, or while training goes on.

A save is begun by all processes together, which then know what each has to write; the writing asks nobody. So it can
wait for a thread, once the values have been copied: `Checkpoints`. Left out: a copy made step by step, which would
need less memory than the values again; and threads for what servers keep, which they write themselves (`heturun
--snapshots`), so a save of those ends before training goes on.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from . import checkpoint
from .checkpoint import Checkpoint, as_json, exists, generations, make_folder, remove, whole, write_atomically
from .core.backend import to_numpy
from .core.errors import ArgumentError, CheckpointError, UnknownNameError, did_you_mean, public, user_site
from .core.executor import Executor
from .core.graph import Node
from .core.state import FILES, FilePath, State
from .core.types import Box, show_shape
from .job import endings
from .ranges import AtLeast1

under_way = WeakSet[Future[None]]()  # what threads of this process write
rewinds: ContextVar[Callable[[Mapping[str, Any]], bool]] = ContextVar("rewinds", default=lambda extra: False)


class WentBack(Exception):
    """All values are those of an earlier save again, as ranks have taken later ones with them; its `extra`."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        super().__init__(extra)
        self.extra = extra


@contextmanager
def rewinding(knows: Callable[[Mapping[str, Any]], bool]) -> Iterator[None]:
    """Inside, whoever makes the steps goes back to where a save was made whose `extra` it `knows`: at a `WentBack`."""
    before = rewinds.set(knows)
    try:
        yield
    finally:
        rewinds.reset(before)


class Wanted(NamedTuple):
    """A variable that is read from a checkpoint: its whole shape and dtype, and the box to read here, if any."""

    shape: tuple[int, ...]
    dtype: str
    box: Box | None


def fitting(
    saved: Checkpoint, wanted: Mapping[str, Wanted], only: Any = None, strict: bool = True
) -> dict[str, Wanted]:
    """What is to be read. CheckpointError with a table of missing, unexpected and mis-shaped entries."""
    chosen = dict(wanted) if only is None else {name: wanted[name] for name in among(wanted, only)}
    rows = [f"  missing     {name}" for name in chosen if strict and name not in saved.variables]
    if only is None and strict:
        rows += [f"  unexpected  {name}" for name in saved.variables if name not in chosen]
    there = {name: w for name, w in chosen.items() if name in saved.variables}
    for name, (shape, dtype, _) in there.items():
        entry = saved.variables[name]
        if (tuple(entry["shape"]), entry["dtype"]) != (shape, dtype):
            here, kept = f"{dtype}{show_shape(shape)}", f"{entry['dtype']}{show_shape(tuple(entry['shape']))}"
            rows.append(f"  different   {name}: the file has {kept}, the model {here}")
    if rows:
        shown = rows[:8] + ([f"  ... and {len(rows) - 8} more"] if len(rows) > 8 else [])
        raise CheckpointError(
            "\n".join([f"{str(saved.path)!r} belongs to another model; nothing was loaded", *shown]),
            fix=saved.fix
            if there.keys() != chosen.keys() or only is not None
            else "take the weights alone: ht.load_weights(executor, path)",
        )
    return there


def among(names: Collection[str], only: Any) -> list[str]:
    """The names that `only` says: patterns, variables, and what has variables, as layers do; one or a list of them.

    >>> among(["encoder/weight", "encoder/bias", "head/weight"], ["encoder/*"])
    ['encoder/weight', 'encoder/bias']
    """
    one = isinstance(only, str | Node) or hasattr(only, "variables")
    if not (one or isinstance(only, Iterable)):
        raise ArgumentError(f"only={only!r}", fix="pass variables, layers or patterns of names, one or a list")
    found = dict[str, None]()
    for each in [only] if one else only:
        own = [v.name for v in getattr(each, "variables", [each])] if not isinstance(each, str) else []
        fitting = [name for name in names if name in own or (isinstance(each, str) and fnmatchcase(name, each))]
        if not fitting:
            wanted = own[0] if own else each
            raise UnknownNameError(f"there is no variable {wanted!r}", fix=did_you_mean(wanted, names))
        found |= dict.fromkeys(fitting)
    return list(found)


def opened(path: FilePath | Checkpoint) -> Checkpoint:
    """The checkpoint at a path, or one that is open already."""
    return path if isinstance(path, Checkpoint) else Checkpoint(path)


def load(state: State, path: FilePath, only: Any, strict: bool) -> dict[str, Any]:
    """Set the chosen variables from a file or a folder, and return its `extra`."""
    saved = opened(path)
    wanted = {n: Wanted(a.shape, a.dtype.name, whole(a.shape)) for n, a in state.arrays.items()}
    read = fitting(saved, wanted, only, strict)
    state.assign({name: saved.read(name, box) for name, (_, _, box) in read.items() if box is not None})
    return saved.extra


@dataclass
class Writing:
    """A save that has begun: what this process writes, and how; `together` calls that, and agrees with the others.

    >>> Writing({"w": np.zeros(3)}, lambda tensors: print(*tensors) is None).finish()
    w
    """

    tensors: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[Mapping[str, Any]], bool] = bool  # asks no other process; whether all is whole by it
    together: Callable[[Callable[[], object]], object] = lambda act: act()

    def finish(self) -> None:
        """Write it; CheckpointError on all processes if it fails on one."""
        self.together(lambda: self.write(self.tensors))


def begin(state: State, path: FilePath, extra: Mapping[str, Any] | None = None) -> Writing:
    """What writes all variables and `extra` to one file, atomically; where a folder is, as that of one rank."""
    path, tensors = Path(path), dict(state.arrays)
    if path.is_dir():  # it goes on with what ranks have saved
        return begin_folder(path, tensors, extra)
    metadata = {"extra": as_json(dict(extra or {}))}

    def write(tensors: Mapping[str, Any]) -> bool:
        write_atomically(path, tensors, metadata)
        return True

    return Writing(tensors, write)


def begin_folder(folder: Path, tensors: Mapping[str, Any], extra: Mapping[str, Any] | None) -> Writing:
    """What writes all tensors and `extra` as the only part of a save into a folder."""
    number = checkpoint.begin(folder)
    sizes = [checkpoint.part_size(number, tensors)]
    table = {n: {"shape": a.shape, "dtype": a.dtype.name, "pieces": [(0, whole(a.shape))]} for n, a in tensors.items()}
    last = checkpoint.manifest(number, sizes, table, extra)
    return Writing(tensors, partial(checkpoint.write_one, folder, number, sizes, 0, last))


FILES |= {"begin": begin, "load": load}


# -- while training goes on ----------------------------------------------------------------------------------------

NAMES = re.compile(rf"\.?manifest\.(json|ready)(\.part)?|{checkpoint.PART.pattern}")  # of files in a folder of parts


def is_save(path: Path) -> bool:
    """Whether a save is there, or what is left of one."""
    if path.is_dir():
        return all(NAMES.fullmatch(each.name) for each in path.iterdir())
    with suppress(CheckpointError):
        return checkpoint.opened(path) is not None
    return False


def given_up(path: FilePath) -> str:
    """What to say of a save that all which were left have written, if it is not whole."""
    lost = f"checkpoint {str(path)!r} was given up: a rank was lost before its part was written"
    return "" if exists(Path(path)) else lost


class Checkpoints:
    """Numbered checkpoints in a folder, `folder/1`, `folder/2`, ..., written by a thread while training goes on.

    The last `keep` stay; each is what `Executor.save` would have written there, a folder of parts if ranks wrote it.
    `Executor.load(folder)` reads the newest whole one, however the process ended, and `Executor.load(folder + "/2")`
    the second. On several ranks all make it, and call it, alike.

    CheckpointError where no such folder can be. A process that ends finishes what it is writing; what then fails, or
    has failed and was not told, is told as it ends.

    >>> import hetu as ht, os, tempfile
    >>> w = ht.variable("w", 1.0, ())
    >>> ex = ht.Executor([w, {w: 2.0 * w}])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints = ht.Checkpoints(ex, folder, keep=2)
    ...     for step in range(5):
    ...         _ = ex.run(0)
    ...         checkpoints.save({"step": step})
    ...     checkpoints.wait()
    ...     sorted(os.listdir(folder)), ht.Executor([w]).load(folder)
    (['4', '5'], {'step': 4})
    """

    @public
    def __init__(self, executor: Executor, folder: FilePath, *, keep: AtLeast1 = 3) -> None:
        self.executor, self.folder, self.keep = executor, Path(folder), keep
        self.writing: Writing | None = None  # what is under way, and its end
        self.written, self.site = Future[None](), user_site()
        self.copies = dict[str, np.ndarray]()  # whose memory each save takes over
        if exists(self.folder):
            said = f"{str(self.folder)!r} is a checkpoint or another file, and numbered ones have a folder of their own"
            raise CheckpointError(said, fix="choose another path")
        make_folder(self.folder)
        found = [int(path.name) for path in self._numbered()]
        self.number = int(executor.placement.agree({"last": max(found, default=0)})["last"])

    @public
    def save(self, extra: Mapping[str, Any] | None = None) -> None:
        """Copy all variables, which a thread then writes with `extra`; see `Executor.save`. Steps may follow at once.

        It waits for the save before, if that is still under way, and raises what went wrong there: so no save is ever
        given up for the next, and of the values of this process there is one copy in memory at most, whose memory the
        next takes over. What servers keep is not copied: it is written before this returns.
        """
        self.wait()
        self.number, self.site, executor = self.number + 1, user_site(), self.executor
        path = self.folder / str(self.number)
        self.writing = executor.placement.save(executor.state, executor.variables, path, extra)
        self.copies = {name: self._copied(name, array) for name, array in self.writing.tensors.items()}
        self.writing.tensors = self.copies
        pool = ThreadPoolExecutor(1, "writes checkpoints")  # of each save, as a forked process has none of its threads
        self.written = pool.submit(self._write, self.writing)
        pool.shutdown(wait=False)  # Python waits for it as it ends
        under_way.add(self.written)
        endings.append(self._join)

    @public
    def wait(self) -> None:
        """Return once the last save is on the disk; CheckpointError, on all ranks, if one of them could not write.

        RuntimeWarning if there is none, as a rank was lost that had a part to write: the save before is the newest.
        """
        if self.writing is None or self._join not in endings:  # or it is the one of a process that has forked this one
            return
        try:
            self.writing.together(self._join)
        finally:
            if self.written.done():  # else Ctrl-C has ended only the waiting
                self.writing = None
        if self.executor.placement.rank == 0 and (said := given_up(self.folder / str(self.number))):
            warnings.warn(said, RuntimeWarning, stacklevel=3)

    def _copied(self, name: str, array: Any) -> np.ndarray:
        copy = self.copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (array.shape, array.dtype):
            copy = np.empty(array.shape, array.dtype)
        np.copyto(copy, array if isinstance(array, np.ndarray) else to_numpy(array))
        return copy

    def _write(self, writing: Writing) -> None:
        if self.executor.placement.rank == 0:  # makes room of what failed, and what killed processes have left
            self._remove_but(generations(self.folder))
        if writing.write(writing.tensors):
            self._remove_but(generations(self.folder)[-self.keep :])

    def _join(self) -> None:
        futures.wait([self.written])
        with suppress(ValueError):
            endings.remove(self._join)
        try:
            self.written.result()
        except CheckpointError as error:
            error.site = self.site
            raise
        except Exception as error:
            said = f"{str(self.folder / str(self.number))!r} was not written: {str(error) or repr(error)}"
            raise CheckpointError(said, fix="free what it lacks, and save again", site=self.site) from error

    def _numbered(self) -> list[Path]:
        """What has a number for a name. CheckpointError if one is not a save or left by one: it would be removed."""
        found = [path for path in self.folder.iterdir() if path.name.isdecimal()]
        if strange := [path.name for path in found if not is_save(path)]:
            said = f"{strange[0]!r} in {str(self.folder)!r} is no checkpoint, where older numbers are removed"
            raise CheckpointError(said, fix="choose a folder that has nothing else")
        return found

    def _remove_but(self, kept: Collection[int]) -> None:
        left = [path for path in self.folder.glob(".*.part") if path.name[1:-5].isdecimal()]
        for path in [*self._numbered(), *left]:
            number = int(path.name.removeprefix(".").removesuffix(".part"))
            if number < self.number and number not in kept:
                remove(path)
