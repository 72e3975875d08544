# %% [markdown]
# # 8. Hybrid training and the embedding cache
#
# **After this notebook you can** decide where an embedding table should live, train a click model with dense weights on
# ranks and tables on a server, and say what a cache of a given size and staleness saves.

# %%
# %load_ext hetu
import numpy as np

import hetu as ht
from hetu.ps import Cache, CachedTable, Client, Options, Parameter, ServerProcess
from hetu.ps.wire.environment import place
from hetu.strategies import Choice, Hybrid
from hetu.teach.try_it import try_it

# %% [markdown]
# ## Huge, and hardly touched
#
# Recommendation models have *[embedding](README.md#embedding) tables*: a row for every user, product or word. A table
# may have a hundred million rows, too many for one machine, and a batch touches a few thousand of them. So two kinds
# of parameters want opposite things:
#
# * **dense** weights: small, and each step needs all of them. All-reduce is best.
# * **tables**: huge, and each step needs a few rows. Keep them on servers; pull the rows of the batch, push their
#   gradients.
#
# Doing both is *hybrid* training ([S. Kim et al., Parallax, 2019](https://arxiv.org/abs/1808.02621)). The cost of a
# table in bytes is known before anything runs. Without servers, every rank must gather the gradient rows of all
# others:

# %%
ranks = [2, 3, 4, 8, 16, 32, 64]
table = [Choice("users", (10_000_000, 32), 4, lookups=512 * n, ranks=n) for n in ranks]
million = {
    "all-gather among ranks": [c.by_ranks / 1e6 for c in table],
    "rows from servers": [c.by_servers / 1e6 for c in table],
    "dense all-reduce": [2 * (n - 1) * 10_000_000 * 32 * 4 / 1e6 for n in ranks],
}
for n, gathered, served, dense in zip(ranks, *million.values()):
    print(f"{n:2} ranks: {gathered / served:4.1f} times what servers cost, by a dense sum {dense / served:,.0f} times")
ht.look.curves_svg(million, ranks, label="ranks", up="MB that all send in a step", log=True, log_x=True)

# %% [markdown]
# With two ranks gathering is even cheaper; it grows with every rank. A dense all-reduce of the table is out of the
# question.
#
# **Try it:** how many megabytes has the table itself? It has 10,000,000 rows of 32 numbers of 4 bytes.

# %%
try_it(None, b"MTI4MC4w", "multiply, and divide by a million")

# %% [markdown]
# ## The same few rows, again and again
#
# A few rows make up most lookups. Here are the ids of 150 batches, drawn from such a distribution (Zipf's law, as for
# words, $p_k \sim 1/k$):

# %%
ROWS, BATCHES, IDS = 5_000, 150, 64
weights = 1 / np.arange(1, ROWS + 1)
rng = np.random.default_rng(0)
batches = rng.choice(ROWS, size=(BATCHES, IDS), p=weights / weights.sum())
counts = np.sort(np.bincount(batches.reshape(-1), minlength=ROWS))[::-1]
for share in (0.01, 0.1, 0.5):
    lookups = counts[: int(share * ROWS)].sum() / counts.sum()
    print(f"the most frequent {share:4.0%} of the rows: {lookups:.0%} of the lookups")

# %% [markdown]
# So a worker should keep the rows that it uses often. hetu's `Cache` (after [X. Miao et al., HET,
# 2022](https://arxiv.org/abs/2112.07221)) keeps `rows` of them. It asks the server only about rows that it lacks or
# that are *too old*. Age is counted in updates: `pull_bound` is how many updates by others a row may have missed,
# `push_bound` how many of its own updates a worker may hold back.
#
# One worker of a real server trains on these batches, with caches of different sizes:

# %%
SHARES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0]


def counters(client, cache):
    """What a cache has to fetch and to push for these batches."""
    name = f"table of {cache}"
    client.create({name: Parameter((ROWS, 8), sparse=True, rule="add", reduce="sum")}, {name: np.zeros((ROWS, 8))})
    cached = CachedTable(client, name, cache)
    for ids in batches:
        cached.update(ids, 0.01 * (1 - cached.lookup(ids)))
        client.clock().wait()
    cached.flush()
    return cached.counters


server = ServerProcess(Options(1, "classroom", "asp"))
client = Client([server.address], worker=0, token="classroom")
by_policy = {p: [counters(client, Cache(p, share)) for share in SHARES] for p in ("lru", "lfu", "lfuopt")}
percent = {policy: [100 * c.hit_rate for c in found] for policy, found in by_policy.items()}
sizes = [100 * share for share in SHARES]
ht.look.curves_svg(percent, sizes, label="size of the cache, percent of the table", up="hits in percent", log_x=True)

# %% [markdown]
# A tenth of the table gives most of the possible hits. **lru** evicts the row that was used longest ago, **lfu** the
# row that was used least often. `lfuopt` is lfu that never evicts a row once it was used ten times, so it has less to
# decide. With skewed ids frequency beats recency. (At 100% the remaining misses are first lookups.)
#
# What does that mean on the wire? These are the rows moved, both ways:

# %%
found = by_policy["lfuopt"]
without = 2 * found[0].unique
moved = [c.fetched + c.pushed for c in found]
for share, rows in zip(SHARES, moved):
    print(f"cache of {share:4.0%}: {rows:6,} rows moved, {rows / without:4.0%} of what it is without a cache")

