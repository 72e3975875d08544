# %% [markdown]
# # 9. Tensor parallel from one string; ZeRO
#
# **After this notebook you can** split a single matrix product over ranks, say with one string how an operator of
# yours may be split, split a transformer the way Megatron does, and shard an optimizer's state.

# %%
import numpy as np

import hetu as ht
from hetu.dist import DataParallel, Parallel, TensorParallel, ZeRO, rehearse
from hetu.teach.try_it import try_it

# %% [markdown]
# ## When a layer does not fit
#
# Data parallelism needs the whole model on every rank. If the model is too large, the *tensors* must be split. Take
# $y = x w$. There are two ways to give each of two ranks half of $w$:
#
# * its **columns**: $x \, [w_1 \; w_2] = [x w_1 \;\; x w_2]$. Each rank gets half of the columns of $y$; no message is
#   needed.
# * its **rows**: $[x_1 \; x_2] \, [w_1; w_2] = x_1 w_1 + x_2 w_2$. Each rank uses half of the columns of $x$ and gets a
#   full-sized $y$ that is only a part of a *sum*.
#
# The difference follows from how the operator uses its axes, and one string says that. Here is our own matrix
# product. Axis m of the output comes from x, axis n from w; k appears on the left only, so it is summed over:


# %%
@ht.op(dims="mk,kn->mn")
def product(xp, x, w):
    return x @ w


# %% [markdown]
# hetu knows no more than this string about splitting it. A strategy gives the layouts of *variables*; hetu deduces
# the rest. `{"w": 1}` splits axis 1 of every variable called w. `rehearse` runs steps on ranks that are threads, and
# tells what was fetched, how many bytes of variables each rank keeps, and what rank 0 sends in a step, by which
# collective:

# %%
rows, weights = np.arange(12.0).reshape(3, 4), np.random.default_rng(0).normal(size=(4, 6))
x, w = ht.placeholder("x", (3, 4)), ht.variable("w", weights.astype("float32"))
for axis, meaning in {1: "columns", 0: "rows"}.items():
    tried = rehearse([product(x, w)], TensorParallel({"w": axis}), {x: rows}, world_size=2)
    print(f"{meaning}: {tried.sent}; right: {np.allclose(tried.fetched[0][0], rows @ weights, atol=1e-5)}")

# %% [markdown]
# By columns the parts are put side by side because we fetched y (`all_gather`); by rows they are added
# (`all_reduce`). You wrote neither. **What if the string forbids too much?** Say with `!` that k and n may not be
# split:

# %%
careful = ht.op(name="careful", dims="mk!,k!n!->mn!")(lambda xp, x, w: x @ w)
tried = rehearse([careful(x, w)], TensorParallel({"w": 1}), {x: rows}, world_size=2)
print(f"{tried.sent}; right: {np.allclose(tried.fetched[0][0], rows @ weights, atol=1e-5)}")

# %% [markdown]
# The result is still right, but now it is `w` that is gathered, (4, 3) on each rank, before every use: slower, never
# wrong. An operator
# without a string is treated like that, so you can add the string when it begins to matter.
#
# **Try it:** forbid k alone (`"mk!,k!n->mn"`), and split `w` by rows. Which shape is gathered from each rank now?
# (What if you split `w` by columns?)

# %%
half = ht.op(name="half", dims="mk!,k!n->mn")(lambda xp, x, w: x @ w)
try_it(
    None,
    lambda: rehearse([half(x, w)], TensorParallel({"w": 0}), {x: rows}, world_size=2).sent[0][1],
    "k may not be split, so w has to be whole before the product",
)

# %% [markdown]
# ## Two layers, one message
#
# Split the first weight by columns and the second by rows: the result of the first product is split by columns, just
# as the second wants it. Between them no message is needed, even with an activation function there.

# %%
y = ht.nn.Linear(16, 4, name="down")(ht.gelu(ht.nn.Linear(4, 16, name="up")(x)))
good = {"up/weight": 1, "up/bias": 0, "down/weight": 0}
bad = {"up/weight": 0, "down/weight": 1, "down/bias": 0}
print(*(rehearse([y], TensorParallel(split), {x: rows}, world_size=2).sent for split in (good, bad)), sep="\n")

# %% [markdown]
# One message instead of two: this is the trick of Megatron
# ([M. Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053)). In [attention](README.md#attention) the heads are the
# columns. You need not name them. The strings say which axes of two tensors are the same letter, from one weight
# through the activation function to the next, and so which must be split together: `TensorParallel()` follows them,
# whatever the layers are called. (`TensorParallel(MEGATRON | {...})` does so too, but splits what you name as you say.)

