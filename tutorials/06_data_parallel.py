# %% [markdown]
# # 6. Data parallel by hand, then by a pass
#
# **After this notebook you can** train one model on many ranks with a single collective that you wrote yourself, let a
# strategy write it for you, see why buckets and overlap make it fast, and run a notebook cell on real processes.

# %%
# %load_ext hetu
import numpy as np

import hetu as ht
from hetu.dist import run_ranks, world
from hetu.plan import trace
from hetu.teach.try_it import try_it

# %% [markdown]
# ## Ranks
#
# A *rank* is one of several workers that run the same program on different data. They share no memory; they can only
# communicate. `run_ranks` runs a function on threads that pretend to be ranks, which is enough for learning. The most
# important collective is **all-reduce**: every rank brings an array, and every rank gets the sum.


# %%
def bring(comm):
    mine, total = np.array([1.0, 10.0]) * (comm.rank + 1), np.empty(2)
    comm.all_reduce(mine, total)
    return f"rank {comm.rank} of {comm.world_size} brought {mine} and has {total}"


print(*run_ranks(3, bring), sep="\n")

# %% [markdown]
# **Try it:** four ranks bring `[1, 10]`, `[2, 20]`, `[3, 30]` and `[4, 40]`. What does rank 0 have afterward?


# %%
def total(comm):
    mine, found = np.array([1.0, 10.0]) * (comm.rank + 1), np.empty(2)
    comm.all_reduce(mine, found)
    return found


try_it(None, lambda: run_ranks(4, total)[0], "the sum, on every rank")

# %% [markdown]
# ## One line by hand
#
# A mean over a batch is a mean over its parts. So give every rank the whole model and a part of each batch, let it
# compute the gradient of its part, and *average the gradients*. Collectives also exist as nodes of a graph: `by_hand`
# differs from training on one rank in one line. `world()` is the communicator of the rank that calls it.

# %%
train, test = ht.data.mnist("train").flat(), ht.data.mnist("test").flat()
images, labels = (column[:512] for column in train.arrays)


def network(width=64):
    pixels, digit = ht.placeholder("pixels", (None, 784)), ht.placeholder("digit", (None,), "int64")
    with ht.scope("net"):
        hidden = ht.nn.Linear(784, width, activation=ht.relu)(pixels)
        return ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(width, 10)(hidden), digit))


def by_hand(loss):
    optimizer = ht.optim.SGD(0.5)
    gradients = optimizer.minimize(loss).gradients
    average = {v: ht.dist.all_reduce(g) / world().world_size for v, g in gradients.items()}
    return optimizer.apply(average)


# %% [markdown]
# Every rank feeds its own rows. We compare with one process that is fed all rows.


# %%
def losses_by_hand(comm):
    loss = network()
    executor = ht.Executor([ht.dist.all_reduce(loss) / comm.world_size, by_hand(loss)], comm=comm)
    mine = slice(comm.rank, None, comm.world_size)  # rank 0: rows 0, 4, 8, ...; rank 1: rows 1, 5, 9, ...
    return [executor.run({"pixels": images[mine], "digit": labels[mine]})[0].item() for _ in range(5)]


alone = run_ranks(1, losses_by_hand)[0]
four = run_ranks(4, losses_by_hand)[0]
print("on 1 rank: ", np.round(alone, 5))
print("on 4 ranks:", np.round(four, 5))

# %% [markdown]
# The numbers are the same, up to rounding. *This is the whole idea of data parallelism*; the rest is speed.
#
# Communication consists of ordinary nodes, drawn in violet:

# %%
x = ht.placeholder("x", (None, 3))
w = ht.variable("w", ht.init.ones, (3, 1))
ht.Graph([by_hand(ht.mean(x @ w))[w]])

# %% [markdown]
# **Try it:** by which number is every gradient multiplied if you forget `/ world().world_size` on 4 ranks?

# %%
try_it(None, b"NA==", "an all-reduce adds")

# %% [markdown]
# ## One word instead
#
# By hand you must remember four things: cut the batch, average *every* gradient, average the loss for the log, and do
# all of it in the same order on each rank. A `Strategy` makes a pass do this. You write the model as if for one
# device and feed every rank the whole batch.


# %%
def losses_by_a_pass(comm):
    loss = network()
    entries = [loss, ht.optim.SGD(0.5).minimize(loss)]
    executor = ht.Executor(entries, strategy=ht.dist.DataParallel(), comm=comm)
    feeds = {"pixels": images, "digit": labels}
    return [executor.run(feeds)[0].item() for _ in range(5)], str(executor.program(feeds))


by_pass, program = run_ranks(4, losses_by_a_pass)[0]
print("by a pass: ", np.round(by_pass, 5))
print(program)

# %% [markdown]
# Rank 0 runs this program. Its batch has 128 rows (`f32[128, 64]`), and one `all_reduce_start` takes all four
# gradients. Why all at once, and why `start` and `wait`?
#
# **Try it:** how many rows of the 512 does rank 1 of 8 work on?

