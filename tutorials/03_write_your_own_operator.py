# %% [markdown]
# # 3. Write your own operator
#
# **After this notebook you can** add an operator to hetu in three lines, give it a gradient, prove the gradient, make
# it faster, and say when you need none.

# %%
import numpy as np

import hetu as ht
from hetu.teach.device import best_device
from hetu.teach.try_it import try_it

device = best_device()  # "gpu" where there is one, else "cpu"

# %% [markdown]
# ## Three lines
#
# An operator is a function with a decorator. Its first argument is the array module: `xp` is NumPy here and CuPy on a
# GPU, so one text serves both. The arrays follow, and after the `*` the attributes, which are plain numbers.
#
# We add *swish* ([P. Ramachandran et al., 2017](https://arxiv.org/abs/1710.05941)), $y = x \, \sigma(\beta x)$, a
# smooth relative of [relu](README.md#relu).


# %%
@ht.op
def swish(xp, x, *, beta=1.0):
    return x / (1 + xp.exp(-beta * x))


x = ht.placeholder("x", (None, 4))
y = swish(x, beta=2.0)
print(ht.evaluate(y, {x: [[-2, -1, 0, 1]]}))
y

# %% [markdown]
# You registered, compiled and subclassed nothing. The last line shows a type: hetu worked out that swish of `f32[?,
# 4]` is `f32[?, 4]`. It ran your function once, on small arrays with a prime number for each unknown size, and found
# the primes in the result. A misspelled attribute gets the usual answer:

# %%
try:
    swish(x, bta=2.0)
except ht.errors.ArgumentError as error:
    print(error)

# %% [markdown]
# **Try it:** what is swish of 1 when beta is 0? Work it out on paper: $\sigma(0)$ is a half.

# %%
try_it(None, lambda: ht.evaluate(swish(x, beta=0.0), {x: np.ones((1, 4))})[0, 0], "y = x times sigmoid(beta x)")

# %% [markdown]
# ## Give it a gradient
#
# hetu can run swish but not differentiate it, and says what to do:

# %%
try:
    ht.gradients(ht.sum(y), [x])
except ht.errors.GradientError as error:
    print(error)

# %% [markdown]
# A gradient rule gets `g` (how much the loss changes with the output), the output and the inputs. It returns how much
# the loss changes with each input. All of these are nodes: the rule *writes graph*. Here is a first try. With $s =
# \sigma(\beta x)$ we have $y = x s$, so $dy/dx = s$, surely?


# %%
@swish.grad
def first_try(g, y, x, *, beta):
    return g * ht.sigmoid(beta * x)


try:
    ht.check_gradients(swish, (3, 4), beta=2.0)
except ht.errors.GradientError as error:
    print(error.text(where=False))

# %% [markdown]
# Caught. We forgot that s depends on x too: $dy/dx = s + x s'$. Since $s' = \beta s (1 - s)$, the second part is
# $\beta y (1 - s)$. The rule may use `y`, which exists already and costs nothing. A new rule replaces the old one.


# %%
@swish.grad
def swish_grad(g, y, x, *, beta):
    s = ht.sigmoid(beta * x)
    return g * (s + beta * y * (1 - s))


ht.check_gradients(swish, (3, 4), beta=2.0)

# %% [markdown]
# Silence means that the gradient agrees with finite differences, in first *and* second order. The second order is
# free: a rule that writes graph is differentiated like any other graph.
#
# A broadcast operand, say a bias that is added to a whole batch, needs no care from you. Autodiff sums its gradient
# back to its shape, in one place for all operators.
#
# **Try it:** write an operator `cube`, $x^3$, and its rule. `ht.check_gradients(cube, (3, 4))` is silent when it is
# right. What does its rule have to give for x = 2 and g = 1?

# %%
(cubed,) = ht.gradients(ht.sum(x**3), [x])
try_it(None, lambda: ht.evaluate(cubed, {x: np.full((1, 4), 2)})[0, 0], "the slope of x^3 is 3 x^2")

# %% [markdown]
# ## Use it like any other

# %%
train, test = ht.data.mnist("train").flat(), ht.data.mnist("test").flat()
pixels = ht.placeholder("pixels", (None, 784))
digit = ht.placeholder("digit", (None,), "int64")
network = ht.nn.Sequential(ht.nn.Linear(784, 64, activation=swish), ht.nn.Linear(64, 10))
logits = network(pixels)
loss = ht.mean(ht.softmax_cross_entropy(logits, digit))
updates = ht.optim.Adam(2e-3).minimize(loss)
executor = ht.Executor({"train": [loss, updates], "test": [logits]}, device=device)
for epoch in range(3):
    for batch, answers in ht.data.DataLoader(train, 50, shuffle=True, seed=epoch):
        executor.run("train", {pixels: batch, digit: answers})
test_images, test_labels = test.arrays
(scores,) = executor.run("test", {pixels: test_images})
print(f"{np.mean(scores.argmax(axis=1) == test_labels):.1%} of the test digits right")

