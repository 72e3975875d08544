# %% [markdown]
# # 16. A graph larger than a rank
#
# **After this notebook you can** train a graph network, say what a node learns from its neighbors, sample neighbors
# where a graph is large, and divide one over ranks that need to see all of it.

# %%
import numpy as np

import hetu as ht
from hetu import dist, plan
from hetu.dist import GraphGrid, run_ranks
from hetu.models import graphs
from hetu.teach.try_it import try_it

# %% [markdown]
# ## Words and their relations
#
# 3,000 nouns of WordNet, each with the words of its gloss, and 4,055 relations between them. Of 140 nouns you are told
# the class. Which class have the others?

# %%
nouns = ht.data.wordnet_nouns()
names, classes = nouns.info["names"], nouns.info["classes"]
print(classes)
for i, j in nouns.edges[:4]:
    print(f"{names[i]} ({classes[nouns.y[i]]}) -- {names[j]} ({classes[nouns.y[j]]})")
same = np.mean(nouns.y[nouns.edges[:, 0]] == nouns.y[nouns.edges[:, 1]])
print(f"{same:.0%} of the relations join two of a class")

# %% [markdown]
# So the neighbors know something. A **graph convolution** lets each node gather from them: the features of all nodes,
# times a matrix that has an entry for each relation, times weights: $Y = \tilde D^{-1/2} (A + I) \tilde D^{-1/2} X
# W$. `adjacency` makes the matrix: 1 over the roots of both degrees, and every node is its own neighbor, too ([T.
# Kipf and M. Welling, 2017](https://arxiv.org/abs/1609.02907)).

# %%
graph = ht.data.adjacency(nouns.edges, len(nouns))
features = (nouns.features / np.maximum(nouns.features.sum(axis=1, keepdims=True), 1)).astype("float32")
print(len(graph.values), "entries of", len(nouns) ** 2)


def accuracy(model, steps=60):
    with ht.scope("nouns"):
        y = model(ht.constant(features))
    loss = ht.mean(ht.softmax_cross_entropy(ht.take(y, nouns.train), nouns.y[nouns.train]))
    executor = ht.Executor({"train": [loss, ht.optim.AdamW(0.02, weight_decay=0.01).minimize(loss)], "eval": [y]})
    for _ in range(steps):
        executor.run("train")
    found = executor.run("eval")[0].argmax(axis=1)
    return np.mean(found[nouns.test] == nouns.y[nouns.test])


def alone(x):
    hidden = ht.nn.Linear(x.shape[1], 64, activation=ht.relu)(x)
    return ht.nn.Linear(64, len(classes))(hidden)


print(f"words alone          {accuracy(alone):.1%}")
print(f"words and neighbors  {accuracy(lambda x: graphs.gcn(x, graph, len(classes))):.1%}")

# %% [markdown]
# **Try it:** how many entries has the row of a node with two relations?

# %%
try_it(None, b"Mw==", "every node is its own neighbor, too")

# %% [markdown]
# ## Samples
#
# Two layers see neighbors of neighbors. In a graph of a hundred million nodes these are too many for a step, and
# nobody wants to wait for all. So take some nodes, some of their neighbors, and some of theirs ([W. Hamilton et al.,
# 2017](https://arxiv.org/abs/1706.02216)):

# %%
mean = ht.data.adjacency(nouns.edges, len(nouns), "mean")
batches = ht.data.NeighborLoader(
    nouns.edges, len(nouns), nouns.train, nouns.y[nouns.train], fanouts=(4, 4), batch_size=35, shuffle=True
)
seen = batches.placeholders()
with ht.scope("sampled"):
    network = graphs.Sampled(features.shape[1], len(classes))
part = network(ht.take(ht.constant(features), seen.nodes), seen.hops)
loss = ht.mean(ht.softmax_cross_entropy(part, seen.t))
whole = network(features, ((None, mean), (None, mean)))  # the same weights on the whole graph
executor = ht.Executor({"train": [loss, ht.optim.AdamW(0.01, weight_decay=0.01).minimize(loss)], "eval": [whole]})
sizes = []
for _ in range(60):
    for batch in batches:
        executor.run("train", dict(zip(seen.inputs, batch)))
        sizes.append(len(batch[0]))
