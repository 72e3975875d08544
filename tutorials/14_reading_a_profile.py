# %% [markdown]
# # 14. Reading a profile
#
# **After this notebook you can** say where the time of a training step goes, by operator, by layer and by line; tell
# whether an operator waits for memory or for arithmetic, and how far it is from the best; read the same table of a
# GPU; and find the slowest line of a model and remove it.
#
# Times are those of the machine that made this notebook. Run it on yours: the numbers change, the reading does not.

# %%
import json
import tempfile
from pathlib import Path

import numpy as np

import hetu as ht
from hetu.teach.try_it import try_it

# %% [markdown]
# ## Where does the time go?
#
# A network with one hidden layer learns to read small digits, 2,000 in a step. Its norm and its activation are
# written out, as one does when one tries something new.

# %%
pixels = ht.placeholder("pixels", (None, 196))
digit = ht.placeholder("digit", (None,), "int64")
h = ht.nn.Linear(196, 512, name="up")(pixels)
centered = h - ht.mean(h, axis=1, keepdims=True)
h = centered / ht.sqrt(ht.mean(centered * centered, axis=1, keepdims=True) + 1e-5)
h = h * ht.sigmoid(1.7 * h)
scores = ht.nn.Linear(512, 10, name="out")(h)
loss = ht.mean(ht.softmax_cross_entropy(scores, digit))
step = [loss, ht.optim.Adam(1e-3).minimize(loss)]

images, digits = (array[:2000] for array in ht.data.mnist("train").arrays)
small = images.reshape(-1, 28, 28)[:, ::2, ::2].reshape(-1, 196)
batch = {pixels: small, digit: digits}
plain = ht.profile(ht.Executor(step, passes=[]), batch)
print(plain.table(limit=8))

# %% [markdown]
# `ht.profile` runs every instruction of the step by itself, five times after one to warm up, and keeps the median.
# Variables get their old values back, so a profile does not train. For now all passes are off (`passes=[]`), so that
# what runs is what we wrote.
#
# Read the table from the left. `calls` says how many instructions have this operator, `ms` how long they take in a
# step, and `share` which part of the step that is. The slowest come first, so **read three rows and stop**: whoever
# makes the tenth row twice as fast gains a percent at most.
#
# (Among your operators stand those of gradients: `sum_to_like` adds up what broadcasting had spread.)
#
# The other columns say how much *work* that was: `MB` are the operands read and the results written, `MFLOP` the
# floating-point operations. Both follow from shapes, without a clock. The last two columns are work by time.
#
# Who asked for all these small operators? The same times by layer, with gradients apart, and by the line that you
# wrote, gradients included, as they exist because of it:

# %%
print(plain.table("layer"), plain.table("line"), sep="\n\n")

# %% [markdown]
# Nobody would have guessed that from the formula: three harmless lines between the layers are a large part of the
# step.
#
# `table("node")` has a row for each instruction. In a notebook a profile displays itself, with bars:

# %%
plain

# %% [markdown]
# **Try it:** an operator has a share of 10 %. How many percent of the step do you gain by making it twice as fast?

# %%
try_it(None, b"NQ==", "half of its time is left")

# %% [markdown]
# ## Memory or arithmetic?
#
# Is one GFLOP/s little? For a product it is miserable, for a sum it may be the best that there is: a sum reads two
# numbers for each operation, and waits for them. So measure both limits of your machine: a product of large matrices,
# and `x + 1`, which does nothing but carry numbers there and back, as a copy does. Carry as many as the model does, for
# small arrays stay in a cache, which is several times faster than memory:


# %%
def best(build, *shape):
    x = ht.placeholder("x", shape)
    (row,) = ht.profile(ht.Executor([build(x)]), {x: np.ones(shape)}, repeat=9).rows()
    return row


flops = 1e9 * best(lambda x: x @ x, 1024, 1024).gflops_per_second
bandwidth, of_memory = (1e9 * best(lambda x: x + 1, rows, 512).gbytes_per_second for rows in (2000, 40000))
print(f"{flops / 1e9:.0f} GFLOP/s; {bandwidth / 1e9:.0f} GB/s of 4 MB, {of_memory / 1e9:.0f} GB/s of 80 MB\n")


def reading(profile, most=7):
    """Which limit each of the slowest operators meets first, and the least time it allows, by the real one."""
    for row in profile.rows()[:most]:
        memory, arithmetic = row.nbytes / bandwidth, row.flops / flops
        limit = "memory" if memory > arithmetic else "arithmetic"
        print(f"{row.label:24} {limit:10} {max(memory, arithmetic) / row.seconds:5.0%}")


reading(plain)

