# %% [markdown]
# # 11. Automatic parallelism, and why this plan
#
# **After this notebook you can** measure your machine, predict how long a step takes under any strategy, let a
# planner choose, and make it say *why*: for four ranks here, and for 64 GPUs that you do not have.

# %%
import numpy as np

import hetu as ht
from hetu.cpu_kernels import openblas
from hetu.dist import DataParallel, Link, Parallel, Pipeline, TensorParallel, ZeRO, run_ranks
from hetu.plan import Cluster, MachineProfile, Plan, auto, dgx_h100, simulate, trace

# %% [markdown]
# ## The question
#
# You know data parallelism, ZeRO, tensor parallelism and pipelines, and their products. On 64 ranks that makes
# hundreds of plans. Which one is fastest for *this* model on *this* cluster, and fits into memory? People guess. But
# three facts decide it, and all are known before the first step: the instructions of every rank, the sizes of its
# messages, and the time that both take.


# %%
def model(width=192, layers=2):
    x, digit = ht.placeholder("x", (None, width)), ht.placeholder("digit", (None,), "int64")
    with ht.scope("model"):
        h = x
        for k in range(layers):
            up = ht.nn.Linear(width, 4 * width, activation=ht.relu, name=f"layer_{k}/up")(h)
            h = h + ht.nn.Linear(4 * width, width, name=f"layer_{k}/down")(up)
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(width, 10, name="head")(h), digit))
    return [loss, ht.optim.SGD(0.1).minimize(loss)]


step = model()
rng = np.random.default_rng(0)
feeds = {"x": rng.normal(size=(256, 192)).astype(np.float32), "digit": rng.integers(0, 10, 256)}
shapes = {name: value.shape for name, value in feeds.items()}

# %% [markdown]
# ## Measure
#
# A `MachineProfile` knows how long instructions take on one kind of machine. It learns by running a step, even the step
# of one rank of four: the other three need not exist. It interpolates what was never measured. `hetu profile` measures
# the links between ranks; this notebook invents them: 50 microseconds, 2 GB/s.

# %%
openblas.set_threads(1)
wire = Link(latency=50e-6, bandwidth=2e9)
profile = MachineProfile(cluster=Cluster((4,), wire, wire))
for strategy in (DataParallel(), TensorParallel()):
    profile.learn(step, feeds, strategy, world_size=4, repeat=3)
for rank in range(4):  # each stage of a pipeline runs something else
    profile.learn(step, feeds, Pipeline(4, 8), rank=rank, world_size=4, repeat=3)
print(len(profile.timings), "kinds of instruction measured, for example")
for name in sorted(profile.timings, key=lambda name: -profile.timings[name].seconds)[:3]:
    print(f"{1e3 * profile.timings[name].seconds:8.3f} ms  {name}")

# %% [markdown]
# ## Simulate
#
# `simulate` cuts the graph for every rank as an executor would, plays all instruction lists on a clock, and returns
# the cost of a step: time, memory, and bytes on each link. Is it right? `trace` (tutorial 6) really runs the ranks on
# the virtual clock, over the same wire:

# %%
strategies = {
    "data parallel": DataParallel(),
    "ZeRO 3": ZeRO(3),
    "tensor parallel": TensorParallel(),
    "pipeline": Pipeline(4, 8),
}
for name, strategy in strategies.items():
    cost = simulate(step, strategy, profile, world_size=4, shapes=shapes)
    ran = max(event.end for event in trace(step, strategy, feeds, world_size=4, link=wire, repeat=3).events)
    print(
        f"{name:16} foretold {1e3 * cost.time:5.2f} ms, ran in {1e3 * ran:5.2f} ms; {max(cost.peak):10,} bytes a rank"
    )

# %% [markdown]
# The prediction ran nothing. The simulation knows every event, so it can be drawn; here is the pipeline:

# %%
simulate(step, strategies["pipeline"], profile, world_size=4, shapes=shapes).timeline

# %% [markdown]
# ## Choose, and say why
#
# `auto` simulates its candidates: all products of the ways you know (after Galvatron's decision tree, X. Miao et al.,
# 2023), and splits that differ from operator to operator. It takes the fastest that fits into `budget` bytes per
# rank. In a program you write `ht.Executor(..., strategy="auto")`; here we only ask for its choice.


# %%
def choose(profile, **options):
    """What the four ranks agree on; each simulates a part of the candidates."""

    def run(comm):
        return auto(batch_size=256, profile=profile, **options).choose({"train": step}, comm)

    return run_ranks(4, run)[0]


