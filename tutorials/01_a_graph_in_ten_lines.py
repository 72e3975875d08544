# %% [markdown]
# # 1. A graph in ten lines
#
# **After this notebook you can** write a model as a graph, read that graph, run it, train it on real digits, and
# understand what hetu tells you when something does not fit.
#
# You need: Python, a little NumPy. Time: ten minutes, of which the computer takes a few seconds.

# %%
import numpy as np

import hetu as ht

# %% [markdown]
# ## Writing is not computing
#
# A hetu program has two parts. First you **write down** what should be computed, then you **run** it, as often as you
# like. A `placeholder` stands for data that will come later; `None` is a size that is not known yet.

# %%
x = ht.placeholder("x", (None, 3))
y = ht.exp(x) * 2 + 1
y

# %% [markdown]
# `y` is not an array. It is a *node*: it remembers the operator that makes it, what goes in, the type of what will
# come out (`f32` is float32, `?` the unknown size), and the line of yours that made it. Nothing was computed. What
# you have built is a **graph**, and it can be drawn. Data flows from top to bottom:

# %%
ht.Graph([y])

# %% [markdown]
# The same as text: one row for each node, and behind the `#` where you wrote it. `%0` is the first node.

# %%
print(ht.Graph([y]))

# %% [markdown]
# `ht.evaluate` computes one node. Feed two rows, then five: the same graph serves both.

# %%
print(ht.evaluate(y, {x: np.zeros((2, 3))}))
print(ht.evaluate(y, {x: np.zeros((5, 3))}).shape)

# %% [markdown]
# ## Mistakes are found on your line
#
# Because every node has a type, a mistake shows when you *write* it: before any data is loaded, on the line that is
# wrong, with the expression marked. Read the three parts: what does not fit, where, and what to do.

# %%
weights = ht.variable("weights", ht.init.zeros, (4, 2))
try:
    scores = ht.tanh(x) @ weights
except ht.errors.ShapeError as error:
    print(error)

# %% [markdown]
# Most libraries would have told you in the middle of the night, on the first batch. **Try it:** make `weights` three
# rows high and run the cell again.
#
# ## Ten lines
#
# Now something real: handwritten digits, 4,000 to learn from and 1,000 to be tested on. They came with hetu.

# %%
train, test = ht.data.mnist("train").flat(), ht.data.mnist("test").flat()
images, labels = train.arrays


def draw(image):
    for row in image.reshape(28, 28)[3:27:2]:  # every other: characters are high and narrow
        print("".join(" .:*#@"[round(5 * float(v))] for v in row[3:25]))


draw(images[5])
print(f"This is a {labels[5]}; to the network it is {images[5].size} numbers.")

# %% [markdown]
# Two layers turn 784 numbers into ten scores, one for each digit. The *loss* says how wrong the scores are. The
# optimizer answers with a plain mapping `{variable: its new value}`; there is no hidden state anywhere.

# %%
pixels = ht.placeholder("pixels", (None, 784))
digit = ht.placeholder("digit", (None,), "int64")
hidden = ht.nn.Linear(784, 64, activation=ht.relu)(pixels)
logits = ht.nn.Linear(64, 10)(hidden)
loss = ht.mean(ht.softmax_cross_entropy(logits, digit))
updates = ht.optim.Adam(2e-3).minimize(loss)
executor = ht.Executor({"train": [loss, updates], "test": [loss, logits]})
for epoch in range(4):
    for batch, answers in ht.data.DataLoader(train, 50, shuffle=True, seed=epoch):
        executor.run("train", {pixels: batch, digit: answers})

# %% [markdown]
# Those were the ten lines. How good is it on digits it has never seen?

# %%
test_images, test_labels = test.arrays
test_loss, scores = executor.run("test", {pixels: test_images, digit: test_labels})
right = scores.argmax(axis=1) == test_labels
print(f"test loss {test_loss:.3f}, {right.mean():.1%} of 1,000 digits right")

# %% [markdown]
# An untrained network gets one in ten. Look at a digit that it got wrong. Would you have known?

# %%
wrong = np.flatnonzero(~right)[0]
draw(test_images[wrong])
print(f"The network says {scores[wrong].argmax()}, the label says {test_labels[wrong]}.")

# %% [markdown]
# ## What you just built
#
# The graph of the loss, layers framed. Yellow comes from outside (placeholders), violet is remembered between steps
# (variables), blue is computed.

# %%
ht.Graph([loss])

# %% [markdown]
# And this is all that the executor keeps: every variable by name. Adam's running means are variables like the
# weights, so saving, resuming and (later) spreading a model over machines needs no special case for them.

# %%
for name, value in executor.state.items():
    print(f"{name:24} {value.dtype!s:8} {value.shape}")

# %% [markdown]
# **What to remember.** A *node* is an operator applied to nodes. A *graph* is a tuple of nodes. An *executor* runs
# graphs and owns the values of variables. You wrote the loss, but never how to differentiate it: where did the
# updates come from? That is [the next notebook](02_gradients_are_graphs.ipynb).
