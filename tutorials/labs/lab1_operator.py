"""Lab 1: an operator with a gradient. After tutorial 3.

Softsign squeezes numbers into (-1, 1), more gently than tanh:

    softsign(x) = x / (scale + |x|)

Write its three rules. Check yourself with `hetu lab check 1`.
"""

import hetu as ht


@ht.op
def softsign(xp, x, *, scale=1.0):
    """The values. `xp` is the array module (NumPy, or CuPy on a GPU), `x` an array."""
    ### BEGIN SOLUTION
    return x / (scale + xp.abs(x))
    ### END SOLUTION


@softsign.grad
def softsign_grad(g, y, x, *, scale):
    """Given `g`, the gradient of the output, return the gradient of `x`, as a node. `y` is the output.

    Derive it on paper first: what is the slope for x > 0? For x < 0? One formula can say both.
    """
    ### BEGIN SOLUTION
    return g * scale / (scale + ht.abs(x)) ** 2
    ### END SOLUTION


@softsign.into
def softsign_into(xp, out, x, *, scale):
    """Write the values into `out` without making another array: every step must have an `out=`."""
    ### BEGIN SOLUTION
    xp.abs(x, out=out)
    xp.add(out, scale, out=out)
    xp.divide(x, out, out=out)
    ### END SOLUTION
