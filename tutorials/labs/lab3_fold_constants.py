"""Lab 3: a pass that folds constants. After tutorial 4.

2 * 3 need not be computed a million times. Write the pass that computes it once, before the first step.

What you need: `ht.rewrite(outputs, rule)` calls `rule(node, inputs)` for each node, inputs first; return a node to put
in its place, or None to keep it. `node.role.value` is "constant" for constants. `ht.evaluate(node)` computes a node,
`ht.constant(array)` makes a constant. `node.type` is a tuple for an operator of several outputs.

Check yourself with `hetu lab check 3`.
"""

import hetu as ht


def fold_constants(outputs):
    """The same values, with every operator whose inputs are all constants replaced by its value.

    Takes a list of nodes and returns a tuple of nodes.
    """

    def rule(node, inputs):
        ### BEGIN SOLUTION
        if not inputs or any(i.role.value != "constant" for i in inputs) or isinstance(node.type, tuple):
            return None
        if any(not isinstance(size, int) for size in node.shape):
            return None
        return ht.constant(ht.evaluate(node.op.make(inputs, node.attrs)))
        ### END SOLUTION

    return ht.rewrite(outputs, rule)
