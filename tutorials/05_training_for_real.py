# %% [markdown]
# # 5. Training for real
#
# **After this notebook you can** train a convolutional network with validation and early stopping, interrupt it and
# continue bit for bit, find where the time goes, and hunt down a NaN.

# %%
import tempfile
from pathlib import Path

import numpy as np

import hetu as ht

# %% [markdown]
# ## Data
#
# A data set is columns of equal length. A `DataLoader` deals it out in batches, in an order that depends on nothing
# but the seed and the number of the epoch. Three sets, three purposes: learn from `train`, decide by `valid`, and
# look at `test` once, at the end.

# %%
everything, test = ht.data.fashion_mnist("train"), ht.data.fashion_mnist("test")
train, valid = everything.split(0.85, seed=0)
print(train, valid, test, sep="\n")
print(*everything.info["classes"], sep=", ")
batches = ht.data.DataLoader(train, 50, shuffle=True, seed=0)
images, labels = next(iter(batches))
print("a batch:", images.shape, images.dtype, labels[:8])

# %% [markdown]
# ## A model
#
# Layers are objects that own variables; calling one adds nodes. `ht.summary` says what there is to learn.

# %%
image = ht.placeholder("image", (None, 28, 28))
label = ht.placeholder("label", (None,), "int64")
network = ht.nn.Sequential(
    ht.nn.Conv2d(1, 8, 3, padding=1, activation=ht.relu),
    ht.nn.MaxPool2d(2),
    ht.nn.Conv2d(8, 16, 3, padding=1, activation=ht.relu),
    ht.nn.MaxPool2d(2),
    ht.nn.Flatten(),
    ht.nn.Dropout(0.3),
    ht.nn.Linear(784, 10),
)
logits = network(ht.expand_dims(image, axis=1))
loss = ht.mean(ht.softmax_cross_entropy(logits, label))
print(ht.summary(loss))

# %% [markdown]
# Dropout switches off random features while *training* and none while *testing*. Where is the switch? There is none
# to forget: a sub-graph trains if and only if it commits updates. One graph, two programs:

# %%
EPOCHS = 10
rate = ht.schedules.cosine(4e-3, steps=EPOCHS * len(batches))  # a graph, too
updates = ht.optim.Adam(rate).minimize(loss)
subgraphs = {"train": [loss, updates], "eval": [loss, logits]}
executor = ht.Executor(subgraphs, seed=0)
for name in subgraphs:
    nodes = executor.program(name, {image: images, label: labels}).plan.nodes
    print(name, sorted({n.op.name for n in nodes if "random" in n.op.forward.__module__}))

# %% [markdown]
# ## Fit
#
# `ht.fit` is the loop you would write: a step for each batch, validation after each epoch, a checkpoint if you name a
# file.

# %%
folder = tempfile.TemporaryDirectory()
checkpoint = Path(folder.name) / "fashion"
recipe = {
    "inputs": (image, label),
    "validate": ("eval", ht.data.DataLoader(valid, 150)),
    "metrics": {"accuracy": ht.metrics.Accuracy()},
    "progress": False,
}
history = ht.fit(executor, batches, epochs=EPOCHS, **recipe)
print(history)
history

# %% [markdown]
# The two curves are worth a look in any training you will ever do. Both fall: it learns. Only `loss` falls while
# `val_loss` rises: it learns by heart; stop there (`patience=2` would). Neither falls: see the last section.
#
# Now the one look at the test set. Which classes are mixed up most?

# %%
test_images, test_labels = test.arrays
_, scores = executor.run("eval", {image: test_images, label: test_labels})
guesses, classes = scores.argmax(axis=1), test.info["classes"]
print(f"{np.mean(guesses == test_labels):.1%} right")
pairs = np.zeros((10, 10), int)
np.add.at(pairs, (test_labels, guesses), guesses != test_labels)
for place in pairs.argsort(axis=None)[:-4:-1]:
    true, guess = divmod(place, 10)
    print(f"{pairs[true, guess]} times a {classes[true]} was taken for a {classes[guess]}")

# %% [markdown]
# ## Stop, and go on
#
# Train two epochs, and throw everything away but the checkpoint. Then build anew and resume. Not "roughly the same":
# every variable, Adam's means, the order of the data and the random numbers of dropout continue where they were.


# %%
def anew():
    return ht.data.DataLoader(train, 50, shuffle=True, seed=0)


first = ht.Executor(subgraphs, seed=0)
ht.fit(first, anew(), epochs=2, checkpoint=checkpoint, **recipe)

second = ht.Executor(subgraphs, seed=123)  # another seed: all that counts is in the file
ht.fit(second, anew(), epochs=EPOCHS, checkpoint=checkpoint, resume=True, **recipe)
same = (np.array_equal(executor.state[name], second.state[name]) for name in executor.state)
print("bit for bit the unbroken run:", all(same))
folder.cleanup()

# %% [markdown]
# The file is written aside and then renamed, so a crash while saving leaves the old one. It holds arrays and nothing
# else: loading a stranger's checkpoint runs no code of theirs.
#
# ## Where does the time go?
#
# Guessing is a sport. Measuring is one line. What is timed is exactly the program that `run` executes.

# %%
measured = ht.profile(executor, "train", {image: images, label: labels})
print(measured.table(limit=8))

# %% [markdown]
# By layer, or by the line of your code (`"line"`), as you like it:

# %%
print(measured.table(by="layer", limit=8))

# %% [markdown]
# ## Hunting a NaN
#
# One day a loss becomes `nan`, and everything after it. Here is a model with such a day: the square root of a
# negative number. `ht.debug_nans` runs the step again slowly and names the *first* culprit and its operands. The
# broken step is not committed, so the variables are still good.

# %%
reading = ht.placeholder("reading", (None,))
scale = ht.variable("scale", 1.0, ())
risky = ht.mean(ht.sqrt(scale * reading - 1) * 2)
careless = ht.Executor([risky, ht.optim.SGD(0.1).minimize(risky)])
try:
    with ht.debug_nans():
        careless.run({reading: [3.0, 2.0, 0.5]})
except ht.errors.NumericError as error:
    print(error)

# %% [markdown]
# **What to remember.** A loader with a seed, a graph, a dictionary of updates, an executor, and `fit` around them:
# none hides anything from the others, so a run can be stopped, repeated and taken apart. Lab 5: write your own
# optimizer.
#
# You now know all of hetu on one machine. Next: [the same model on many](06_data_parallel.ipynb).
