"""Lab 1: values and gradients.

In ten files you build a system that trains a network on four processes. It rests on one idea: a computation is first
written down, as a *graph*, and run afterward. A `Node` stands for an array that does not exist yet; it knows the
operator that will make it, the nodes that this operator reads, and the shape it will have.

What a graph knows about itself pays off at once. To train, one needs dL/dv of a number L, the loss, for many nodes v.
Reverse mode gives all of them in one walk from L back to the inputs. Begin with dL/dL = 1; when a node y has its
gradient g = dL/dy, its operator says what that means for each of its inputs, and an input that is read twice gets the
sum of both. Gradients are nodes again, so whatever can be done with nodes can be done with them: they are run, planned
(lab 3) and sent to other ranks (lab 6) by the same few lines.

Write it where `raise NotImplementedError` stands. The track uses NumPy alone.
"""

import numpy as np

OPERATORS = {}  # each operator by its name


class Node:
    """A value of a graph. `inputs` are nodes, `attrs` what else the operator takes (a dict), `shape` a tuple."""

    def __init__(self, operator, inputs, attrs):
        self.operator, self.inputs, self.attrs = operator, inputs, attrs
        self.shape = tuple(operator.shape(*[x.shape for x in inputs], **attrs))

    def __add__(self, other):
        return add(self, as_node(other))

    def __mul__(self, other):
        return multiply(self, as_node(other))


def as_node(x):
    return x if isinstance(x, Node) else constant(value=float(x))


class Operator:
    """Called with nodes, it makes a node. `forward(out, *arrays, **attrs)` writes the result into the array `out`,
    which may hold anything before; `shape(*shapes, **attrs)` is the shape of the result."""

    def __init__(self, forward, shape):
        self.forward, self.shape, self.rule = forward, shape, None
        OPERATORS[forward.__name__] = self

    def __call__(self, *inputs, **attrs):
        return Node(self, inputs, attrs)

    def gradient(self, rule):
        """Decorates the rule of the gradient: `rule(g, y, *inputs, **attrs)` returns dL/dx as a node for each input x,
        or None where there is none. `y` is the node made, and `g` is dL/dy, of the shape of y."""
        self.rule = rule
        return rule


def operator(shape):
    """Decorates the forward function of an operator, and enters the operator in OPERATORS."""
    return lambda forward: Operator(forward, shape)


def as_it_is(x, **attrs):
    return x


def as_told(*inputs, size):
    return size


@operator(shape=as_told)
def placeholder(out, *, size):
    """An array that is given when the graph is run: `placeholder(size=(2, 3))`."""


@operator(shape=lambda *, value: ())
def constant(out, *, value):
    """One number: `constant(value=0.5)`."""
    out[...] = value


@operator(shape=np.broadcast_shapes)
def add(out, a, b):
    """a + b, broadcast as in NumPy."""
    np.add(a, b, out=out)


@add.gradient
def add_gradient(g, y, a, b):
    return g, g  # where a was broadcast this has too large a shape: `gradients` sums it up, for all operators alike


@operator(shape=np.broadcast_shapes)
def multiply(out, a, b):
    """a * b, broadcast as in NumPy."""
    np.multiply(a, b, out=out)


@multiply.gradient
def multiply_gradient(g, y, a, b):
    ### BEGIN SOLUTION
    return g * b, g * a
    ### END SOLUTION


@operator(shape=as_it_is)
def power(out, x, *, exponent):
    """x ** exponent, for a fixed number: 0.5 is the square root, -1 the reciprocal."""
    np.power(x, exponent, out=out)


@power.gradient
def power_gradient(g, y, x, *, exponent):
    ### BEGIN SOLUTION
    return [g * power(x, exponent=exponent - 1) * exponent]
    ### END SOLUTION


@operator(shape=as_it_is)
def exp(out, x):
    np.exp(x, out=out)


@exp.gradient
def exp_gradient(g, y, x):
    ### BEGIN SOLUTION
    return [g * y]
    ### END SOLUTION


@operator(shape=as_told)
def reshape(out, x, *, size):
    """The same numbers in the same order, in another shape: `reshape(x, size=(6,))`."""
    out[...] = x.reshape(size)


