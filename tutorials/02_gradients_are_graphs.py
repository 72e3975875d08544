# %% [markdown]
# # 2. Gradients are graphs
#
# **After this notebook you can** ask for any derivative, read it as a graph, differentiate it again, train with
# nothing but a dictionary, and tell whether a gradient is right.

# %%
import math

import numpy as np

import hetu as ht
from hetu.teach.device import best_device
from hetu.teach.try_it import try_it

device = best_device()  # "gpu" where there is one, else "cpu"

# %% [markdown]
# ## The slope of x sin x
#
# `ht.gradients(y, [x])` returns dy/dx for each node that you list. It computes no number. It *adds nodes to your
# graph*: the pink ones.

# %%
x = ht.placeholder("x", (), "float64")
y = ht.sin(x) * x
(slope,) = ht.gradients(y, [x])
ht.Graph([y, slope])

# %% [markdown]
# How does it know? Nobody differentiates the whole function. Each *operator* has a small rule: "if the loss changes
# by `g` per unit of my output, by how much does it change per unit of my inputs?" For `sin` the rule is `g * cos(x)`.
# hetu walks backward from the loss and hands each operator the gradient that has arrived so far. Where a node was
# used twice, as `x` was here, the contributions are added. That is automatic differentiation in *reverse mode*,
# complete.
#
# On paper, $\frac{d}{dx}(x \sin x) = \sin x + x \cos x$:

# %%
print(ht.evaluate(slope, {x: 1.0}), math.sin(1.0) + math.cos(1.0))

# %% [markdown]
# **Try it:** how steep is the curve at x = 0?

# %%
try_it(None, lambda: ht.evaluate(slope, {x: 0.0}), "put 0 into the formula on paper")

# %% [markdown]
# ## Once more, please
#
# A gradient is an ordinary graph. It can be printed, simplified, run on many machines, and differentiated.

# %%
orders = [y]
for _ in range(2):
    orders += ht.gradients(orders[-1], [x])
executor = ht.Executor(orders, device=device)  # three nodes, computed together
places = np.linspace(-6, 6, 121)
heights = np.array([executor.run({x: place}) for place in places])
names = ["x sin x", "its slope", "the slope of its slope"]
ht.look.curves_svg(dict(zip(names, heights.T)), places, label="x")

# %% [markdown]
# Check by eye: where the blue curve is flat, the red one crosses zero.
#
# **Try it:** what is the slope of `ht.exp(x * x)` at 1? Write it down on paper first.

# %%
(other,) = ht.gradients(ht.exp(x * x), [x])
try_it(None, lambda: ht.evaluate(other, {x: 1.0}), "the chain rule: the slope of x * x is 2 x")

# %% [markdown]
# ## Training is a dictionary
#
# A thermometer is read at noon and in the evening. We suspect $\text{evening} = w \cdot \text{noon} + b$, and start
# from nothing:

# %%
rng = np.random.default_rng(0)
noons = rng.uniform(0, 30, 200)
evenings = 0.7 * noons - 2 + rng.normal(0, 1, 200)

noon, evening = ht.placeholder("noon", (None,)), ht.placeholder("evening", (None,))
w, b = ht.variable("w", 0.0, ()), ht.variable("b", 0.0, ())
loss = ht.mean((w * noon + b - evening) ** 2)

# %% [markdown]
# Learning moves each variable a little against its slope. An update is therefore just `{variable: new value}`, in
# graph nodes. An executor commits such a mapping at the end of every step.

# %%
dw, db = ht.gradients(loss, [w, b])
updates = {w: w - 0.002 * dw, b: b - 0.2 * db}
executor = ht.Executor([loss, updates], device=device)
losses = [executor.run({noon: noons, evening: evenings})[0] for _ in range(60)]
print(f"evening = {executor.state['w']:.2f} * noon + {executor.state['b']:.2f}")
ht.look.curves_svg({"loss": losses}, label="step", up="loss", log=True)

# %% [markdown]
# The noise has a variance of 1, so no line gets below a loss of about 1.
#
# `ht.optim.SGD(0.002).minimize(loss)` would have built the same mapping with one rate. An optimizer does nothing else;
# `sgd` is its formula as one operator, and `optimizer/step` counts steps:

