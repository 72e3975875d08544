# %% [markdown]
# # 15. A mixture of experts
#
# **After this notebook you can** build a layer in which each token goes through a few of many small networks, see
# what a gate learns, keep its experts busy, and put them on four ranks.

# %%
from collections import Counter

import numpy as np

import hetu as ht
from hetu import dist, nn
from hetu.core.op import Role
from hetu.dist import run_ranks
from hetu.teach.try_it import try_it

# %% [markdown]
# ## A task with four parts
#
# A dense layer uses all its weights for every token. A **mixture of experts** has many small networks, the experts,
# and a *gate* that chooses for each token: many weights, and few of them at work.
#
# The data below has four kinds of tokens. The first two numbers say which kind a token is, by a corner of the plane,
# and each kind has a rotation of its own for the others. A network that does not tell them apart must do all at once.

# %%
rng = np.random.default_rng(0)
FEATURES, TOKENS = 10, 2048
turns = [np.linalg.qr(rng.standard_normal((8, 8)))[0] for _ in range(4)]
kind = rng.integers(0, 4, TOKENS)
corners = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]])[kind] + 0.2 * rng.standard_normal((TOKENS, 2))
numbers = rng.standard_normal((TOKENS, 8))
turned = np.stack([row @ turns[k] for row, k in zip(numbers, kind)])
feed = {"x": np.concatenate([corners, numbers], axis=1), "t": turned}
feed = {name: array.astype(np.float32) for name, array in feed.items()}
print(feed["x"].shape, "->", feed["t"].shape, "kinds", np.bincount(kind))

# %% [markdown]
# **Try it:** how many numbers does a table of four rotations of 8 numbers have?

# %%
try_it(None, b"MjU2", "a rotation is a matrix")

# %% [markdown]
# ## The layer
#
# `MixtureOfExperts` takes a gate. This one chooses the expert of the greatest probability, as *Switch* does ([W.
# Fedus et al., 2021](https://arxiv.org/abs/2101.03961)), and weighs what it makes by that probability. So $y = p_i(x)
# \, f_i(x)$, with $i$ the greatest of $p = \text{softmax}(W x)$. Without the weight nothing would tell the gate
# whether its choice was good: an index has no gradient.


# %%
def model(gate, experts=4, balance=0.1):
    x, t = ht.placeholder("x", (None, FEATURES)), ht.placeholder("t", (None, 8))
    with ht.scope("mixture"):
        layer = nn.MixtureOfExperts(FEATURES, 16, experts, gate(), capacity=1.25)
        y, unevenness = layer(x)
        error = ht.mean((nn.Linear(FEATURES, 8)(y) - t) ** 2)
    return layer, error, error + balance * unevenness


def train(gate, steps=400, **options):
    layer, error, loss = model(gate, **options)
    chosen = layer.gate(ht.placeholder("x", (None, FEATURES))).experts
    executor = ht.Executor({"train": [error, ht.optim.Adam(0.01).minimize(loss)], "gate": [chosen]}, seed=1)
    errors = [float(executor.run("train", feed)[0]) for _ in range(steps)]
    return errors, executor.run("gate", {"x": feed["x"]})[0][:, 0]


errors, chosen = train(lambda: nn.TopKGate(FEATURES, 4))
alone, _ = train(lambda: nn.TopKGate(FEATURES, 1), experts=1)
print(f"four experts {errors[-1]:.3f}, one {alone[-1]:.3f}")
ht.look.curves_svg({"four experts": errors, "one expert": alone}, label="step", up="error")

# %% [markdown]
# Each token has gone through as many weights in both. What has the gate learned? Which expert takes tokens of which
# kind:

# %%
table = np.zeros((4, 4), int)
np.add.at(table, (kind, chosen), 1)
for k, row in enumerate(table):
    print(f"kind {k}:", *(f"{n:5}" for n in row))

# %% [markdown]
# Nobody told it that there are four kinds.
#
# **Try it:** for how many of the 2,048 tokens has each of the four experts room? (`capacity` is 1.25.) Then train two
# experts (`nn.TopKGate(FEATURES, 2)`, `experts=2`): which kinds share one?

# %%
try_it(None, b"NjQwLjA=", "1.25 times its fair share")

# %% [markdown]
# ## Busy experts
#
# A gate that prefers one expert trains it more, so that it becomes better, and is preferred more. And experts have
# room for `capacity` times their fair share; who finds none is passed over. So the layer gives a second result: a
# number that is 1 when all experts have as much to do, and grows when not. `balance` is its share in the loss. What
# if it is small, or 0?

