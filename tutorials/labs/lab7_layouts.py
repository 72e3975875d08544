"""Lab 7: layouts. How a product is computed by two ranks, each with a part of the data.

A *layout* says what two ranks hold of a matrix:

    DUP   both hold all of it
    0     rank 0 holds the upper half of the rows, rank 1 the lower half
    1     rank 0 holds the left half of the columns, rank 1 the right half
    SUM   both hold a matrix of the full size, and what is meant is the sum of the two

From this one idea come data parallelism, tensor parallelism and sharded optimizers. Fill in the two functions.
Check yourself with `hetu lab check 7`: it really computes on two ranks what you claim.
"""

DUP, SUM = "DUP", "SUM"
LAYOUTS = (DUP, 0, 1, SUM)


def product(x, w):
    """The layout of x @ w, if each rank just multiplies its part of x with its part of w and nothing is sent.

    `x` and `w` are layouts. None where the parts do not fit together, or their products mean nothing useful.

    Sixteen cases, but few rules. Think of the element y[i, j], the sum over k of x[i, k] * w[k, j]: which rank has i?
    Which has j? Which has k?
    """
    ### BEGIN SOLUTION
    results = {
        (DUP, DUP): DUP,
        (0, DUP): 0,  # the rank that has i
        (DUP, 1): 1,  # the rank that has j
        (1, 0): SUM,  # each rank has half of the ks
        (SUM, DUP): SUM,  # a product is linear in each factor, but not in both
        (DUP, SUM): SUM,
    }
    return results.get((x, w))
    ### END SOLUTION


def communication(before, after):
    """What brings a matrix from one layout to another (never to SUM), at the least cost: one of

    "nothing"         it is there already, or each rank just drops what it does not need
    "all_gather"      everybody gets the parts of all
    "all_reduce"      everybody gets the sum
    "reduce_scatter"  everybody gets their part of the sum
    "all_to_all"      everybody has something for everybody
    """
    ### BEGIN SOLUTION
    if before in (after, DUP):
        return "nothing"
    if before == SUM:
        return "all_reduce" if after == DUP else "reduce_scatter"
    return "all_gather" if after == DUP else "all_to_all"
    ### END SOLUTION