found = executor.run("eval")[0].argmax(axis=1)
print(f"a step sees {np.mean(sizes):.0f} of {len(nouns)} nouns on average")
print(f"accuracy {np.mean(found[nouns.test] == nouns.y[nouns.test]):.1%}")

# %% [markdown]
# **Try it:** how many batches has an epoch? Then set `fanouts=(1, 1)`: how many nouns does a step see then, and what
# does that cost? Guess both first.

# %%
try_it(None, lambda: len(batches), "140 nouns are told, 35 in a batch")

# %% [markdown]
# ## All of it, on four ranks
#
# Samples are noise. To see the whole graph in every step where no rank can hold it, divide it: rank *i* keeps a block
# of the nodes, and of the matrix their rows. To gather, it needs the blocks of all others. They are passed round, one
# after the other, and nobody ever has more than two.
#
# With **replicas** fewer blocks travel. Ranks stand in a grid; those of a row keep the same block, each gathers a part
# of the columns, and the row adds up ([A. Tripathy et al., 2020](https://arxiv.org/abs/2005.03300), "1.5D"):

# %%
for ranks, replicas in ((4, 1), (4, 2), (16, 1), (16, 2), (16, 4)):
    grid = GraphGrid(0, ranks, 4096, replicas=replicas)
    received = 4096 / replicas + (4096 * replicas / ranks if replicas > 1 else 0)
    print(f"{ranks:2} ranks, {replicas} of each block: {grid.size:4} nodes kept, {received:6.0f} rows received a layer")

# %% [markdown]
# The grid stands where the graph stood. All ranks build the same model, each feeds its own block, and since every rank
# has a program of its own, gradients are added up by hand:

# %%
NODES, HIDDEN = 3000, 16


def train(comm, replicas, steps=10):
    grid = GraphGrid(comm.rank, comm.world_size, NODES, replicas=replicas)
    x, t = ht.placeholder("x", (grid.size, features.shape[1])), ht.placeholder("t", (grid.size,), "int64")
    known = ht.placeholder("known", (grid.size,))
    with ht.scope("grid"):
        y = graphs.gcn(x, grid, len(classes), hidden=HIDDEN, dropout=0.0)
    loss = ht.sum(ht.softmax_cross_entropy(y, t) * known) / (len(nouns.train) * replicas)
    optimizer = ht.optim.Adam(0.02)
    slopes = optimizer.minimize(loss).gradients
    updates = optimizer.apply({weight: dist.all_reduce(slope) for weight, slope in slopes.items()})
    executor = ht.Executor([dist.all_reduce(loss), updates], comm=comm)
    mask = np.isin(np.arange(NODES), nouns.train).astype("float32")
    feed = {x: features[grid.block], t: nouns.y[grid.block], known: mask[grid.block], **grid.feed(graph)}
    losses = [float(executor.run(feed)[0]) for _ in range(steps)]
    return losses, plan.bytes_between_ranks(executor.program(feed), comm.world_size)


print("one rank            ", np.round(run_ranks(1, lambda comm: train(comm, 1))[0][0][-3:], 5))
for replicas in (1, 2):
    losses, sent = run_ranks(4, lambda comm, replicas=replicas: train(comm, replicas))[0]
    print(f"four ranks, replicas {replicas}", np.round(losses[-3:], 5), f"{sent / 1e3:,.0f} kB a step")

# %% [markdown]
# The same losses. With so few nodes sums of rows cost more than passing blocks; on hundreds of ranks it is the other
# way round, as the table above says.
#
# **Try it:** how many of 4,096 nodes does each of 64 ranks keep with 8 replicas? Then give `gcn` more hidden units
# than there are words: which product comes first then, and what does that do to the bytes? Read `forward` of
# `nn.GraphConv`.

# %%
try_it(None, lambda: GraphGrid(0, 64, 4096, replicas=8).size, "64 ranks hold 8 equal blocks")

# %% [markdown]
# **What to remember.** A graph convolution is a product with a sparse matrix. Where neighbors are of a class, gathering
# pays more than learning. Samples bound a step, replicas bound what travels.
#
# Next, and last: [ten million rows in the memory of one](17_ten_million_rows_in_the_memory_of_one.ipynb).