# %% [markdown]
# **Try it:** which function that you know does swish become when beta grows without end? Answer with its name in hetu,
# as a text. (Try `ht.evaluate(swish(x, beta=100.0), ...)`.)

# %%
try_it(None, b"InJlbHUi", "what becomes of sigmoid(beta x) left and right of 0?")

# %% [markdown]
# ## Do you need an operator at all?
#
# swish can also be written as a plain Python function on nodes. Then it needs no rule at all:


# %%
def composed_swish(x, beta=1.0):
    return x / (1 + ht.exp(-beta * x))


big = ht.placeholder("big", (1000, 1000))
print(ht.Executor([composed_swish(big)]).program({big: np.ones((1000, 1000))}))

# %% [markdown]
# Four operators work in one array of four megabytes. Where a C compiler is found they are even one instruction,
# [`fused`](README.md#names-in-a-program): hetu has put them into one loop. Without one they are four, each of which
# overwrites its operand ("in place"). Our own operator is one instruction, but inside it NumPy makes a new array for
# every step of the formula. It can avoid that by writing *into* the result. This rule is optional, like all others:


# %%
@swish.into
def swish_into(xp, out, x, *, beta):
    xp.multiply(x, -beta, out=out)
    xp.exp(out, out=out)
    xp.add(out, 1, out=out)
    xp.divide(x, out, out=out)


def milliseconds(node):
    return 1e3 * ht.profile(ht.Executor([node], device=device), {big: np.ones((1000, 1000))}).seconds


composed, own = milliseconds(composed_swish(big)), milliseconds(swish(big))
print(
    f"composed of operators {composed:.2f} ms, an operator with into {own:.2f} ms, {own / composed:.1f} times as long"
)

# %% [markdown]
# The loop in C wins; without a compiler both take about as long. So the honest answer is: **a composition needs no
# operator; write a function.** An operator pays when no composition offers the computation, or when its backward pass
# can be much cheaper than the one autodiff finds. (With its formula in C, `code="y = x / (1 + exp(-beta * x))"` in
# `@ht.op`, it becomes such a loop itself; see [notebook 12](12_a_cuda_kernel_without_a_gpu.ipynb).)
#
# **Try it:** how many megabytes would NumPy have to make for `x / (1 + exp(-beta * x))` when every step of the formula
# has an array of its own, its result included? A step is one operation: count four.

# %%
try_it(None, lambda: 4 * np.ones((1000, 1000), "f").nbytes / 1e6, "one array has a million numbers of 4 bytes")

# %% [markdown]
# ## An operator that the others cannot do well
#
# We want all squared distances between two sets of points. The forward function is clear; its gradient takes thought.
# So give hetu the same result in graph functions (`decompose`), and it differentiates that.


# %%
@ht.op
def distances(xp, a, b):
    """Squared distances: (n, d), (m, d) -> (n, m)."""
    return xp.sum((a[:, None, :] - b[None, :, :]) ** 2, axis=2)


@distances.decompose
def distances_in_parts(a, b):
    squares = ht.sum(a * a, 1, keepdims=True) + ht.sum(b * b, 1)
    return squares - 2 * a @ ht.matrix_transpose(b)


ht.check_gradients(distances, (3, 4), (5, 4))

# %% [markdown]
# A shape that does not fit fails on the faulty line, in the operator's own words:

# %%
points = ht.placeholder("points", (None, 2))
try:
    distances(points, np.zeros((5, 3), np.float32))
except ht.errors.ShapeError as error:
    print(error)

# %% [markdown]
# The operator has a gradient, so training works through it. Four centers look for 300 points in four heaps; each
# point pulls its nearest center. That is k-means ([S. Lloyd, 1957](https://doi.org/10.1109/TIT.1982.1056489)) by
# gradient descent:

# %%
rng = np.random.default_rng(1)
heaps = np.array([[0, 0], [4, 0], [0, 4], [5, 5]], np.float32)
cloud = heaps[rng.integers(4, size=300)] + rng.normal(0, 0.5, (300, 2))
centers = ht.variable("centers", rng.normal(2, 1, (4, 2)), (4, 2))
nearest = ht.mean(ht.min(distances(points, centers), axis=1))
executor = ht.Executor([nearest, ht.optim.Momentum(0.2, 0.5).minimize(nearest)], device=device)
losses = [executor.run({points: cloud})[0] for _ in range(60)]
print(executor.state["centers"].round(1).tolist())
ht.look.curves_svg({"mean squared distance to the nearest center": losses}, label="step")

# %% [markdown]
# **Try it:** what is the operator's value for the points (0, 0) and (3, 4)?

# %%
try_it(None, lambda: ht.evaluate(distances(points, np.array([[3, 4]], "f")), {points: [[0, 0]]})[0, 0], "squared")

# %% [markdown]
# **What to remember.** `@ht.op` makes an operator, `.grad` (or `.decompose`) its derivative, `check_gradients` the
# proof, `.into` the speed. Every rule is optional. `hetu/README.md` has the table of all rules; lab 1 lets you write
# an operator from scratch.
#
# Next: [what hetu does to your graph before it runs](04_passes_memory_and_the_program.ipynb).