# %% [markdown]
# This number is the whole art: **the least possible time, as a part of the real one.** Near 100 % an operator is as
# fast as your machine, and only *less work* helps: a smaller model, 16 bits, fewer bytes. At 10 % the work is badly
# done, and another *way* to do it helps: a kernel, another layout, larger batches.
#
# Somewhat more than 100 % is no mistake: what one operator has just written the next one reads from a nearer cache, and
# other programs use the machine when they like.
#
# The picture of this is the *roofline* of [notebook 12](12_a_cuda_kernel_without_a_gpu.ipynb), now with measured
# points. How far a point lies below the roof is what the percentage says:

# %%
points = [(row.label, row.flops, row.nbytes, row.seconds) for row in plain.rows()[:7]]
ht.look.roofline_svg(points, flops, bandwidth)

# %% [markdown]
# **Try it:** how many MB does `x + 1` move for a million numbers of 4 bytes?

# %%
try_it(None, b"OA==", "there and back")

# %% [markdown]
# ## What fusing does to the table
#
# All but the products lie where memory is the limit: to move less is what helps there. `adam` and `sigmoid` are far
# even from that limit. NumPy takes several steps for each and carries whole arrays from one to the next, while `MB` has
# only operands and results; and an exponential takes longer than an addition, though `MFLOP` counts one operation for
# either.
#
# Passes put neighbors into groups ([notebook 13](13_from_python_to_a_c_program.ipynb)), and what lies between them or
# between such steps never reaches memory. The same step with all passes (without a C compiler groups are run line by
# line, and gain little but `MB`):

# %%
fused = ht.profile(ht.Executor(step), batch)
print(fused.table(limit=8), end="\n\n")
for name, each in {"without passes": plain, "with passes": fused}.items():
    nbytes = sum(row.nbytes for row in each.rows())
    print(f"{name:14} {len(each.instructions):3} instructions {nbytes / 1e6:5.0f} MB {1e3 * each.seconds:6.1f} ms")

# %% [markdown]
# Compare the columns. `calls` and `MB` have fallen: that is what fusing does. One row, `fused`, stands for all that
# were joined; `print(program)` shows what is in each. The products are what they were, so their *share* has grown
# although nothing about them is worse. Shares mislead when you compare two profiles. Compare milliseconds.
#
# **Try it:** three operators, one after the other, work on an array of 4 MB. How many MB do they move as one group?
# (Apart they move 24.)

# %%
try_it(None, b"OA==", "read once, write once")

# %% [markdown]
# ## The same table of a GPU
#
# This is a training step of GPT-2 small (batch 8, bfloat16) on an NVIDIA H100 with 80 GB, summed by operator:
#
# | op | calls | ms | rate |
# |---|---:|---:|---:|
# | `matmul` | 147 | 18.85 | 322 TFLOP/s |
# | `fused` | 89 | 4.03 | 1,917 GB/s |
# | `flash_attention_dx` | 12 | 3.17 | |
# | `update_all` | 1 | 1.53 | 2,829 GB/s |
# | `layer_norm_dx` | 25 | 1.50 | 1,049 GB/s |
# | `flash_attention` | 12 | 1.15 | 268 TFLOP/s |
# | `astype` | 73 | 1.10 | 674 GB/s |
# | `softmax_cross_entropy_dx` | | 0.64 | 2,562 GB/s |
# | `layer_norm` | 25 | 0.59 | |
# | `scatter_rows` | | 0.46 | |
# | all instructions | | 33.8 | |
#
# (Since then norms have become groups as well: they stand in the row `fused`.)
#
# Names that end in `_dx` are gradients. `fused` are groups, `update_all` is the optimizer, `astype` turns 32 bits into
# 16 or back, and `scatter_rows` adds gradients to rows of a table. A plain copy reaches 2,770 GB/s there. You can read
# this now:
#
# * `update_all`, all weights in one launch, is as fast as a copy, and the gradient of the cross entropy nearly so.
#   Nobody makes these faster; only fewer bytes would.
# * `layer_norm_dx` reached 38 % of a copy. A better kernel could gain up to 0.9 ms.
# * `astype` has the worst rate, but look at `calls`: 15 microseconds each. So short a launch is not limited by
#   memory. It is their number that costs; one would try to get rid of them, not to make them faster.
# * Products reach a third of what the data sheet promises (989 TFLOP/s), and are more than half of the sum. This row
#   is worth the most thought.
#
# And now the surprise: the sum is 33.8 ms, but the whole step takes **22.5 ms**. A profile launches instructions one
# by one, so each time holds the way from the host to the device, too. The executor records a step as one *CUDA
# graph*: it is launched once, and the gaps between its kernels are gone. They were a third of the sum. So on a GPU
# measure the step as a whole as well, and take the table for what it is: right about long kernels, unfair to short
# ones.
#
# **Try it:** how many microseconds does one launch of a product (`matmul`) take on average?

