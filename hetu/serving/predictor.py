"""`ht.Predictor`: a model file at work. Threads may share it, and a bounded number of programs serves all sizes.

Where rows are apart (`apart.py`), runs have few numbers of rows: the powers of two, and these one and a half times.
What lacks is filled up with the last row, at most a third of a run, and what is more is divided. Other models run as
they are fed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import BudgetError, FeedError, HetuError, ValueRangeError, did_you_mean, of_steps, public
from ..core.executor import KEPT_PROGRAMS, Executor
from ..core.program import Arena
from ..core.state import FilePath
from ..core.subgraph import fitted
from ..core.types import show_shape
from ..look.columns import show_bytes
from ..ranges import AtLeast1
from ..system import memory
from .model_file import ModelGraph, load_model

NamedArrays = dict[str, np.ndarray]


class Predictor:
    """A model in a file, of `ht.save_model` or, where onnx is installed, of ONNX (`.onnx`), as a function of arrays.

    `Predictor(path)(x=array)`, or `predict({"x": array})`, gives the outputs by their names; `inputs` and `outputs`
    have their types. Runs have at most `most_rows` rows, more are divided. FeedError for arrays that do not fit,
    BudgetError for sizes that need more than half of this machine's memory.

    >>> import hetu as ht, tempfile
    >>> x = ht.placeholder("x", (None, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ht.save_model(f"{folder}/sums.hetu", {"total": ht.sum(x, axis=1)}, ht.Executor([x]).state)
    ...     sums = Predictor(f"{folder}/sums.hetu")
    >>> sums(x=np.ones((3, 2)))["total"].tolist(), sums
    ([2.0, 2.0, 2.0], <Predictor x f32[?, 2] -> total f32[?]>)
    """

    def __init__(self, path: FilePath, *, most_rows: AtLeast1 = 256) -> None:
        model = _opened(path)
        self.name, self.most_rows, self._model = Path(path).name, most_rows, model
        self.inputs = {name: node.tensor for name, node in model.inputs.items()}
        self.outputs = {name: node.tensor for name, node in model.outputs.items()}
        self._executor = Executor([*model.outputs.values()])
        self._executor.arena = _Bounded(self._executor, memory() / 2)
        self._sub = self._executor.subgraphs["default"]
        self._turn, self._plain = threading.Lock(), set[Any]()  # and names, shapes and dtypes that run as they are
        self._apart = lru_cache(KEPT_PROGRAMS)(self._rows_apart)

    @of_steps
    def __call__(self, **arrays: Any) -> NamedArrays:
        return self.predict(arrays)

    @of_steps
    def predict(self, arrays: Mapping[str, Any]) -> NamedArrays:
        """The outputs by name, arrays of the caller's own."""
        kind = tuple([(name, a.shape, a.dtype) for name, a in arrays.items() if type(a) is np.ndarray])
        if len(kind) == len(arrays) and kind in self._plain:
            return self._run(arrays)
        fed = self.fitting(arrays)
        count = self.rows(fed)
        if 0 < count == self._size(count) or not self.joins(fed):
            if len(kind) == len(fed) and all(dtype == self.inputs[name].dtype for name, _, dtype in kind):
                self._plain = {kind, *self._plain} if len(self._plain) < KEPT_PROGRAMS else {kind}
            return self._run(fed)
        ends = [*range(0, count, self.most_rows), count]
        parts = [self._filled(fed, *part) for part in pairwise(ends)]
        return parts[0] if len(parts) == 1 else _together(parts)

    @public
    def fitting(self, arrays: Mapping[str, Any]) -> NamedArrays:
        """The arrays as the model takes them; FeedError says what does not fit."""
        if unknown := [name for name in arrays if name not in self.inputs]:
            raise FeedError(f"the model has no input {unknown[0]!r:.60}", fix=did_you_mean(unknown[0], self.inputs))
        if missing := [f"{name!r} {type_}" for name, type_ in self.inputs.items() if name not in arrays]:
            raise FeedError(f"the model was not given {', '.join(missing)}", fix="give it an array for each input")

        def unfit(name: str, what: str, _: str) -> FeedError:  # what to do there is for whoever wrote the model
            type_ = self.inputs[name]
            fix = f"give it {type_.dtype.name} numbers of shape {show_shape(type_.shape)}, where ? is any size"
            return FeedError(f"input {name!r} {what}", fix=fix)

        return {n: np.asarray(fitted(arrays[n], t, partial(unfit, n)), t.dtype) for n, t in self.inputs.items()}

    @public
    def rows(self, fed: NamedArrays) -> int:
        """How many rows all inputs have; 0 where they have not as many."""
        counts = {array.shape[:1] for array in fed.values()}
        return sum(counts.pop()) if len(counts) == 1 else 0

    def joins(self, fed: NamedArrays) -> bool:
        """Whether these rows may share a run with others of their `kind`: each is apart, all inputs have as many."""
        if not self.rows(fed):
            return False
        with self._turn:
            return self._apart(self.kind(fed))

    def _rows_apart(self, kind: Any) -> bool:
        from .apart import rows_apart  # whose rules only this needs

        sizes = {(name, axis): n for name, shape in zip(self.inputs, kind) for axis, n in enumerate(shape, 1)}
        return rows_apart([*self._model.outputs.values()], self._model.inputs, sizes)

    def kind(self, fed: NamedArrays) -> Any:
        """All sizes but the first, by which requests that may be joined are known."""
        return tuple(array.shape[1:] for array in fed.values())

    def joined(self, requests: list[NamedArrays]) -> list[NamedArrays]:
        """What `predict` gives for each of some requests of one kind, whose rows are `apart`, from one run for all."""
        made = self.predict(_together(requests))
        ends = accumulate((len(next(iter(fed.values()))) for fed in requests), initial=0)
        return [{name: array[low:high].copy() for name, array in made.items()} for low, high in pairwise(ends)]

    def _filled(self, fed: NamedArrays, low: int, high: int) -> NamedArrays:
        """Rows `low` to `high`, in a run of one of few sizes."""
        count, size = high - low, self._size(high - low)
        rows = slice(low, high) if size == count else np.minimum(np.arange(low, low + size), high - 1)
        made = self._run({name: array[rows] for name, array in fed.items()})
        return {name: array[:count] for name, array in made.items()}

    def _size(self, count: int) -> int:
        return min(rows_of_run(count), self.most_rows)

    def _run(self, fed: Mapping[str, Any]) -> NamedArrays:
        try:
            with self._turn:
                return dict(zip(self._model.outputs, self._executor.run(dict(fed.items()))))
        except (BudgetError, ValueRangeError):
            raise
        except HetuError as error:  # which tells who wrote the model what to write
            sizes = ", ".join(f"{name!r} {show_shape(array.shape)}" for name, array in fed.items())
            fix = "give sizes that fit the model, and each other"
            raise FeedError(f"the model does not take {sizes}: {error.message}", fix=fix) from None
        except (OSError, OverflowError) as error:  # of more than the system has addresses for
            raise BudgetError(f"a run of these sizes: {error}", fix="feed fewer rows, or smaller ones") from None

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(f"{n} {t}" for n, t in types.items()) for types in (self.inputs, self.outputs))
        return f"<Predictor {inputs} -> {outputs}>"


def rows_of_run(count: int) -> int:
    """How many rows a run has in which there is room for `count`.

    >>> [rows_of_run(count) for count in (1, 2, 3, 4, 5, 7, 9, 13, 100)]
    [1, 2, 3, 4, 6, 8, 12, 16, 128]
    """
    size = 1 << (count - 1).bit_length()
    return size * 3 // 4 if size > 2 and count <= size * 3 // 4 else size


def _together(parts: list[NamedArrays]) -> NamedArrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _opened(path: FilePath) -> ModelGraph:
    if Path(path).suffix != ".onnx":
        return load_model(path)
    from .. import onnx

    loaded = onnx.load(path)
    return ModelGraph(loaded.inputs, loaded.outputs)


class _Bounded(Arena):
    """The memory of all programs, which ends; as it grows, programs in what it was are forgotten."""

    def __init__(self, executor: Executor, most: float) -> None:
        super().__init__(executor.device)
        self.executor, self.most = executor, most

    def reserve(self, nbytes: int) -> Any:
        if nbytes > self.most:
            said = f"a run takes {show_bytes(nbytes)}, of which {show_bytes(int(self.most))} may be taken"
            raise BudgetError(said, fix="feed fewer rows, or smaller ones")
        if nbytes > self.block.nbytes:
            for sub in self.executor.subgraphs.values():
                sub.programs.clear()
                sub.last = None
        return super().reserve(nbytes)
