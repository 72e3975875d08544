# %% [markdown]
# # 19. A search one can watch
#
# **After this notebook you can** let a machine look for good numbers, say what it knows after each try, stop bad tries
# early, and read what mattered.

# %%
import math
import tempfile
from pathlib import Path

import numpy as np

import hetu as ht
from hetu.automl import (
    ASHA,
    Bayesian,
    Float,
    GaussianProcess,
    Int,
    RandomSampler,
    search,
)
from hetu.automl.samplers import expected_improvement
from hetu.teach.try_it import try_it

# %% [markdown]
# ## A function that is dear
#
# How good is a learning rate of 0.1 for a network of 64 units? Nobody knows before the network is trained, and that
# takes minutes. So the loss is a function of the numbers that we choose, and every value of it is dear. Whoever looks
# for its least value must do with few.
#
# Let us first take a function that is cheap, so that we can look at it: Branin's, on a square, with three places where
# it has its least value of 0.398.


# %%
def branin(run):
    x, y = run["x"], run["y"]
    bend = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6
    return bend**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


square = {"x": Float(-5.0, 10.0), "y": Float(0.0, 15.0)}
chance = search(branin, square, trials=40, sampler=RandomSampler())

# %% [markdown]
# `search` called the function with 40 **configurations**, here by chance; picture and table grew while it did, and
# show the best ten. `print(chance)` prints them elsewhere. Chance is not bad: among 40 tries the best is
# in the best fortieth of the square, more or less. What others must beat is this. The best so far of both:

# %%
clever = search(branin, square, trials=40, sampler=Bayesian())
best = {"by chance": chance.so_far(), "Bayesian": clever.so_far()}
ht.look.curves_svg(best, label="trials", up="least so far", log=True)

# %% [markdown]
# **Try it:** by how much is the best of `clever` above the least value, 0.397887? Give two digits that are not 0.

# %%
try_it(None, lambda: clever.value(clever.best) - 0.397887, "clever.value(clever.best) is what the best one has")

# %% [markdown]
# ## What it knows
#
# How does one choose so well? By a **Gaussian process** ([C. Rasmussen and C. Williams, 2006](
# http://gaussianprocess.org/gpml/)): near a place that was tried, the function is about what it was there; farther away
# nobody knows. Both are numbers: a mean, and a standard deviation. In one dimension they can be drawn:


# %%
def dear(x):
    return np.sin(6 * x) + 0.6 * np.cos(15 * x)


tried = np.array([0.05, 0.35, 0.5, 0.9])
line = np.linspace(0, 1, 101)


def known(tried):
    model = GaussianProcess()
    model.fit(tried[:, None], dear(tried))
    return model.foretell(line[:, None])


mean, std = known(tried)
ht.look.curves_svg(
    {"the function": dear(line), "mean": mean, "mean - 2 std": mean - 2 * std, "mean + 2 std": mean + 2 * std},
    line,
    label="x",
)

# %% [markdown]
# Where to try next? Where the mean is low, one would repeat what is known; where the deviation is large, one would
# learn about places that may be bad. The **expected improvement** ([D. Jones et al., 1998](
# https://doi.org/10.1023/A:1008306431147)) weighs both: by how much will the value be below the best so far, on
# average, if a value above it counts as none?

# %%
gain = expected_improvement(mean, std, dear(tried).min())
ht.look.curves_svg({"expected improvement": gain}, line, label="x")

# %% [markdown]
# **Try it:** where is it largest? Try there too, with `np.append(tried, ...)`, fit once more, and give the next place.

# %%
try_it(
    None,
    lambda: (lambda more: line[np.argmax(expected_improvement(*known(more), dear(more).min()))])(
        np.append(tried, line[np.argmax(gain)])
    ),
    "known(np.append(tried, ...)) gives mean and deviation after five tries",
)

# %% [markdown]
# ## Bad tries are seen early
#
# A network that learns nothing in its first epoch will not be the best after 27. **Successive
# halving** lets many begin and few go on; **ASHA** ([L. Li et al., 2020](https://arxiv.org/abs/1810.05934)) does so
# without waiting: whenever it is asked, the best third of those at a rung goes on to the next one. The objective is
# told how far it may learn, `run.budget`, and where the trial that it goes on from has left its weights, `run.before`:

# %%
images, labels = ht.data.mnist("train")[np.arange(1500)][:2]
pixels = np.asarray(images, np.float32).reshape(1500, 14, 2, 14, 2).mean(axis=(2, 4)).reshape(1500, -1)
pixels /= pixels.max()