# %%
for variable, value in ht.optim.SGD(0.002).minimize(loss).items():
    print(f"{variable.name:15} <- {value}")

# %% [markdown]
# **Try it:** why do the two rates, 0.002 and 0.2, differ so much? Take one noon of 30 degrees, at which the line is
# wrong by 1 degree: what is the slope of the loss in `w`? (That in `b` is 2.)

# %%
try_it(
    None, lambda: ht.evaluate(dw, {noon: [30.0], evening: [-1.0]}), "the chain rule: two times the error, times noon"
)

# %% [markdown]
# ## A better step: Newton
#
# Here is a valley that optimizers hate ([H. Rosenbrock, 1960](https://doi.org/10.1093/comjnl/3.3.175)). It has steep
# sides, a nearly flat curved floor, and its lowest point at (1, 1). Gradient descent bounces between the sides or
# crawls.
#
# Newton's method divides the slope $g$ by the *curvature* $H$, a 2 x 2 matrix of second derivatives: a step goes by
# $H^{-1} g$. The first derivatives are a graph, so the second ones take two more calls of `gradients`:

# %%
p = ht.variable("p", np.array([-1.5, 2.0]), (2,), "float64")
valley = (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2
(g,) = ht.gradients(valley, [p])
(row0,), (row1,) = (ht.gradients(g[i], [p]) for i in (0, 1))  # the curvature matrix
solved = row1[1] * g[0] - row0[1] * g[1], row0[0] * g[1] - row1[0] * g[0]
newton = ht.stack(solved) / (row0[0] * row1[1] - row0[1] * row1[0])


def descend(step, steps=30):
    executor = ht.Executor([valley, {p: p - step}], device=device)
    return [executor.run()[0] for _ in range(steps)]


heights = {"gradient descent": descend(0.001 * g), "Newton": descend(newton)}
print(f"Newton is at zero after {heights['Newton'].index(0)} steps,")
print(f"gradient descent after 2,000 steps at a height of {descend(0.001 * g, 2000)[-1]:.3f}")
ht.look.curves_svg(heights, label="step", up="height", log=True)

# %% [markdown]
# Newton first jumps up the far side and then lands. (A logarithm has no zero, so the line ends.)
#
# **Try it:** if the valley were a parabola, how many steps would Newton's method need, wherever it starts?

# %%
try_it(None, b"MQ==", "a parabola has the same curvature everywhere, so what does the step assume that is not so?")

# %% [markdown]
# ## Is it right?
#
# A derivative can always be checked from outside: move the input a little and see how far the output moves.
# `check_gradients` does so along random directions, for the first *and* the second derivative, and is silent when
# they agree.

# %%
ht.check_gradients(lambda a, b: ht.tanh(a @ b) * ht.mean(a), (3, 4), (4, 5))

# %% [markdown]
# **Try it:** take `ht.stop_gradient(ht.mean(a))` in its place. Does the check pass? Answer True or False.


# %%
def passes(function):
    try:
        ht.check_gradients(function, (3, 4), (4, 5))
    except ht.errors.GradientError:
        return False
    return True


def stopped(a, b):
    return ht.tanh(a @ b) * ht.stop_gradient(ht.mean(a))


try_it(None, lambda: passes(stopped), "moving `a` still moves the mean, but a part of the slope is missing")

# %% [markdown]
# ## Where no gradient flows
#
# `stop_gradient` lets a value through but not its gradient. If no path is left, hetu says so. (Silence would cost you
# a day: a variable that never learns looks like a bad learning rate.)

# %%
try:
    ht.gradients(ht.stop_gradient(x) * 2, [x])
except ht.errors.GradientError as error:
    print(error)

# %% [markdown]
# **Try it:** what is the slope of `x * ht.stop_gradient(x)` at 3?

# %%
(half,) = ht.gradients(x * ht.stop_gradient(x), [x])
try_it(None, lambda: ht.evaluate(half, {x: 3.0}), "the second factor counts as a constant")

# %% [markdown]
# **What to remember.** Operators have rules, graphs have gradients, and gradients are graphs. A training step is a
# loss and a dictionary. Lab 2 lets you build the backward walk yourself, in fifteen lines (`hetu lab release`).
#
# Next: [write your own operator](03_write_your_own_operator.ipynb) and give it such a rule.