@reshape.gradient
def reshape_gradient(g, y, x, *, size):
    ### BEGIN SOLUTION
    return [reshape(g, size=x.shape)]
    ### END SOLUTION


@operator(shape=as_told)
def broadcast(out, x, *, size):
    """x repeated to a larger shape, as NumPy broadcasts."""
    out[...] = x


@broadcast.gradient
def broadcast_gradient(g, y, x, *, size):
    return [g]


def total_shape(x, *, axes):
    ### BEGIN SOLUTION
    return tuple(1 if axis in axes else size for axis, size in enumerate(x))
    ### END SOLUTION


@operator(shape=total_shape)
def total(out, x, *, axes):
    """The sum over some axes, which stay with size 1: `total(x, axes=(0, 1))`. Axes count from 0."""
    np.sum(x, tuple(axes), keepdims=True, out=out)


@total.gradient
def total_gradient(g, y, x, *, axes):
    ### BEGIN SOLUTION
    return [broadcast(g, size=x.shape)]
    ### END SOLUTION


def sum_to(g, shape):
    """The node `g` summed over all that broadcasting had added to an array of `shape`, so that it has that shape again.

    Broadcasting puts axes in front, and repeats along axes of size 1: (3, 1) becomes (2, 3, 4). An element was used in
    several places, so its gradient is the sum of theirs. Where nothing was added, return `g` itself.
    """
    ### BEGIN SOLUTION
    if g.shape == shape:
        return g
    added = len(g.shape) - len(shape)
    axes = [axis for axis, size in enumerate(g.shape) if axis < added or shape[axis - added] != size]
    return reshape(total(g, axes=axes), size=shape)
    ### END SOLUTION


def topological_order(outputs):
    """A list of all nodes that `outputs` (a list) need, each once and after its inputs.

    Go depth first, inputs from left to right. Chains of thousands of nodes are common and Python allows about a
    thousand calls inside each other, so keep a list of your own of what is still to do.
    """
    ### BEGIN SOLUTION
    order, seen, stack = [], set(), [(node, False) for node in reversed(outputs)]
    while stack:
        node, inputs_are_done = stack.pop()
        if inputs_are_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((x, False) for x in reversed(node.inputs))
    return order
    ### END SOLUTION


def gradients(loss, wanted):
    """d loss / d w as a node of the shape of w, for each w of the list `wanted`. `loss` has shape ().

    When it is a node's turn its gradient must be complete: all that read it must have had their turn. An operator
    without a rule ends the walk there. What the loss does not depend on has a gradient of zeros.
    """
    ### BEGIN SOLUTION
    found = {loss: constant(value=1.0)}
    for y in reversed(topological_order([loss])):
        if y not in found or y.operator.rule is None:
            continue
        for x, g in zip(y.inputs, y.operator.rule(found[y], y, *y.inputs, **y.attrs)):
            if g is not None:
                g = sum_to(g, x.shape)
                found[x] = found[x] + g if x in found else g
    return [found[w] if w in found else broadcast(constant(value=0.0), size=w.shape) for w in wanted]
    ### END SOLUTION


def evaluate(outputs, feeds):
    """The arrays of the nodes `outputs`, in float64. `feeds` maps each placeholder to its array.

    Compute each node once, however many read it.
    """
    ### BEGIN SOLUTION
    arrays = {}
    for node in topological_order(outputs):
        if node.operator is placeholder:
            arrays[node] = np.asarray(feeds[node], np.float64)
        else:
            arrays[node] = np.empty(node.shape)
            node.operator.forward(arrays[node], *[arrays[x] for x in node.inputs], **node.attrs)
    return [arrays[node] for node in outputs]
    ### END SOLUTION


def build(rows):
    """A graph from plain data: for each node a row [operator, numbers of the rows that it reads, attributes].

    `build([["placeholder", [], {"size": [2]}], ["exp", [0], {}]])` is the list of both nodes. The checks send graphs in
    this form.
    """
    nodes = []
    for name, inputs, attrs in rows:
        nodes.append(OPERATORS[name](*[nodes[i] for i in inputs], **attrs))
    return nodes
