# %% [markdown]
# # 1. A graph in ten lines
#
# **After this notebook you can** write a model as a graph, read that graph, run it, train it on real digits, and
# understand what hetu tells you when something does not fit.
#
# You need Python and a little NumPy. It takes ten minutes, of which the computer uses a few seconds.

# %%
import numpy as np

import hetu as ht
from hetu.teach.device import best_device
from hetu.teach.try_it import try_it

device = best_device()  # "gpu" where there is one, else "cpu"

# %% [markdown]
# ## Writing is not computing
#
# A hetu program has two parts. First you **write down** the computation. Then you **run** it, as often as you like. A
# `placeholder` stands for data that comes later; `None` is a size that is not known yet.

# %%
x = ht.placeholder("x", (None, 3))
y = ht.exp(x) * 2 + 1
y

# %% [markdown]
# `y` is not an array. It is a *node*: it remembers its operator, its inputs, the type of its result (`f32` is
# float32, `?` the unknown size), and the line of yours that made it. Nothing was computed. You have built a
# **graph**, and a graph can be drawn. Data flows from top to bottom:

# %%
ht.Graph([y])

# %% [markdown]
# The same graph as text has one row per node. The line where you wrote it follows the `#`. `%0` is the first node.

# %%
print(ht.Graph([y]))

# %% [markdown]
# `ht.evaluate` computes one node. Feed two rows, then five: the same graph serves both.

# %%
print(ht.evaluate(y, {x: np.zeros((2, 3))}))
print(ht.evaluate(y, {x: np.zeros((5, 3))}).shape)

# %% [markdown]
# **Try it:** what is the shape of the result when you feed seven rows? Answer with a tuple.

# %%
try_it(None, lambda: ht.evaluate(y, {x: np.zeros((7, 3))}).shape, "`exp` keeps the shape of what it is given")

# %% [markdown]
# ## Mistakes are found on your line
#
# Every node has a type, so a mistake shows when you *write* it: before any data is loaded, on the faulty line, with
# the expression marked. The message has three parts: what does not fit, where, and what to do.

# %%
weights = ht.variable("weights", ht.init.zeros, (4, 2))
try:
    scores = ht.tanh(x) @ weights
except ht.errors.ShapeError as error:
    print(error)

# %% [markdown]
# Most libraries would tell you only when the first batch arrives.
#
# **Try it:** how many rows must `weights` have for the product to fit?

# %%
try_it(None, lambda: ht.tanh(x).shape[-1], "look at the message: which two sizes have to be equal?")

# %% [markdown]
# ## Ten lines
#
# Now something real: handwritten digits, 4,000 for training and 1,000 for testing. They ship with hetu.

# %%
train, test = ht.data.mnist("train").flat(), ht.data.mnist("test").flat()
images, labels = train.arrays


def draw(image):
    for row in image.reshape(28, 28)[3:27:2]:  # every other: characters are high and narrow
        print("".join(" .:*#@"[round(5 * float(v))] for v in row[3:25]))


draw(images[5])
print(f"This is a {labels[5]}; to the network it is {images[5].size} numbers.")

# %% [markdown]
# Two layers turn 784 numbers into ten scores, one per digit. Between them stands a [relu](README.md#relu). The
# *[loss](README.md#loss)* says how wrong the scores are: the [cross entropy](README.md#cross-entropy) of their
# [softmax](README.md#softmax). The optimizer returns a plain mapping `{variable: its new value}`; there is no hidden
# state anywhere.

# %%
pixels = ht.placeholder("pixels", (None, 784))
digit = ht.placeholder("digit", (None,), "int64")
hidden = ht.nn.Linear(784, 64, activation=ht.relu)(pixels)
logits = ht.nn.Linear(64, 10)(hidden)
loss = ht.mean(ht.softmax_cross_entropy(logits, digit))
updates = ht.optim.Adam(2e-3).minimize(loss)
executor = ht.Executor({"train": [loss, updates], "test": [loss, logits]}, device=device)
for epoch in range(4):
    for batch, answers in ht.data.DataLoader(train, 50, shuffle=True, seed=epoch):
        executor.run("train", {pixels: batch, digit: answers})

# %% [markdown]
# Those were the ten lines. How good is the model on digits it has never seen?

# %%
test_images, test_labels = test.arrays
test_loss, scores = executor.run("test", {pixels: test_images, digit: test_labels})
right = scores.argmax(axis=1) == test_labels
print(f"test loss {test_loss:.3f}, {right.mean():.1%} of 1,000 digits right")

# %% [markdown]
# An untrained network gets one in ten right. Here is a digit that the trained one got wrong. Would you have known?

# %%
wrong = np.flatnonzero(~right)[0]
draw(test_images[wrong])
print(f"The network says {scores[wrong].argmax()}, the label says {test_labels[wrong]}.")

# %% [markdown]
# **Try it:** how many of these 1,000 digits would a program get right that always says 1? Then train with 8 hidden
# units, not 64: how many digits are right now?

# %%
try_it(None, lambda: (test_labels == 1).sum(), "count the ones among `test_labels`")

# %% [markdown]
# ## What you just built
#
# This is the graph of the loss; frames are layers. Yellow nodes come from outside (placeholders), violet ones last
# between steps (variables), blue ones are computed.

# %%
ht.Graph([loss])

# %% [markdown]
# The executor keeps only this: every variable by name. [Adam](README.md#adam)'s running means are variables like the
# weights, so saving, resuming and (later) spreading a model over machines needs no special case for them.

# %%
for name, value in executor.state.items():
    print(f"{name:24} {value.dtype!s:8} {value.shape}")

# %% [markdown]
# **Try it:** how many numbers does this executor keep for one weight of a layer?

# %%
try_it(None, b"Mw==", "the weight itself, and the running means of Adam")

# %% [markdown]
# **What to remember.** A *node* is an operator applied to nodes. A *graph* is a tuple of nodes. An *executor* runs
# graphs and owns the values of variables. You wrote the loss, but not its derivative. Where did the updates come
# from? [The next notebook](02_gradients_are_graphs.ipynb) answers that.