def network(run):
    x, t = ht.placeholder("x", (None, 196)), ht.placeholder("t", (None,), "int64")
    logits = ht.nn.Linear(run["width"], 10)(ht.relu(ht.nn.Linear(196, run["width"])(x)))
    loss = ht.mean(ht.softmax_cross_entropy(logits, t))
    step = ht.optim.Momentum(run["rate"], run["momentum"]).minimize(loss)
    executor = ht.Executor({"train": [loss, step], "test": [logits]}, seed=0)
    if run.before is not None:
        executor.load(run.before / "weights")
    for epoch in range(int(run.learned), int(run.budget)):
        order = np.random.default_rng(epoch).permutation(1000).reshape(-1, 50)
        for rows in order:
            executor.run("train", {x: pixels[rows], t: labels[rows]})
    executor.save(run.folder / "weights")
    return (executor.run("test", {x: pixels[1000:]})[0].argmax(axis=1) == labels[1000:]).mean()


space = {"rate": Float(1e-3, 1.0, log=True), "momentum": Float(0.0, 0.99), "width": Int(8, 128, log=True)}
folder = tempfile.TemporaryDirectory()
log = Path(folder.name) / "search.jsonl"
rungs = search(network, space, trials=60, maximize=True, schedule=ASHA(1, 27), sampler=RandomSampler(), log=log)

# %% [markdown]
# How many trials ended at each rung, and how many epochs did all of them learn?

# %%
for budget in (1, 3, 9, 27):
    print(f"{budget:2} epochs: {sum(trial.budget == budget for trial in rungs.trials)} trials")


def epochs(trials):
    """A trial that goes on has learned what its parent had."""
    return sum(trial.budget - (trials[trial.parent].budget if trial.parent is not None else 0) for trial in trials)


print(f"{epochs(rungs.trials):.0f} epochs in all")

# %% [markdown]
# **Try it:** how many epochs would the same configurations take if each of them learned 27?

# %%
try_it(
    None,
    lambda: 27 * sum(trial.parent is None for trial in rungs.trials),
    "configurations are the trials that have no parent",
)

# %% [markdown]
# ## What is written is not lost
#
# The search above has written a line to its **log** for whatever happened. Who calls `search` with the same log goes
# on; if all is done, it returns at once. So a search that was broken off costs one trial, and several processes share
# one: `hetu search run -w 4 script.py` starts four that know of each other by the log alone. Kill one: another one
# begins its trial anew. `hetu search show search.jsonl --watch` looks at it from outside.

# %%
print(log.read_text().splitlines()[1][:110], "...")
again = search(network, space, trials=66, maximize=True, schedule=ASHA(1, 27), sampler=RandomSampler(), log=log)
print(f"{len(again.trials) - len(rungs.trials)} new trials after {len(rungs.trials)}")

# %% [markdown]
# **Try it:** which is the number of the best trial of `again`?

# %%
try_it(None, lambda: again.best.number, "again.best is a trial")

# %% [markdown]
# ## What mattered
#
# After a search one knows more than the best numbers: a model of the loss says which of them it depends on ([F. Hutter
# et al., 2014](https://proceedings.mlr.press/v32/hutter14.html)). For each name it is the share of the variance that
# the name has by itself, of trials that learned as long as each other:

# %%
folder.cleanup()
flat = search(network, space, trials=30, maximize=True, schedule=ht.automl.WholeBudget(3), sampler=RandomSampler())
for name, share in flat.why().items():
    print(f"{name:10} {share:4.0%}")

# %% [markdown]
# **Try it:** which name could one leave alone? Look at the smallest share.

# %%
try_it(None, lambda: [*flat.why()][-1], "the last one in the table")

# %% [markdown]
# ## A machine that chooses
#
# Not only numbers may be searched. For a table of rows, `AutoClassifier` chooses what to do to its columns, one of six
# algorithms, and that one's numbers; and since several good models together are better than the best ([R. Caruana et
# al., 2004](https://doi.org/10.1145/1015330.1015432)), it keeps a weighted few. Of some rows of Adult, a census of
# 1994, it learns who earned more than 50,000 dollars:

# %%
adult = ht.data.adult("train")
numbers, words, income = adult[np.arange(3000)]
table = dict(zip(adult.info["numeric"], numbers.T)) | {
    name: column.astype(str) for name, column in zip(adult.info["categorical"], words.T)
}
part = {name: column[:2000] for name, column in table.items()}
rest = {name: column[2000:] for name, column in table.items()}
model = ht.automl.AutoClassifier(trials=12).fit(part, income[:2000])
print(f"area under the curve on 1,000 other rows: {model.score(rest, income[2000:]):.3f}")

# %% [markdown]
# **Try it:** how many models answer together?

# %%
try_it(None, lambda: len(model.ensemble_), "model.ensemble_ has their configurations and weights")

# %% [markdown]
# **What to remember.** A search needs a space, a sampler that says what to try next, and a schedule that says for how
# long. A Gaussian process knows what was tried and how little it knows elsewhere; the expected improvement weighs both.
# Bad tries end early, and the log is the search.
# The package is `hetu/automl`; `examples/benchmarks/automl.py` measures what it is worth. In lab 13 you write ASHA
# and TPE.
#
# Next: [a job that changes while it runs](20_a_job_that_changes_while_it_runs.ipynb).