# %%
print(TensorParallel().build([y], world_size=2).table([y]))

# %% [markdown]
# And on a small language model and four ranks. A dashed frame is the whole tensor; the filled part is on that rank:

# %%
ids, wanted = (ht.placeholder(name, (None, 8), "int64") for name in ("ids", "wanted"))
h = ht.nn.TransformerBlock(16, 4, causal=True, name="block")(ht.nn.Embedding(32, 16)(ids))
loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(16, 32, name="head")(h), wanted))
updates = ht.optim.Adam(0.01).minimize(loss)
outputs = [loss, *updates.values()]
TensorParallel().build(outputs, world_size=4).shards([loss])

# %% [markdown]
# Follow one block from top to bottom: queries, keys and values by columns, the output by rows; `up` by columns,
# `down` by rows. Only the small vectors that every rank needs are on all of them.
#
# **Try it:** split the language model with a dictionary of your own, only `up` and `down`. How many messages has its
# forward pass? Predict it first.

# %%
mine = TensorParallel({"*up/weight": 1, "*up/bias": 0, "*down/weight": 0})
words = np.zeros((8, 8), int)
try_it(
    None,
    lambda: len(rehearse([loss], mine, {"ids": words, "wanted": words}, world_size=4).sent),
    "columns, then rows: where is a sum needed?",
)

# %% [markdown]
# ## ZeRO: why does every rank keep everything?
#
# Back to data parallelism. Every rank keeps the weights and, with [Adam](README.md#adam), two more numbers per weight.
# But only updates need Adam's numbers, and it suffices that *one* rank updates each weight. ZeRO
# ([S. Rajbhandari et al., 2020](https://arxiv.org/abs/1910.02054)) has stages: 1 shards the optimizer's numbers, 3 the
# weights as well.

# %%
ZeRO(1).build(outputs, world_size=4).shards([v for v in updates if "up/weight" in v.name or "head/weight" in v.name])

# %% [markdown]
# The weight is whole on every rank; Adam's two means are cut in four. What does it save, and what does it cost? The
# table also has the loss after five steps, which must not change:

# %%
feeds = dict(zip(("ids", "wanted"), np.random.default_rng(1).integers(0, 32, (2, 8, 8))))
strategies = {"data parallel": DataParallel(), "ZeRO 1": ZeRO(1), "ZeRO 3": ZeRO(3)}
strategies |= {"tensor parallel": TensorParallel(), "2 data x 2 tensor": Parallel(data=2, tensor=2, zero=1)}
for name, strategy in strategies.items():
    tried = rehearse([loss, updates], strategy, feeds, world_size=4, steps=5)
    print(f"{name:18} loss {tried.losses[-1]:.5f}, {tried}")

# %% [markdown]
# All of them compute the same. Weights and two means are three equal parts, so ZeRO 1 keeps
# $\frac{1}{3} + \frac{2}{3} \cdot \frac{1}{4}$, a half, and ZeRO 3 a quarter. Gradients are then *reduce-scattered* to
# the ranks that update them, and new weights are gathered, before each pass if they are not kept. All this travels in a
# few large messages, the buckets; tensor parallelism communicates activations: little for a small batch and large
# weights.
#
# The last row is a product: pairs of ranks share a copy of the model, and Adam's state is sharded between the copies.
#
# **Try it:** which share of the bytes of data parallelism would ZeRO 1 keep on 8 ranks? Answer with a fraction.

# %%
try_it(None, b"MC40MTY2NjY2NjY2NjY2NjY2Mw==", "the weight is whole, two means of three parts are cut in eight")

# %% [markdown]
# ## Which variable costs what
#
# A strategy is plain data and prints as a table: how each variable is used (`compute`), how it is kept (`store`), and
# what a step therefore does to it. `dup/2` is an axis of two equal copies; `1/2` splits axis 1 in two.

# %%
mixed = Parallel(data=2, tensor=2, zero=3).build(outputs, world_size=4)
print("\n".join(line.replace("on 0-3", "") for line in mixed.table([loss]).splitlines()[:9]))

# %% [markdown]
# **Try it:** on how many of four ranks lies a given number of a weight that is kept as `dup/2` and `1/2`?

# %%
try_it(None, b"Mg==", "two equal copies of two halves")

# %% [markdown]
# **What to remember.** One string about its axes is enough to split an operator. Columns then rows needs one sum.
# Data parallelism sends gradients, tensor parallelism sends activations, and ZeRO trades messages for memory. All are
# layouts: which rank keeps which part. In lab 7 you work out who holds what, and what must be sent.
#
# Next: split the model by layers instead, in [pipelines](10_pipeline_schedules.ipynb).
