"""Lab 5: an optimizer. After tutorials 2 and 5.

*Lion* (X. Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023) was found by a computer that searched
through programs. It takes only the *sign* of a mixture of the gradient g and a running mean m, so that every parameter
moves by the same amount:

    p' = p - rate * sign(beta1 * m + (1 - beta1) * g)
    m' = beta2 * m + (1 - beta2) * g

An optimizer in hetu is a function from nodes to nodes: old values in, new values out. `self.slot(p, "lion_m")` is a
variable of the shape of p that starts as zeros.

Check yourself with `hetu lab check 5`.
"""

import hetu as ht


class Lion(ht.optim.Optimizer):
    def __init__(self, learning_rate=1e-3, *, beta1=0.9, beta2=0.99, **options):
        super().__init__(learning_rate, **options)
        self.beta1, self.beta2 = beta1, beta2

    def new_values(self, p, g, rate, step):
        """A dict {variable: new value}, for `p` and for its running mean.

        `g` is the gradient of `p`, `rate` a number or, under a schedule, a node of dtype float64.
        """
        ### BEGIN SOLUTION
        m = self.slot(p, "lion_m")
        direction = ht.sign(self.beta1 * m + (1 - self.beta1) * g)
        moved = ht.astype(p - rate * direction, p.dtype)
        return {p: moved, m: self.beta2 * m + (1 - self.beta2) * g}
        ### END SOLUTION