plan = choose(profile)
print(plan.why())

# %% [markdown]
# Read it from the top: the plan and its cost, the cost of the next best, and the constraint that decided.
#
# **Another network**, with 25 times the bandwidth and a tenth of the latency, needs no new measurement:

# %%
fast = Link(latency=5e-6, bandwidth=50e9)
faster = profile.on(Cluster((4,), fast, fast))
there = choose(faster)
print(there.why())

# %% [markdown]
# When messages are cheap, other plans win. Where do they cross? The same strategies over links of all speeds:

# %%
speeds = [0.25, 0.5, 1, 2, 4, 8]
curves = {}
for name in ("data parallel", "ZeRO 3", "tensor parallel", "pipeline"):
    costs = []
    for speed in speeds:
        link = Link(latency=20e-6, bandwidth=speed * 1e9)
        joined = profile.on(Cluster((4,), link, link))
        costs.append(1e3 * simulate(step, strategies[name], joined, world_size=4, shapes=shapes).time)
    curves[name] = costs
ht.look.curves_svg(curves, [np.log2(s) for s in speeds], label="log2 of the bandwidth in GB/s; ms per step", log=True)

# %% [markdown]
# **Less memory.** Give each rank a budget, and memory may decide instead of time:

# %%
peak = there.why().best.peak
print(choose(faster, budget=0.9 * peak).why())
try:
    choose(faster, budget=0.2 * peak)
except ht.errors.BudgetError as error:
    print(f"\n{error.message}")

# %% [markdown]
# "Decided by memory" tells what a larger machine would gain. That is worth knowing before you buy one.
#
# ## What you know, and what it may keep
#
# `hints` fixes your own decisions. A plan is plain data: choose once, keep it as JSON, run it as often as you like.
# It trains like one process:

# %%
plan = choose(profile, hints={"data": 2})
kept = Plan.from_json(plan.to_json())
print(kept.name, "-", len(plan.to_json()), "characters of JSON")


def losses(strategy=None, comm=None):
    executor = ht.Executor(step, strategy=strategy, comm=comm)
    return np.round([executor.run(feeds)[0].item() for _ in range(4)], 5)


print("one process", losses())
print("this plan  ", run_ranks(4, lambda comm: losses(kept, comm))[0])

# %% [markdown]
# ## 64 GPUs that you do not have
#
# A data sheet can describe a cluster too. Here is a language model of 1.6 billion weights on hosts with eight H100
# each; links have 450 GB/s inside a host and 50 between hosts. Nothing is allocated: executors make variables, graphs
# do not.


# %%
def large(width=4096, blocks=8):
    ids, wanted = ht.placeholder("ids", (None, 1024), "int64"), ht.placeholder("wanted", (None, 1024), "int64")
    with ht.scope("gpt"):
        h = ht.nn.Embedding(8192, width)(ids)
        for _ in range(blocks):
            h = ht.nn.TransformerBlock(width, 16, causal=True, name="block")(h)
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(width, 8192, name="head")(h), wanted))
    return [loss, ht.optim.Adam(1e-4).minimize(loss)]


gpt = large()
weights = sum(int(v.tensor.size) for v in ht.Graph([gpt[0]]).leaves("variable"))
print(f"{weights / 1e9:.2f} billion weights")
batch = {"ids": (64, 1024), "wanted": (64, 1024)}
h100s = MachineProfile.of(dgx_h100(8))
plans = {
    "data parallel": DataParallel(),
    "ZeRO 3": ZeRO(3),
    "8 tensor x 8 data": Parallel(data=8, tensor=8),
    "8 tensor x 8 data, ZeRO 1": Parallel(data=8, tensor=8, zero=1),
}
for name, strategy in plans.items():
    cost = simulate(gpt, strategy, h100s, world_size=64, shapes=batch, traced=1)
    print(f"{name:27} {1e3 * cost.time:6.0f} ms per step, {max(cost.peak) / 1e9:5.1f} of 80 GB per GPU")

# %% [markdown]
# **Try it:** what if all links had 450 GB/s (`Cluster((64,), ...)`)? What if the batch were 512? Which plan wins?
# Would you have guessed it?
#
# **What to remember.** Everything that decides about a plan is known before the first step, so it can be computed
# instead of tried. A good planner shows its reasons and how far behind the others were.
#
# Next: [a kernel for a GPU, proven without one](12_a_cuda_kernel_without_a_gpu.ipynb).
