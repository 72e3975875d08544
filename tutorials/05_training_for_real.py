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
from hetu.teach.device import best_device
from hetu.teach.try_it import try_it

device = best_device()  # "gpu" where there is one, else "cpu"

# %% [markdown]
# ## Data
#
# A data set consists of columns of equal length. A `DataLoader` deals it out in batches; their order depends only on
# the seed and the number of the epoch. Three sets have three purposes: learn from `train`, decide by `valid`, and
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
# **Try it:** how many batches has an epoch? All have 50 pictures but the last.

# %%
try_it(None, lambda: len(batches), "divide what is left to train from, and round up")

# %% [markdown]
# ## A model
#
# Layers are objects that own variables; calling one adds nodes. Here are two [convolutions](README.md#convolution).
# `ht.summary` lists the variables to learn.

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
# [Dropout](README.md#dropout) switches off random features while *training* and none while *testing*. There is no
# switch to forget: a sub-graph trains if and only if it commits updates. One graph gives two programs:

# %%
EPOCHS = 10
rate = ht.schedules.cosine(4e-3, steps=EPOCHS * len(batches))  # a graph, too
updates = ht.optim.Adam(rate).minimize(loss)
subgraphs = {"train": [loss, updates], "eval": [loss, logits]}
executor = ht.Executor(subgraphs, seed=0, device=device)
for name in subgraphs:
    nodes = executor.program(name, {image: images, label: labels}).plan.nodes
    print(name, sorted({n.op.name for n in nodes if "random" in n.op.forward.__module__}))

# %% [markdown]
# **Try it:** how many numbers does the last layer learn? Then look at the summary.

# %%
try_it(None, b"Nzg1MA==", "a weight for each input and output, and a bias for each output")

# %% [markdown]
# ## Fit
#
# `ht.fit` is the loop you would write: one step per batch, validation after each epoch, and a checkpoint if you name
# a file.

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
# Look at these two curves in every training. If both fall, the model learns. If `loss` falls while `val_loss` rises,
# it learns by heart; stop there (`patience=2` would). If neither falls, see the last section.
#
# Now take the one look at the test set. Which classes are confused most?

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
# **Try it:** in which epoch, counted from 1, was the loss of validation the lowest? Then leave the dropout out: which
# of the two curves changes, and which number tells?

# %%
try_it(None, lambda: int(np.argmin(history["val_loss"])) + 1, "print(history)")

# %% [markdown]
# ## Stop, and go on
#
# Train for two epochs and throw away everything but the checkpoint. Then build the model anew and resume. The result
# is not "roughly the same": every variable, Adam's means, the order of the data and the random numbers of dropout
# continue where they were.


# %%
def anew():
    return ht.data.DataLoader(train, 50, shuffle=True, seed=0)


first = ht.Executor(subgraphs, seed=0, device=device)
ht.fit(first, anew(), epochs=2, checkpoint=checkpoint, **recipe)

second = ht.Executor(subgraphs, seed=123, device=device)  # another seed: all that counts is in the file
ht.fit(second, anew(), epochs=EPOCHS, checkpoint=checkpoint, resume=True, **recipe)
same = (np.array_equal(executor.state[name], second.state[name]) for name in executor.state)
print("bit for bit the unbroken run:", all(same))
folder.cleanup()

# %% [markdown]
# The file is written beside the old one and then renamed, so a crash while saving leaves the old one intact. It holds
# only arrays: loading a stranger's checkpoint runs none of their code.
#
# **Try it:** how many steps of training has `second` made itself?

# %%
try_it(None, lambda: (EPOCHS - 2) * len(batches), "two epochs were in the file")

# %% [markdown]
# ## Where does the time go?
#
# Measuring takes one line. It times exactly the program that `run` executes.

# %%
measured = ht.profile(executor, "train", {image: images, label: labels})
print(measured.table(limit=8))

# %% [markdown]
# You wrote no `conv2d_last_dx`. [Gradients and passes](README.md#names-in-a-program) made it: names that end in `_dx`
# and `_dw` are gradients by the input and by the weights, `_last` is a convolution whose channels come last, and
# `fused` are small operators in one loop. You can group by layer or by the line of your code (`"line"`):

# %%
print(measured.table(by="layer", limit=8))

# %% [markdown]
# **Try it:** how many million multiplications does the first convolution need for a batch of 50? Each of its 8 results
# per pixel multiplies 3 times 3 numbers, and its padding keeps 28 times 28 pixels.

# %%
try_it(None, lambda: 50 * 28 * 28 * 8 * 9 / 1e6, "pictures times pixels times results times 9")

# %% [markdown]
# ## Hunting a NaN
#
# One day a loss becomes `nan`, and so does everything after it. This model takes the square root of a negative
# number. `ht.debug_nans` runs the step again slowly and names the *first* culprit and its operands. The broken step
# is not committed, so the variables are still good.

# %%
reading = ht.placeholder("reading", (None,))
scale = ht.variable("scale", 1.0, ())
risky = ht.mean(ht.sqrt(scale * reading - 1) * 2)
careless = ht.Executor([risky, ht.optim.SGD(0.1).minimize(risky)], device=device)
try:
    with ht.debug_nans():
        careless.run({reading: [3.0, 2.0, 0.5]})
except ht.errors.NumericError as error:
    print(error)

# %% [markdown]
# **Try it:** what is the loss when the last reading is 1.5? (Run it: nothing is complained about when all is well.)

# %%
try_it(
    None,
    lambda: ht.Executor([risky], device=device).run({reading: [3.0, 2.0, 1.5]})[0],
    "the mean of twice three roots",
)

# %% [markdown]
# **What to remember.** A training run is a loader with a seed, a graph, a dictionary of updates, an executor, and
# `fit` around them. None of them hides anything, so a run can be stopped, repeated and taken apart. In lab 5 you
# write your own optimizer.
#
# You now know all of hetu on one machine. Next: [the same model on many](06_data_parallel.ipynb).
