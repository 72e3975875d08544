# %% [markdown]
# # 9. Tensor parallel from one string; ZeRO
#
# **After this notebook you can** split a single matrix product over ranks, say with one string how an operator of
# yours may be split, split a transformer the way Megatron does, and shard an optimizer's state.

# %%
from collections import Counter

import numpy as np

import hetu as ht
from hetu.dist import MEGATRON, DataParallel, Parallel, TensorParallel, ZeRO, run_ranks

# %% [markdown]
# ## When a layer does not fit
#
# Data parallelism needs the whole model on every rank. If the model is too large, the *tensors* must be split. Take
# y = x w. There are two ways to give each of two ranks half of `w`:
#
# * its **columns**: each rank gets half of the columns of y. No message is needed.
# * its **rows**: each rank uses half of the columns of x and gets a full-sized y that is only a part of a *sum*.
#
# The difference follows from how the operator uses its axes, and one string says that. Here is our own matrix
# product:


# %%
@ht.op(dims="mk,kn->mn")
def product(xp, x, w):
    """Output axis m comes from x, axis n from w; k appears on the left only, so it is summed over."""
    return x @ w


@product.grad
def product_grad(g, y, x, w):
    return g @ ht.matrix_transpose(w), ht.matrix_transpose(x) @ g


# %% [markdown]
# hetu knows no more than this string about splitting it. A strategy gives the layouts of *variables*; hetu deduces
# the rest. `{"w": 1}` splits axis 1 of every variable called w. This is what rank 0 runs:

# %%
rows = np.arange(12, dtype=np.float32).reshape(3, 4)
numbers = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def communication(make, strategy, feeds, ranks=2):
    """What the ranks answer, and the communication in the program of rank 0."""

    def run(comm):
        executor = ht.Executor(make(), strategy=strategy, comm=comm)
        steps = executor.program(feeds).steps
        return executor.run(feeds)[0], [s.node for s in steps if s.node.role.value == "communication"]

    (answer, nodes), *_ = run_ranks(ranks, run)
    return answer, nodes


def ours(operator=product):
    x = ht.placeholder("x", (3, 4))
    return [operator(x, ht.variable("w", numbers))]


for axis, meaning in {1: "columns", 0: "rows"}.items():
    y, nodes = communication(ours, TensorParallel({"w": axis}), {"x": rows})
    print(f"{meaning}: {nodes}; right: {np.allclose(y, rows @ numbers, atol=1e-5)}")

# %% [markdown]
# By columns the parts are put side by side because we fetched y (`all_gather`); by rows they are added
# (`all_reduce`). You wrote neither. **What if the string forbids too much?** Say with `!` that k and n may not be
# split:

# %%
careful = ht.op(name="careful", dims="mk!,k!n!->mn!")(lambda xp, x, w: x @ w)
y, nodes = communication(lambda: ours(careful), TensorParallel({"w": 1}), {"x": rows})
print(f"{nodes}; right: {np.allclose(y, rows @ numbers, atol=1e-5)}")

# %% [markdown]
# The result is still right, but now the *weight* is gathered before every use: slower, never wrong. An operator
# without a string is treated like that, so you can add the string when it begins to matter.
#
# ## Two layers, one message
#
# Split the first weight by columns and the second by rows: the result of the first product is split by columns, just
# as the second wants it. Between them no message is needed, even with an activation function there.


# %%
def two_layers(first="up", second="down"):
    x = ht.placeholder("x", (3, 4))
    h = ht.gelu(ht.nn.Linear(4, 16, name=first)(x))
    return [ht.nn.Linear(16, 4, name=second)(h)]


good = {"up/weight": 1, "up/bias": 0, "down/weight": 0}
bad = {"up/weight": 0, "down/weight": 1, "down/bias": 0}
for split in (good, bad):
    print(Counter(node.op.name for node in communication(two_layers, TensorParallel(split), {"x": rows})[1]))

# %% [markdown]
# One message instead of two: this is the trick of Megatron (M. Shoeybi et al., 2019). In attention the heads are the
# columns. hetu has these patterns by the names of its layers, as a `RuleBook`: a dictionary for many models, of which
# not every pattern must fit. `MEGATRON | {...}` adds your own, which must:

# %%
print(*MEGATRON.items(), sep="\n")

