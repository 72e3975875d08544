# %% [markdown]
# # 17. Ten million rows in the memory of one
#
# **After this notebook you can** train on ids that nobody has counted, say what a table of them costs, let rare rows
# go, and keep most of a table on disk.

# %%
import numpy as np

import hetu as ht
from hetu.ps import UNBOUNDED, Client, Growth, Options, Parameter, ServerProcess
from hetu.ps.wire.environment import Place
from hetu.strategies import Connected, ParameterServer
from hetu.teach.try_it import try_it

# %% [markdown]
# ## Ids that nobody has counted
#
# An [embedding](README.md#embedding) table has a row for each user. But how many users are there? New ones come every
# minute. Recommenders therefore **hash**: any text becomes a number of 63 bits, and two texts of the same number are
# so rare that nobody minds.

# %%
names = np.array([f"user {i}" for i in range(1000)])
ids = ht.data.hashed(names, field="user")
print(ids[:3])
print(f"a table with a row for each id would have {UNBOUNDED * 32 * 4 / 1e18:,.0f} million terabytes")

# %% [markdown]
# No such table is ever made. `DynamicEmbedding` says only how wide rows are and how many bytes of memory they may
# take; a parameter server makes a row when its id is *trained*. Here the server is a process beside this notebook.
# Each user has a taste, and the model is to find it out from clicks:

# %%
server = ServerProcess(Options(1, "classroom", "bsp"))
client = Client([server.address], worker=0, token="classroom")
who, clicked = ht.placeholder("who", (None,), "int64"), ht.placeholder("clicked", (None,))
with ht.scope("clicks"):
    taste = ht.nn.DynamicEmbedding(8, budget=1 << 20)(who)
    logit = ht.nn.Linear(8, 1)(taste)[:, 0]
loss = ht.mean(ht.binary_cross_entropy_with_logits(logit, clicked))
subgraphs = {"train": [loss, ht.optim.Adam(0.05).minimize(loss)], "eval": [logit]}
executor = ht.Executor(subgraphs, strategy=ParameterServer(), comm=Connected(Place(0, 1), client))

rng = np.random.default_rng(0)
likes = rng.random(1000) < 0.5
for _ in range(200):
    batch = rng.integers(0, 900, 64)  # the last hundred users never come
    executor.run("train", {who: ids[batch], clicked: likes[batch].astype("float32")})
right = (executor.run("eval", {who: ids})[0] > 0) == likes
print(f"users who came: {right[:900].mean():.0%} right; who never came: {right[900:].mean():.0%}")
[table] = [t for t in client.status()[0]["largest"] if t["grown"]]
print(f"{table['grown']['held']} rows, room for {table['rows']:,}")

# %% [markdown]
# Who never came has no row. The server gives such an id a vector that follows from the id alone, so it is the same
# every time, and reading costs no memory.
#
# **Try it:** how many rows has the table after `executor.run("eval", ...)` for a million new ids?

# %%
try_it(None, lambda: client.status()[0]["largest"][0]["grown"]["held"], "only training makes a row")

# %% [markdown]
# ## What a row costs
#
# A row of 32 numbers of 4 bytes has 128 bytes. To be found it needs more: its id (8 bytes), how often it was updated
# (8, so that [caches](08_hybrid_and_the_embedding_cache.ipynb) can tell what is old), the clock of its last update
# (4), and a cell in an index that is never more than 70 % full (up to 12). An optimizer adds rows of its own:

# %%
for rule, arrays in (("SGD", 1), ("AdaGrad", 2), ("Adam", 3)):
    growth, width = Growth(10**9), 4 * 32 * arrays
    in_memory, _ = growth.rows(width)
    share = growth.beside / (width + growth.beside)
    print(f"{rule:8} {in_memory:10,} rows in a gigabyte, {share:4.0%} of it for finding them")

# %% [markdown]
# **Try it:** about how many gigabytes take ten million rows of 32 numbers, trained by Adam?

# %%
try_it(None, lambda: 10_000_000 * (4 * 32 * 3 + Growth(1).beside) / 1e9, "three arrays, and what lies beside")

# %% [markdown]
# ## When the memory is full
#
# Then rows must go. Which? Those that were updated **longest ago**, or **least often**? That depends on the clicks.
# Here are two worlds of 20,000 users of [Zipf's law](08_hybrid_and_the_embedding_cache.ipynb): in one the same users
# are active for ever, in the other fashions change: every ten batches another user is the most active one. The table
# has room for a part of the rows:

