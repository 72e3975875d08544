"""Beside the student's code of lab 3: a graph is made of rows, folded, and handed back as rows."""

import operator
import sys

import numpy as np

import hetu as ht

for found in ("passes", "simplify"):  # hetu's own folding is not the answer
    sys.modules[f"hetu.core.{found}"] = None
    delattr(ht.core, found)

SIGNS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


def made(rows):
    """Nodes of rows: ["placeholder", shape], ["variable", array], ["constant", array] or [operator, index, ...]."""
    nodes = []
    for number, (name, *given) in enumerate(rows):
        if name == "placeholder":
            nodes.append(ht.placeholder(f"x{number}", tuple(given[0])))
        elif name == "variable":
            nodes.append(ht.variable(f"w{number}", given[0], given[0].shape))
        elif name == "constant":
            nodes.append(ht.constant(given[0]))
        else:
            function = SIGNS.get(name) or getattr(ht, name)
            nodes.append(function(*(nodes[k] for k in given)))
    return nodes


def folded(student, rows, wanted):
    """The rows of the folded graph, inputs first, and where its outputs stand.

    A leaf has the index of the row that it was made from, a constant its array.
    """
    nodes = made(rows)
    outputs = student.fold_constants([nodes[k] for k in wanted])
    found, place = [], {}
    for node in ht.Graph(outputs).nodes:
        place[node] = len(found)
        if node.role.value == "constant":
            found.append(["constant", np.asarray(ht.evaluate(node))])
        elif not node.inputs:
            found.append(["leaf", next((k for k, n in enumerate(nodes) if n is node), -1)])
        else:
            found.append([node.op.name, *(place[i] for i in node.inputs)])
    return found, [place[o] for o in outputs]


def values_of_largest(student, values, k):
    """The largest of a constant, through an operator of two outputs."""
    largest, _ = ht.topk(ht.constant(values), k=k)
    (node,) = student.fold_constants([largest])
    return ht.evaluate(node)


def values_of_open_size(student, factor, values):
    """A constant that is spread over as many places as the data have, times the data."""
    x = ht.placeholder("x", (None,))
    (node,) = student.fold_constants([ht.broadcast_to(ht.constant(factor), x.shape) * x])
    return ht.evaluate(node, {x: values})