# %%
try_it(None, b"MTI4LjIzMTI5MjUxNzAwNjg=", "milliseconds by calls")

# %% [markdown]
# ## Find the slowest line
#
# Your turn. A model learns facts of WordNet, such as (*dog*, *hypernym*, *canine*). Each of 4,516 entities and 18
# relations has a vector, and head + relation should lie near the tail, nearer than to some wrong one
# ([TransE, A. Bordes et al., 2013][transe]). It learns, and it is slow.
#
# [transe]: https://papers.nips.cc/paper/5071-translating-embeddings-for-modeling-multi-relational-data

# %%
facts = ht.data.wordnet_kg()
ENTITIES, RELATIONS = len(facts.info["entities"]), len(facts.info["relations"])


def rows_of(table, ids):
    return ht.one_hot(ids, table.shape[0]) @ table


def transe(rows_of):
    with ht.scope("transe"):
        head, relation, tail, wrong = (ht.placeholder(n, (None,), "int64") for n in ("h", "r", "t", "w"))
        entities = ht.variable("entities", ht.init.normal(std=0.1), (ENTITIES, 64))
        relations = ht.variable("relations", ht.init.normal(std=0.1), (RELATIONS, 64))
        near = rows_of(entities, head) + rows_of(relations, relation)
        right = ht.sum(ht.square(near - rows_of(entities, tail)), axis=1)
        other = ht.sum(ht.square(near - rows_of(entities, wrong)), axis=1)
        loss = ht.mean(ht.softplus(right - other))
        return ht.Executor([loss, ht.optim.SGD(0.5).minimize(loss)], seed=0)


columns = [column[:256] for column in facts.arrays]
triples = dict(zip("hrtw", (*columns, np.random.default_rng(0).integers(0, ENTITIES, 256))))
slow = transe(rows_of)
before = ht.profile(slow, triples)
print(f"{1e3 * before.seconds:.1f} ms")

# %% [markdown]
# **Stop here.** Print the tables that you need, find the line, and write it better. Then read on.

# %%
print(before.table("line", limit=4), before.table("op", limit=4), sep="\n\n")
reading(before, most=3)

# %% [markdown]
# One line has nearly all of the time: the product in `rows_of`. And here the percentage alone would deceive you. Its
# products are near the limit, they look like good work, **but it is work that nobody needs**: a vector of 64 numbers
# is computed as a sum of 4,516 vectors, all but one of them times 0. `MFLOP` says it: to fetch 256 vectors should
# take no arithmetic at all. A lookup takes none, and its gradient has rows, too, so the update leaves the rest of the
# table alone:

# %%
fast = transe(ht.embedding)
after = ht.profile(fast, triples)
print(after.table("op", limit=5))
print(f"{before.seconds / after.seconds:.0f} times as fast")
for name, executor in {"slow": slow, "fast": fast}.items():
    print(name, [round(executor.run(triples)[0].item(), 4) for _ in range(4)])

# %% [markdown]
# The same losses. (`take` looks rows up, `sgd_rows` updates them.) No kernel was tuned for this; somebody read a
# line. Ask in this order: *which line? Is its work
# needed? How far is it from the limit?* And only then: *how do I make it faster?*
#
# If the rate of `take` is higher than your memory's: `MB` counts operands whole, but a lookup reads a few rows of its
# table. A rate that cannot be means that less was done than counted.
#
# **Try it:** how many million multiplications took the slow way to fetch 256 vectors of entities?

# %%
try_it(None, lambda: 256 * ENTITIES * 64 / 1e6, "each is a sum of as many vectors as there are entities")

# %% [markdown]
# ## In order of time
#
# Tables have no order. `chrome_trace` writes the instructions of a step one after the other, into a file that
# <https://ui.perfetto.dev> draws and lets you zoom into:

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "step.json"
    fused.chrome_trace(file)
    events = json.loads(file.read_text("utf-8"))["traceEvents"]
print(len(events), "instructions; the longest:", max(events, key=lambda event: event["dur"])["args"])

# %% [markdown]
# **Try it:** with 1,024 hidden units, not 512: how many times the arithmetic has the product of the first layer? Then
# profile the first model with 10 digits in a step. Which rows lose most of their rate, and why?

# %%
try_it(None, b"Mg==", "196 numbers times the number of units")

# %% [markdown]
# **What to remember.** Read the first three rows. A rate means something beside the limit of the machine: the least
# possible time, as a part of the real one. Fusing lowers `MB`. Times of single launches have gaps in them that a
# graph of launches has not. And the fastest work is the work that is not done.
#
# Next: [a mixture of experts](15_a_mixture_of_experts.ipynb).