# %% [markdown]
# Here they are on a small language model and four ranks. A dashed frame is the whole tensor; the filled part is on
# that rank:


# %%
def language_model():
    ids, wanted = ht.placeholder("ids", (None, 8), "int64"), ht.placeholder("wanted", (None, 8), "int64")
    with ht.scope("gpt"):
        h = ht.nn.Embedding(32, 16)(ids)
        h = ht.nn.TransformerBlock(16, 4, causal=True, name="block")(h)
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(16, 32, name="head")(h), wanted))
    return [loss, ht.optim.Adam(0.01).minimize(loss)]


loss, updates = language_model()
outputs = [loss, *updates.values()]
TensorParallel().build(outputs, world_size=4).shards([loss])

# %% [markdown]
# Follow one block from top to bottom: queries, keys and values by columns, the output by rows; `up` by columns,
# `down` by rows. Only the small vectors that every rank needs are on all of them.
#
# ## ZeRO: why does every rank keep everything?
#
# Back to data parallelism. Every rank keeps the weights and, with Adam, two more numbers per weight. But only updates
# need Adam's numbers, and it suffices that *one* rank updates each weight. ZeRO (S. Rajbhandari et al., 2020) has
# stages: 1 shards the optimizer's numbers, 3 the weights as well.

# %%
ZeRO(1).build(outputs, world_size=4).shards([v for v in updates if "up/weight" in v.name or "head/weight" in v.name])

# %% [markdown]
# The weight is whole on every rank; Adam's two means are cut in four. What does it save, and what does it cost? The
# table also has the loss after five steps, which must not change:

# %%
rng = np.random.default_rng(1)
feeds = {"ids": rng.integers(0, 32, (8, 8)), "wanted": rng.integers(0, 32, (8, 8))}


def report(name, strategy):
    def run(comm):
        executor = ht.Executor(language_model(), strategy=strategy, comm=comm)
        losses = [executor.run(feeds)[0].item() for _ in range(5)]
        kinds = Counter(kind for s in executor.program(feeds).steps if (kind := s.node.op.collective))
        return losses[-1], sum(executor.state.arrays[n].nbytes for n in executor.state.arrays), kinds

    loss_of_5, kept, kinds = run_ranks(4, run)[0]
    messages = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(f"{name:20} loss {loss_of_5:.5f}  {kept:6,} bytes  {messages}")


report("data parallel", DataParallel())
report("ZeRO 1", ZeRO(1))
report("ZeRO 3", ZeRO(3))
report("tensor parallel", TensorParallel())
report("2 data x 2 tensor", Parallel(data=2, tensor=2, zero=1))

# %% [markdown]
# All of them compute the same. Weights and two means are three equal parts. ZeRO 1 quarters two of them, which leaves
# a half; ZeRO 3 quarters all. Gradients are then *reduce-scattered* to the ranks that update them, and new weights
# are gathered, before each pass if they are not kept. All this travels in a few large messages, the buckets; tensor
# parallelism communicates activations: little for a small batch and large weights.
#
# The last row is a product: pairs of ranks share a copy of the model, and Adam's state is sharded between the copies.
#
# ## Which variable costs what
#
# A strategy is plain data and prints as a table: how each variable is used (`compute`), how it is kept (`store`), and
# what a step therefore does to it. `dup/2` is an axis of two equal copies; `1/2` splits axis 1 in two.

# %%
mixed = Parallel(data=2, tensor=2, zero=3).build(outputs, world_size=4)
print("\n".join(line.replace("on 0-3", "") for line in mixed.table([loss]).splitlines()[:9]))

# %% [markdown]
# **Try it:** in `report`, add `ZeRO(2)`; why does it equal `ZeRO(1)` here? Then split the language model with a
# dictionary of your own: only `{"*up/weight": 1, "*up/bias": 0, "*down/weight": 0}`. Predict the number of messages
# first.
#
# **What to remember.** One string about its axes is enough to split an operator. Columns then rows needs one sum.
# Data parallelism sends gradients, tensor parallelism sends activations, and ZeRO trades messages for memory. All are
# layouts: which rank keeps which part. In lab 7 you work out who holds what, and what must be sent.
#
# Next: split the model by layers instead, in [pipelines](10_pipeline_schedules.ipynb).