# %% [markdown]
# **Try it:** which is the smallest of these caches that moves less than a third of the rows? Answer with its share of
# the table.

# %%
try_it(None, lambda: min(s for s, rows in zip(SHARES, moved) if rows < without / 3), "read the last column")

# %% [markdown]
# ## How old may a row be?
#
# With one worker nobody else changes rows, so only `push_bound` was at work. Its price: the server, and so every
# other worker, hears of an update late. At 0 every update is pushed at once; at 10 a row collects ten:

# %%
BOUNDS = [0, 1, 3, 10, 30]
by_bound = [counters(client, Cache("lfuopt", 0.25, bound, bound)) for bound in BOUNDS]
client.close()
server.stop()
ht.look.curves_svg(
    {"fetched": [c.fetched for c in by_bound], "pushed": [c.pushed for c in by_bound]},
    BOUNDS,
    label="bound in updates",
    up="rows moved",
)

# %% [markdown]
# **Try it:** with one worker and a bound of 30, how many of its own updates may a row hold back before it must be
# pushed?

# %%
try_it(None, b"MzA=", "read what `push_bound` is")

# %% [markdown]
# ## A real model on real processes
#
# From a census form we predict who earns more than 50,000 dollars. The form has numbers, and categories that need
# embeddings. The model is written as if for one device.

# %%
train, test = ht.data.adult("train").take(6_000), ht.data.adult("test").take(2_000)
sizes = [len(words) for words in train.info["categorical"].values()]
offsets = np.cumsum([0, *sizes[:-1]])  # each column has a range of ids of its own


def columns(part):
    numbers, codes, label = part.arrays
    scaled = np.log1p(numbers)
    return (scaled - scaled.mean(0)) / scaled.std(0), codes + offsets, label.astype(np.float32)


x_train, ids_train, y_train = columns(train)
x_test, ids_test, y_test = columns(test)
rows = sum(sizes)


def click_model(rows, numbers, fields):
    x, ids = ht.placeholder("x", (None, numbers)), ht.placeholder("ids", (None, fields), "int64")
    y = ht.placeholder("y", (None,))
    with ht.scope("model"):
        vectors = ht.flatten(ht.nn.Embedding(rows, 8)(ids), 1)
        hidden = ht.nn.Linear(numbers + 8 * fields, 32, activation=ht.relu)(ht.concat([x, vectors], axis=1))
        logits = ht.squeeze(ht.nn.Linear(32, 1)(hidden), axis=1)
        loss = ht.mean(ht.binary_cross_entropy_with_logits(logits, y))
    variables = ht.Graph([loss]).leaves("variable")
    tables = [v for v in variables if "embedding" in v.name]
    dense = [v for v in variables if v not in tables]
    updates = ht.optim.Adam(3e-3).minimize(loss, dense) | ht.optim.SGD(0.3).minimize(loss, tables)
    return {"train": [loss, updates], "eval": [loss, logits]}


def train_and_test(strategy=None):
    executor = ht.Executor(click_model(rows, x_train.shape[1], ids_train.shape[1]), seed=0, strategy=strategy)
    for at in (*range(0, 6_000, 120), *range(0, 6_000, 120)):
        batch = slice(at, at + 120)
        executor.run("train", {"x": x_train[batch], "ids": ids_train[batch], "y": y_train[batch]})
    loss, scores = executor.run("eval", {"x": x_test, "ids": ids_test, "y": y_test})
    return executor, loss, np.mean((scores > 0) == y_test)


# %% [markdown]
# Two workers and a server; dense weights by all-reduce, the table on the server, half of its rows cached at each
# worker:

# %%
# %%ranks 2 --servers 1
strategy = Hybrid(served=["*embedding*"], cache=Cache("lfuopt", rows=0.5))
executor, loss, right = train_and_test(strategy)
hits = executor.placement.comm.rows.counters.hit_rate
if place()[0] == 0:
    print(executor.placement)
print(f"test loss {loss:.4f}, right {right:.1%}; {hits:.0%} of the rows came from the cache")

# %% [markdown]
# `print(placement)` says where each variable is kept, and what a step would move either way. This table has so few rows
# that two ranks would move fewer bytes, so we named it (`served`); with `Hybrid(batch_size=120)` hetu decides by those
# columns. Is it as good as one process?

# %%
_, alone, right_alone = train_and_test()
print(f"one process: test loss {alone:.4f}, right {right_alone:.1%}; the two workers are off by {loss - alone:+.4f}")

# %% [markdown]
# Not to the digit: cached rows are a little old. With `Cache(pull_bound=0, push_bound=0)`, or without a cache, the
# training is the same.
#
# The whole example, with three models and all data, is [examples/ctr](../examples/ctr/train.py).
#
# **Try it:** how many vectors does a batch of 120 forms look up? Then give the cache `pull_bound=100, push_bound=100`
# and run both cells again. Each run begins anew, and the last line tells what it costs. Which changes more, the hits
# or the loss?

# %%
try_it(None, lambda: 120 * ids_train.shape[1], "each form has as many ids as there are categorical columns")

# %% [markdown]
# **What to remember.** Dense parameters belong on ranks, tables on servers. Lookups are skewed, so a small cache
# removes most of the traffic. A bound in updates limits how stale a cached row may be.
# In lab 8 you write such a cache, row by row.
#
# Next: one tensor on many ranks, in [tensor parallel](09_tensor_parallel_and_zero.ipynb).