# %%
USERS, BATCHES, EACH = 20_000, 120, 400
weights = 1 / np.arange(1, USERS + 1)
drawn = rng.choice(USERS, size=(BATCHES, EACH), p=weights / weights.sum())
worlds = {"steady": drawn, "changing": (drawn + 400 * (np.arange(BATCHES)[:, None] // 10)) % USERS}
ROOM = [500, 1000, 2000, 4000, 8000]
made = 0


def trained(batches, growth):
    """What the server counts: look-ups that find a trained row, or none, and rows that come and go."""
    global made
    name, made = f"table {made}", made + 1
    table = Parameter((UNBOUNDED, 2), sparse=True, rule="add", reduce="sum", grows=growth)
    client.create({name: table}, {name: ht.init.zeros})
    for batch in batches:
        client.pull_rows(name, batch).wait()
        client.push_rows(name, batch, np.ones((EACH, 2), "float32"))
        client.clock().wait()
    [grown] = [t["grown"] for t in client.status()[0]["largest"] if t["name"] == name]
    client.free([name]).wait()
    return grown


def kept(batches, growth):
    """The percentage of look-ups that find a trained row."""
    grown = trained(batches, growth)
    return 100 * grown["hits"] / (grown["hits"] + grown["misses"])


def budget(rows, **options):
    return Growth(rows * (2 * 4 + Growth(1, **options).beside), **options)


found = {
    f"{world}, by {evict}": [kept(batches, budget(rows, evict=evict)) for rows in ROOM]
    for world, batches in worlds.items()
    for evict in ("age", "frequency")
}
ht.look.curves_svg(found, ROOM, label="rows that have room", up="rows found, percent", log_x=True)

# %% [markdown]
# Where the same users come for ever, frequency finds more, as one click of a stranger pushes nobody out; where fashions
# change, age does. Even counts forget: they are halved now and then, or who was active once would stay for ever.
#
# **Try it:** in which world does it matter more whether rows go by age or by frequency: "steady" or "changing"? Answer
# by the largest difference of the two curves.

# %%
try_it(
    None,
    lambda: max(worlds, key=lambda w: max(np.abs(np.subtract(found[f"{w}, by age"], found[f"{w}, by frequency"])))),
    "compare the two curves of each world",
)

# %% [markdown]
# ## Rows that are not worth it
#
# Most ids come once. A row for them is wasted: it is trained by one click and pushes another out. `after=3` gives an
# id its row with the third update. To count, a sketch suffices ([G. Cormode and S. Muthukrishnan,
# 2005](https://doi.org/10.1016/j.jalgor.2003.12.001)): two bytes for each row that has room, in which ids share
# counters. It counts an id too often now and then, never too seldom.

# %%
for after in (1, 2, 3, 5):
    shares = [kept(batches, budget(1000, after=after)) for batches in worlds.values()]
    print(f"after={after}: " + ", ".join(f"{world} {share:.0f} %" for world, share in zip(worlds, shares)))

# %% [markdown]
# **Try it:** which of these is best for the steady world?

# %%
try_it(
    None,
    lambda: max((1, 2, 3, 5), key=lambda after: kept(worlds["steady"], budget(1000, after=after))),
    "read the first column",
)

# %% [markdown]
# ## The others lie on disk
#
# Rows that go forget what they have learned. With `disk=` they move to a file of the server instead, and come back
# into memory when they are trained again. Since a few users make most clicks, many look-ups are answered from memory
# where a small part of the rows lies there:

# %%
for part in (1.0, 0.5, 0.2, 0.1):
    rows, width, beside = 20_000, 8, Growth(1, disk=1).beside
    growth = Growth(int(rows * (beside + part * width)), disk=int(rows * width * (1 - part)))
    in_memory, all_rows = growth.rows(width)
    grown = trained(worlds["steady"], growth)
    shares = grown["hits"] / (grown["hits"] + grown["misses"]), 1 - grown["on_disk"] / grown["hits"]
    print(f"{in_memory:6,} of {all_rows:,} rows in memory: {shares[0]:.0%} found, {shares[1]:.0%} of these in memory")

# %% [markdown]
# Whatever is in memory, the same rows are found, as none is lost. `hetu ps status` tells both figures.
#
# **Try it:** ten million rows of 32 numbers trained by SGD have 1.28 GB. How many of these bytes must be memory, in
# GB, if a tenth of the rows lies there, and each row needs 40 bytes beside its numbers?

# %%
try_it(None, b"MC41Mjg=", "0.128 GB of rows, and 40 bytes for each of ten million")

# %% [markdown]
# ## Or each row in fewer bytes
#
# Where ids *are* counted, a table can be stored in a share of its bytes. `ht.embed` has seventeen ways ([H. Zhang et
# al., 2024](https://arxiv.org/abs/2311.15578)). **Hashing** lets many ids share a vector; **quotient and remainder**
# multiplies two vectors of small tables, so that no two ids have the same; **int8** keeps a byte for each number, and
# one scale. All are layers that train like any other:

# %%
client.close()
server.stop()
for method, ratio in (("hash", 0.001), ("quotient_remainder", 0.01), ("tt_rec", 0.001), ("int8", 0.25)):
    layer = ht.embed.Embedding(1_000_000, 32, method, ratio=ratio)
    vectors = ht.Executor([layer(np.arange(2000))]).run()[0]
    distinct = len(np.unique(vectors.round(7), axis=0))
    print(f"{method:18} {layer.budget:11,} bytes of 128,000,000: {distinct:,} vectors of 2,000 ids")

# %% [markdown]
# Which of them learns most from the same bytes depends on the data: `examples/ctr/compress.py` compares all.
#
# **Try it:** how many ids of a million share a vector with id 7 if hashing has 0.001 of the bytes, counting id 7 too?

# %%
try_it(None, b"MTAwMA==", "a thousand vectors for a million ids")

# %% [markdown]
# **What to remember.** Hashed ids need no count of users. A server makes a row when it is trained; when the memory is
# full, rows go by age or by frequency, and those that come rarely get none. What must not be forgotten lies on disk,
# and what is counted may be stored in fewer bytes.
# The table is `hetu/ps/store/growing.py`; `examples/benchmarks/growing.py` measures ten million rows.
#
# Next: [a boosted tree on four workers](18_a_boosted_tree_on_four_workers.ipynb).