# %%
for balance in (0.0, 0.01, 0.1):
    errors, chosen = train(lambda: nn.TopKGate(FEATURES, 4), balance=balance)
    print(f"balance {balance:4}: error {errors[-1]:.3f}, tokens", np.bincount(chosen, minlength=4))

# %% [markdown]
# Other gates keep the balance in another way. *Hash* goes by the id of a token and learns nothing. *Balanced* ([M.
# Lewis et al., 2021](https://arxiv.org/abs/2103.16716)) gives each expert exactly as many tokens in training, by the
# assignment of the greatest sum of scores:

# %%
scores = ht.constant(rng.standard_normal((12, 3)) + [3.0, 0.0, 0.0])
with ht.scope("balanced"):
    gate = nn.BalancedGate(3, 3)
choice = gate(scores)
executor = ht.Executor({"train": [choice.experts, ht.optim.SGD(0.0).minimize(ht.mean(choice.weights))]})
executor.state[gate.linear.weight] = np.eye(3)
print("best     ", np.bincount(np.argmax(scores.attrs["value"], axis=1), minlength=3))
print("assigned ", np.bincount(executor.run("train")[0][:, 0], minlength=3))

# %% [markdown]
# *Dense to sparse* ([X. Nie et al., 2021](https://arxiv.org/abs/2112.14397)) begins with all experts for every token,
# weighed by a softmax, and cools it down: first everybody learns, then the gate decides. `examples/experts/evolve.py`
# begins with one expert, goes on with copies of it by such a gate, and compares that with Switch for as many
# evaluations of experts.

# %%
with ht.scope("cooling"):
    cooling = nn.DenseToSparseGate(FEATURES, 4, temperature=ht.schedules.exponential(4.0, 0.02, every=200))
choice = cooling(ht.placeholder("x", (None, FEATURES)))
active = ht.mean(ht.sum(ht.astype(choice.weights > 0, "float32"), axis=1))
executor = ht.Executor([active, ht.optim.Adam(0.01).minimize(-ht.mean(ht.sum(choice.weights**2, axis=1)))])
counts = [float(executor.run({"x": feed["x"]})[0]) for _ in range(300)]
print(f"experts at work for a token: {counts[0]:.1f} at first, {counts[-1]:.2f} in the end")
ht.look.curves_svg({"experts at work": counts}, label="step")

# %% [markdown]
# **Try it:** how many of 12 tokens does each of 3 experts of a balanced gate get?

# %%
try_it(None, b"NA==", "exactly as many")

# %% [markdown]
# ## Four ranks
#
# Experts are made to be spread: rank 0 keeps one, rank 1 the next. Each rank has a quarter of the tokens, chooses, and
# sends those that find room to where their experts are (`route_rows`). What comes back is weighed and added. The model
# does not change; the strategy says it:


# %%
def losses(comm=None):
    _, error, loss = model(lambda: nn.TopKGate(FEATURES, 4))
    strategy = dist.ExpertParallel() if comm else None
    executor = ht.Executor([error, ht.optim.Adam(0.01).minimize(loss)], seed=1, strategy=strategy, comm=comm)
    values = [float(executor.run(feed)[0]) for _ in range(5)]
    steps = executor.program(feed).steps
    kept = [step.node for step in steps if step.node.role is Role.COMMUNICATION]
    return values, Counter(node.op.name for node in kept)


single, _ = losses()
ranks = run_ranks(4, losses)
print("one process", np.round(single, 5))
print("four ranks ", np.round(ranks[0][0], 5))
print("communication of a step:", dict(ranks[0][1]))

# %% [markdown]
# The same losses: tokens compete for room in the order of the whole batch, wherever they lie. Weights of experts are
# not reduced, since nobody else has them.
#
# On a real cluster some ranks share a host and others do not. `ExpertParallel(hosts=...)` first joins what the ranks
# of a host have for another one, so that fewer and larger messages cross the slow wire ([X. Nie et al., "HetuMoE",
# 2022](https://arxiv.org/abs/2203.14685)). From the shell it is `heturun -w 4 python examples/experts/train.py
# --strategy ep`, which writes Shakespeare.
#
# **Try it:** how many tokens does each of the four ranks have before it sends any? Then give the layer 16 experts, and
# look at the table again: who shares a kind? And set `capacity=0.5`: how much worse is the error when half of the
# tokens find no room?

# %%
try_it(None, b"NTEy", "a quarter")

# %% [markdown]
# **What to remember.** Weights grow with the number of experts, work does not. A gate learns through the weight of its
# choice. Balance has to be asked for. Experts are spread over ranks, tokens travel, and gradients of experts stay at
# home.
#
# Next: [a graph larger than a rank](16_a_graph_larger_than_a_rank.ipynb).