# %%
try_it(None, b"NjQ=", "the strategy cuts the batch")

# %% [markdown]
# ## Buckets and overlap
#
# Every message costs a *latency*, however short it is, plus its bytes divided by the bandwidth. So it pays to collect
# gradients in **buckets**. The gradient of the last layer is finished first and can travel while the others are still
# computed. That is **overlap**.
#
# `trace` runs the ranks on a *virtual clock*: computation takes its time on this machine, and you choose a model of
# the wire, here 0.1 ms latency and 1 GB/s. First every gradient travels alone, when it is ready:

# %%
deep = ht.placeholder("deep", (None, 256))
h = deep
for _ in range(6):
    h = ht.nn.Linear(256, 256, activation=ht.tanh)(h)
step = [ht.mean(h**2), ht.optim.SGD(0.1).minimize(ht.mean(h**2))]
wire = ht.dist.Link(latency=100e-6, bandwidth=1e9)


def traced(bucket_bytes):
    strategy = ht.dist.DataParallel().build([step[0], *step[1].values()], world_size=2)
    strategy.bucket_bytes = bucket_bytes
    rows = np.ones((512, 256), np.float32)
    return trace(step, strategy, {deep: rows}, world_size=2, link=wire)


traced(0)

# %% [markdown]
# This is a picture of waiting. Now with buckets of 600 kB, which start as soon as they are full:

# %%
overlapped = traced(600_000)
overlapped

# %% [markdown]
# The upper lane of each rank computes *while* the lower one communicates; "hidden" is the share of communication that
# runs beside computation. Three sizes in numbers:

# %%
for bucket_bytes in (0, 600_000, 1 << 30):
    timeline = traced(bucket_bytes)
    messages = sum(event.name == "all_reduce" and event.rank == 0 for event in timeline.events)
    print(f"buckets of {bucket_bytes:>13,} bytes: {messages:2} messages, {timeline}")

# %% [markdown]
# Small buckets pay latency after latency; a large one has no computation left beside it.
#
# **Try it:** a ring of two ranks sends half of an array twice. How many milliseconds does one all-reduce of 1 MB take
# on this wire, 0.1 ms of latency for each of the two messages included? Then change `wire` to 10 GB/s and run the last
# cell again: which size is best now?

# %%
try_it(None, b"MS4y", "two messages of 0.5 MB, at 1 MB in a millisecond")

# %% [markdown]
# ## When one rank goes its own way
#
# All ranks must call the same collectives in the same order. A rank that does not makes the others wait forever: the
# classic silent hang. In hetu every wait has a deadline, and the error says which rank is missing and where it is.


# %%
def forgetful(comm):
    comm.all_reduce(np.ones(3), np.empty(3))
    if comm.rank != 2:
        comm.all_reduce(np.ones(5), np.empty(5))


try:
    run_ranks(3, forgetful, deadline=1.0)
except ht.dist.CommError as error:
    print(error)

# %% [markdown]
# **Try it:** which rank does the error have to name if `comm.rank != 2` becomes `comm.rank == 2`? Answer with the
# ranks that do not come, as a set.

# %%
try_it(None, b"WzAsIDFd", "who does not call the second time?")

# %% [markdown]
# ## Real processes
#
# Threads were for learning. With `%%ranks 2` above it, a cell runs on two MPI processes that wait in the background.
# The arrays and functions that it reads go there, and the variables of rank 0 come back. The rest of the cell stays
# the same: without the first line it trains on one rank.

# %%
# %%ranks 2
loss = network()
updates = ht.optim.SGD(0.5).minimize(loss)
executor = ht.Executor([loss, updates], strategy=ht.dist.DataParallel(), comm=world())
real = [executor.run({"pixels": images, "digit": labels})[0].item() for _ in range(5)]
print(f"I am rank {world().rank} of {world().world_size}; my last loss is {real[-1]:.5f}")

# %% [markdown]
# `real` is now a variable of this notebook. Its losses are those from the beginning:

# %%
print("on processes:", np.round(real, 5), "- largest difference", np.abs(np.subtract(real, alone)).max().round(6))

# %% [markdown]
# **Try it:** change `%%ranks 2` to `%%ranks 3`. 512 rows do not divide by three: how many has the rank with most? Then
# let one rank raise an error in that cell, and read who is reported and where the others waited.

# %%
try_it(None, b"MTcx", "as equal as can be")

# %% [markdown]
# **What to remember.** In data parallelism each rank takes a part of the batch, and gradients are summed. A strategy
# puts communication into the graph, so its order is never wrong. Buckets save latency; overlap hides the rest. In lab
# 6 you write the ring that adds the arrays.
#
# Next: ranks that do not wait for each other, at [the parameter server](07_the_parameter_server.ipynb).
