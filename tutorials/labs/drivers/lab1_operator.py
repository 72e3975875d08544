"""Beside the student's code of lab 1: values, gradients, and a record of what the rules ask of `xp`."""

import numpy as np

import hetu as ht


def forward(student, x, scale):
    return student.softsign.forward(np, x, scale=scale)


def evaluated(student, x, scale):
    return ht.evaluate(student.softsign(x, scale=scale))


def gradient(student, x, weights, scale, order):
    """The derivative of that order of the sum of weights * softsign(x)."""
    node = ht.placeholder("x", x.shape)
    outputs = [ht.sum(student.softsign(node, scale=scale) * weights)]
    for _ in range(order):
        outputs = ht.gradients(ht.sum(outputs[0]), [node])
    return ht.evaluate(outputs[0], {node: x})


def into(student, x, scale):
    """What is in `out` afterward, and in `x`."""
    out = np.full_like(x, np.nan)
    student.softsign.into_rule(np, out, x, scale=scale)
    return out, x


def recorded(student, rule, scale):
    """The steps of a rule, and which value it returns: [name, operands, the value written to or None] each.

    Operands are numbers, or ["value", index]: 0 is x, 1 is out, 2 the result of the first step, and so on.
    """
    record = Record()
    x, out = Traced(record, 0), Traced(record, 1)
    if rule == "forward":
        made = student.softsign.forward(record, x, scale=scale)
    else:
        made = student.softsign.into_rule(record, out, x, scale=scale)
    return record.steps, made.index if isinstance(made, Traced) else -1


class Record:
    """An array module that writes down what it is asked for."""

    def __init__(self):
        self.steps = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *operands, out=None: self.note(name, operands, out)

    def note(self, name, operands, out=None):
        told = [["value", o.index] if isinstance(o, Traced) else o for o in operands]
        self.steps.append([name, told, out.index if isinstance(out, Traced) else None])
        return out if out is not None else Traced(self, len(self.steps) + 1)


class Traced:
    """An array that is only a number in a record."""

    def __init__(self, record, index):
        self.record, self.index = record, index

    def __array_ufunc__(self, ufunc, method, *operands, **options):
        raise TypeError(f"np.{ufunc.__name__} was called: call it as xp.{ufunc.__name__}")

    def __array__(self, *args, **kwargs):
        raise TypeError("NumPy itself was asked for an array: ask xp")

    def __setitem__(self, key, value):
        self.record.note("copyto", [self, value])

    def __abs__(self):
        return self.record.note("abs", [self])

    def __neg__(self):
        return self.record.note("negative", [self])


def operator(name, turned):
    if turned:
        return lambda self, other: self.record.note(name, [other, self])
    return lambda self, other: self.record.note(name, [self, other])


for short, name in {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "pow": "power"}.items():
    setattr(Traced, f"__{short}__", operator(name, False))
    setattr(Traced, f"__r{short}__", operator(name, True))
