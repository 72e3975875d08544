# %% [markdown]
# # 18. A boosted tree on four workers
#
# **After this notebook you can** read a decision tree, find its best cut from counts alone, boost trees, and say which
# bytes four workers exchange to grow the same one.

# %%
import numpy as np

import hetu as ht
from hetu.dist import run_ranks
from hetu.ml import DecisionTreeClassifier, GradientBoostingClassifier
from hetu.teach.try_it import try_it

# %% [markdown]
# ## A tree can be read
#
# Of 26,049 people of a census of 1994 we know six numbers, and whether each earned more than 50,000 dollars a year. A
# **decision tree** asks one question after the other, each about one number, and a **leaf** says what share of the
# people who got there earned more:

# %%
adult, test = ht.data.adult("train"), ht.data.adult("test")
X, _, y = adult[np.arange(len(adult))]
other, _, wanted = test[np.arange(len(test))]
names = adult.info["numeric"]
tree = DecisionTreeClassifier(max_leaf_nodes=6).fit(X, y)
print(tree.text(names))
print(
    f"right for {tree.score(other, wanted):.1%} of {len(wanted):,} others; always 'no' is for {1 - wanted.mean():.1%}"
)

# %% [markdown]
# **Try it:** which number does the first question ask for? Give its name.

# %%
try_it(None, lambda: names[int(tree.trees_.features[0])], "the first line of the tree")

# %% [markdown]
# ## The best cut, from counts alone
#
# Which question is best? One after which the two sides are as pure as can be. Looking at all values of all columns
# would be dear, so values go into **bins** first, at most 255 for each column; a tree sees bins only. Then a
# **histogram** says everything: for each bin, how many rows there are, and how many of them earned more. Here for the
# years of education:

# %%
education = X[:, names.index("education_num")].astype(int)
rows, rich = np.bincount(education), np.bincount(education, weights=y)
for years in range(8, 17):
    print(f"{years:2} years: {rows[years]:6,} people, {rich[years] / rows[years]:5.1%} earned more")

# %% [markdown]
# A cut after bin k sends the bins up to k to the left. With sums from the left, both sides of every cut are known at
# once. The **gain** is by how much the squares fall: sum² / count of the left, plus that of the right, less that of the
# whole ([T. Chen and C. Guestrin, 2016](https://doi.org/10.1145/2939672.2939785), equation 7, with no penalty):

# %%
count, total = rows.cumsum(), rich.cumsum()
left = total[:-1] ** 2 / np.maximum(count[:-1], 1)
right = (total[-1] - total[:-1]) ** 2 / np.maximum(count[-1] - count[:-1], 1)
gain = left + right - total[-1] ** 2 / count[-1]
ht.look.curves_svg({"gain": gain[1:]}, range(1, 16), label="cut after this many years", up="gain")

# %% [markdown]
# **Try it:** after how many years is the best cut?

# %%
try_it(None, lambda: int(np.argmax(gain)), "the highest place of the curve")

# %% [markdown]
# ## Boosting: each tree mends the last
#
# One small tree is weak. **Gradient boosting** ([J. Friedman, 2001](https://doi.org/10.1214/aos/1013203451)) adds up
# many: each is grown on the gradients of the loss at what the trees before it say, so it goes a step down. The
# gradients come from a hetu graph; histograms then sum gradients (G) and curvatures (H) instead of counts. How far to
# step is the learning rate:

# %%
some = slice(0, 6000)
curves = {}
for rate in (0.03, 0.1, 1.0):
    options = dict(learning_rate=rate, max_iter=60, max_leaf_nodes=8, early_stopping=True, n_iter_no_change=60)
    boosted = GradientBoostingClassifier(**options).fit(X[some], y[some])
    curves[f"rate {rate}"] = -np.array(boosted.validation_score_)
ht.look.curves_svg(curves, label="trees", up="loss on rows held back")

# %% [markdown]
# Small steps need many trees; large ones soon make things worse, as trees then learn by heart.
#
# **Try it:** which of the three rates reaches the least loss within these 60 trees?

# %%
try_it(
    None,
    lambda: float(min(curves, key=lambda name: curves[name].min()).removeprefix("rate ")),
    "the curve with the lowest place",
)

# %% [markdown]
# ## Four workers, one tree
#
# Now the rows lie on four workers. None of them may send its rows, but histograms add up: the histogram of all rows is
# the sum of the workers' histograms. So each worker counts its own rows, sums travel, and all grow the same tree:

# %%
SIZE, BINS, COLUMNS = len(X) // 4, 64, X.shape[1]
sent = []


def fitted(comm):
    """What each rank does; rank 0 writes down how many bytes its sums of histograms have."""
    exchange = comm.all_to_all

    def counted(x, out, counts):
        if comm.rank == 0:
            sent.append(x.nbytes)
        return exchange(x, out, counts)

    comm.all_to_all = counted
    mine = slice(comm.rank * SIZE, (comm.rank + 1) * SIZE)
    model = GradientBoostingClassifier(max_iter=10, max_leaf_nodes=8, max_bins=BINS, comm=comm)
    return model.fit(X[mine], y[mine]).trees_


together = run_ranks(4, fitted)
alone = GradientBoostingClassifier(max_iter=10, max_leaf_nodes=8, max_bins=BINS).fit(X[: 4 * SIZE], y[: 4 * SIZE])
for rank, trees in enumerate(together):
    same = np.array_equal(trees.thresholds, alone.trees_.thresholds) and np.array_equal(
        trees.values, alone.trees_.values
    )
    print(f"rank {rank}: {len(trees.values)} nodes, the same as one worker's to the last bit: {same}")

# %% [markdown]
# To the last bit! Sums of floating-point numbers depend on their order, and a sum that is a little different may choose
# another cut. So gradients are rounded to **whole numbers** first, on a scale that all workers agree on: their sums are
# exact, in any order ([Y. Shi et al., 2022](https://arxiv.org/abs/2207.09682) show that few bits suffice).
#
# A node's histogram has G and H, each 4 bytes, for each bin of each column, whatever the number of rows. And only one
# of two children is counted: the other is the parent's less it.

# %%
print(f"{len(sent)} sums of histograms, {sum(sent):,} bytes; the rows themselves have {X[: 4 * SIZE].nbytes:,}")

# %% [markdown]
# **Try it:** how many bytes has the histogram of one node here, of 6 columns with 64 bins each?

# %%
try_it(None, lambda: COLUMNS * BINS * 2 * 4, "two numbers of four bytes for each bin of each column")

# %% [markdown]
# **What to remember.** A tree is grown from histograms, and histograms add up: so rows stay where they are, and what
# travels depends on columns and bins alone. Boosting grows each tree on gradients. Whole numbers make sums exact, so
# any number of workers grows the same tree.
# The grower is `hetu/ml/trees/grow.py`; `examples/ml/train.py` fits any estimator on ranks and servers.
#
# Next: [a search one can watch](19_a_search_one_can_watch.ipynb).
