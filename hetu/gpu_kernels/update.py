"""Launches the kernels of `update.cu`: every parameter of a model updated by one launch, tables row by row.

Rules that need whole parameters, as LAMB their norms, are groups, see `group_text.py`.
`passes/group_updates.py` decides which parameters go together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..fuse.line_text import compute_dtype, expression
from .launchers import kernel
from .machine import Call, Machine, address, contiguous, spread_rows, widest_pack
from .many import CHUNK, KINDS, chunks, keeping
from .source import CTYPES, assemble, file_text, number_text
from .tables import summed, with_runs


def _text(composition: Any, pack: int, **dtypes: str) -> str | None:
    """The kernels of a rule for packs of so many elements, or None where one of its operators has no expression in C.

    `prepare` computes once per block, in double, what follows from the scalars; `apply` is the rest, of one element.
    """
    c = composition
    number = {node: k for k, node in enumerate((*c.inputs, *c.nodes))}
    if any(n.op.code is None and _number(n) is None for n in c.nodes):
        return None
    shared = [n for n in number if n not in c.full and _number(n) is None]
    shared = [n for n in shared if any(n in reader.inputs for reader in c.full)]
    once = [n for n in c.nodes if n not in c.full]
    each = [n for n in c.nodes if n in c.full or _number(n) is not None]
    work = compute_dtype(dtypes["S"])
    fields = "".join(f" {_ctype(n, 'T')} v{number[n]};" for n in shared)
    scalars = [f"const double v{number[n]} = {x};" for n, x in zip(c.inputs[c.arrays :], ("rate", "step"))]
    values = [f"const T v{k} = x[{k}];" for k in range(c.arrays - 1)] + [f"const T v{c.arrays - 1} = g;"]
    values += [f"const {_ctype(n, 'T')} v{number[n]} = s.v{number[n]};" for n in shared]
    results = [f"x[{k}] = v{number[o]};" for k, o in enumerate(c.outputs)]
    made = ", ".join(f"({_ctype(n, 'T')})v{number[n]}" for n in shared)
    early = (
        f"#define PACK {pack}\n"
        f"#define STATES {c.arrays - 2}\n"
        f"#define TABLES {', '.join(f'S* t{k}' for k in range(c.arrays - 1))}\n"
        f"#define EACH_TABLE {', '.join(f't{k}' for k in range(c.arrays - 1))}\n"
        f"struct Scalars {{{fields} }};\n"
        "__device__ inline Scalars prepare(double rate, double step) {\n"
        f"{_block([*scalars, *_steps(once, number, 'float64'), f'return Scalars{{{made}}};'])}}}\n"
        "__device__ inline void apply(const Scalars& s, T* x, T g) {\n"
        f"{_block([*values, *_steps(each, number, work), *results])}}}\n"
    )
    undone = "\n#undef ".join(("", "PACK", "STATES", "TABLES", "EACH_TABLE"))
    body = f"{early}{file_text('tensors')}{with_runs('update')}{undone}\n"
    return assemble(body, "update.cu", **dtypes)


def _number(node: Any) -> float | None:
    """The value of a constant, which is a number where elements are computed one by one."""
    return None if node.inputs or "value" not in node.attrs else node.attrs["value"].item()


def _ctype(node: Any, number: str) -> str:
    return "bool" if node.dtype == np.bool_ else number


def _block(lines: Sequence[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def _steps(nodes: Sequence[Any], number: Mapping[Any, int], dtype: str) -> list[str]:
    """Statements that compute these nodes, numbers in this dtype."""

    def stored(node: Any) -> str:
        return "bool" if node.dtype == np.bool_ else dtype

    lines = []
    for node in nodes:
        place, kind = number[node], stored(node)
        if (value := _number(node)) is not None:
            lines.append(f"const {CTYPES[kind]} v{place} = ({CTYPES[kind]}){number_text(value)};")
            continue
        known = [(f"v{number[i]}", np.dtype(stored(i))) for i in node.inputs]
        attrs = tuple((k, v) for k, v in node.attrs.items() if isinstance(v, bool | int | float))
        made = expression(node.op, known, attrs, np.dtype(kind), CTYPES)
        lines.append(f"const {CTYPES[kind]} v{place} = {made};  // {node.op.name}")
    return lines


class Tensor(NamedTuple):
    """One parameter: new and old values, the parameter first and then its states, and the gradient."""

    new: Sequence[Any]
    old: Sequence[Any]
    gradient: Any


def update_all(
    machine: Machine,
    rule: Any,
    tensors: Sequence[Tensor],
    rate: Any,
    step: Any,
    attrs: Mapping[str, Any],
    ok: Any = None,
    scale: Any = None,
) -> list[Call] | None:
    """One launch that applies a rule to all tensors, of one dtype; `rate` and `step` are arrays of one number.

    Gradients may have 16 bits where the rest has more. They are divided by `scale`, one number of the dtype of the
    rest. `ok` is one bool: if it is false, the old values stay.
    """
    rows = [(*t.new, *t.old, t.gradient) for t in tensors]
    stored, xp = rows[0][0].dtype, machine.xp
    ok = xp.asarray(np.True_) if ok is None else ok
    scale = xp.ones((), stored) if scale is None else scale
    whole = [scale, *(a for row in rows for a in row[:-1])]
    if not contiguous(*whole, *(row[-1] for row in rows), rate, step) or any(a.dtype != stored for a in whole):
        return None
    if any(row[-1].dtype.name not in (stored.name, *KINDS) for row in rows):
        return None
    dtypes = {"S": stored.name, "R": rate.dtype.name, "N": step.dtype.name}
    grid, block, where = chunks(machine, rows)
    pack = widest_pack(CHUNK, *(a for row in rows for a in row))
    composition = rule.composition(tensors[0].new[0].shape, attrs)
    if composition.whole or (text := _text(composition, pack, **dtypes, I="int64", K="float64")) is None:
        return None
    launch = machine.kernel(text, "update_all")
    return [keeping(rows, partial(launch, grid, block, (*where, rate, step, ok, scale)))]


def update_rows(
    machine: Machine,
    rule: Any,
    out: Any,
    old: Sequence[Any],
    ids: Any,
    rows: Any,
    scalars: Sequence[Any],
    attrs: Mapping[str, Any],
) -> list[Call] | None:
    """Calls that apply the rule to the rows `ids` of a table and its states; equal ids are summed first.

    A result that does not lie on its table is copied there first. The last scalar of a guarded rule is one number: if
    it is 0, the old values stay.
    """
    tables = out if isinstance(out, tuple) else (out,)
    (rate, *step), ok = (scalars[:-1], scalars[-1]) if rule.base else (scalars, machine.xp.ones(()))
    rule, step = rule.base or rule, step[0] if step else rate
    if not contiguous(*tables, ids, rows, rate, step) or any(t.dtype != rows.dtype for t in tables):
        return None
    dtypes = {"S": rows.dtype.name, "R": rate.dtype.name, "N": step.dtype.name, "I": ids.dtype.name, "K": ok.dtype.name}
    sizes = count, _, inner = ids.size, tables[0].shape[0], prod(tables[0].shape[1:])
    pack = widest_pack(inner, rows, *tables)
    text = _text(rule.composition(tables[0].shape, attrs), pack, **dtypes)
    if text is None:
        return None
    copies = [partial(machine.xp.copyto, new, x) for new, x in zip(tables, old) if address(new) != address(x)]
    runs, calls = summed(machine, text, ids, rows, inner, pack)
    launch, shape = machine.kernel(text, "update_rows"), spread_rows(count, inner, pack)
    return [*copies, *calls, partial(launch, *shape, (*tables, *runs, rate, step, ok, *sizes))]


@kernel("update")
def on_arrays(rule: Any, machine: Machine, out: Any, *arrays: Any, **attrs: Any) -> list[Call] | None:
    """A rule on one parameter."""
    old, gradient, (rate, *step) = rule.split(arrays)
    tensor = Tensor(out if isinstance(out, tuple) else (out,), old, gradient)
    return update_all(machine, rule, [tensor], rate, step[0] if step else rate, attrs)


def grouped(
    machine: Machine,
    out: Any,
    *arrays: Any,
    rule: Any,
    count: int,
    options: Any,
    conditional: bool,
    scaled: bool,
) -> list[Call] | None:
    """Updates by one rule.

    `arrays` are all old values, all gradients, the rate and, for some, step, condition and scale of the gradients.
    """
    *arrays, scale = arrays if scaled else (*arrays, None)
    *arrays, ok = arrays if conditional else (*arrays, None)
    cut = [slice(k * rule.tables, (k + 1) * rule.tables) for k in range(count)]
    gradients, (rate, *step) = arrays[rule.tables * count :][:count], arrays[(rule.tables + 1) * count :]
    tensors = [Tensor(out[at], arrays[at], g) for at, g in zip(cut, gradients)]
    return update_all(machine, rule, tensors, rate, step[0] if step else rate, dict(options), ok, scale)


@kernel("row_update")
def on_rows(rule: Any, machine: Machine, out: Any, *arrays: Any, **attrs: Any) -> list[Call] | None:
    """A rule on some rows."""
    old, (ids, rows, *scalars) = arrays[: rule.tables], arrays[rule.tables :]
    return update_rows(machine, rule, out, old, ids, rows, scalars, attrs)
