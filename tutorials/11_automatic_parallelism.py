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
from hetu.teach.try_it import try_it

# %% [markdown]
# ## The question
#
# You know data parallelism, ZeRO, tensor parallelism and pipelines, and their products. On 64 ranks that makes
# hundreds of plans. Which one is fastest for *this* model on *this* cluster, and fits into memory? People guess. But
# three facts decide it, and all are known before the first step: the instructions of every rank, the sizes of its
# messages, and the time that both take.

# %%
x, digit = ht.placeholder("x", (None, 192)), ht.placeholder("digit", (None,), "int64")
h = x
for k in range(2):
    up = ht.nn.Linear(192, 768, activation=ht.relu, name=f"layer_{k}/up")(h)
    h = h + ht.nn.Linear(768, 192, name=f"layer_{k}/down")(up)
loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(192, 10, name="head")(h), digit))
step = [loss, ht.optim.SGD(0.1).minimize(loss)]
rng = np.random.default_rng(0)
feeds = {"x": rng.standard_normal((256, 192), "float32"), "digit": rng.integers(0, 10, 256)}
shapes = {name: value.shape for name, value in feeds.items()}

# %% [markdown]
# **Try it:** how many weights and biases has this model, in thousands?

# %%
try_it(
    None,
    lambda: sum(v.tensor.size for v in ht.Graph([loss]).leaves("variable")) / 1e3,
    "twice two layers, and the head",
)

# %% [markdown]
# ## Measure
#
# A `MachineProfile` knows how long instructions take on one kind of machine. It learns by running a step, even the step
# of one rank of four: the other three need not exist. It interpolates what was never measured. `hetu profile` measures
# the links between ranks; this notebook invents them: 50 microseconds, 2 GB/s.

# %%
openblas.set_threads(1)  # a rank's own
wire = Link(latency=50e-6, bandwidth=2e9)
profile = MachineProfile(cluster=Cluster((4,), wire, wire))
strategies = {"data": DataParallel(), "ZeRO 3": ZeRO(3), "tensor": TensorParallel(), "pipeline": Pipeline(4, 8)}
for name, rank in (("data", 0), ("tensor", 0), *(("pipeline", rank) for rank in range(4))):
    profile.learn(step, feeds, strategies[name], rank=rank, world_size=4, repeat=3)
print(len(profile.timings), "kinds of instruction measured")

# %% [markdown]
# **Try it:** how many microseconds does a message of 1 MB take on this wire?

# %%
try_it(None, lambda: 1e6 * (wire.latency + 1e6 / wire.bandwidth), "the latency, and the bytes by the bandwidth")

# %% [markdown]
# ## Simulate
#
# `simulate` cuts the graph for every rank as an executor would, plays all instruction lists on a clock, and returns
# the cost of a step: time, memory, and bytes on each link. Is it right? `trace` (tutorial 6) really runs the ranks on
# the virtual clock, over the same wire:


# %%
def foretold(strategy, profile=profile):
    return simulate(step, strategy, profile, world_size=4, shapes=shapes)


for name, strategy in strategies.items():
    told, ran = foretold(strategy), trace(step, strategy, feeds, world_size=4, link=wire, repeat=3)
    took, sent = max(event.end for event in ran.events), ran.overlap(0).communication
    print(
        f"{name:8} foretold {1e3 * told.time:5.2f} ms, ran in {1e3 * took:5.2f} ({took / told.time - 1:+.0%}); ", end=""
    )
    print(
        f"messages {1e3 * told.timeline.overlap(0).communication:.2f} and {1e3 * sent:.2f} ms, {max(told.peak):,} bytes"
    )

# %% [markdown]
# The prediction ran nothing. Messages are foretold to the digit, since both take them from the model of the wire. What
# is off is computing. An instruction was timed alone, by the median; in the step each collective waits for whichever of
# the four ranks is the slowest that time, while the ranks share one machine's caches and cores, and that takes longer.
# Instructions that only ZeRO 3 has were never timed: they are interpolated, which errs to either side. A busy machine
# shows more of both. How well the *order* of plans is foretold on a quiet one, `examples/benchmarks/auto.py` measures.
#
# The simulation knows every event, so it can be drawn; here is the pipeline:

# %%
foretold(strategies["pipeline"]).timeline

# %% [markdown]
# **Try it:** how long does `ZeRO(1)` take? As long as which row of the table? Answer with its name. (SGD keeps nothing
# that ZeRO 1 could shard.)


# %%
def distance(name):
    return abs(foretold(strategies[name]).time - foretold(ZeRO(1)).time)


try_it(None, lambda: min(strategies, key=distance), "ask `foretold(ZeRO(1)).time`")

# %% [markdown]
# ## Choose, and say why
#
# `auto` simulates its candidates: all products of the ways you know (after Galvatron's decision tree,
# [X. Miao et al., 2023](https://arxiv.org/abs/2211.13878)), and splits that differ from operator to operator. It takes
# the fastest that fits into `budget` bytes per rank. In a program you write `ht.Executor(..., strategy="auto")`; here
# we only ask for its choice.


# %%
def choose(profile, **options):
    planner = auto(batch_size=256, profile=profile, **options)
    return run_ranks(4, lambda comm: planner.choose({"train": step}, comm))[0]  # each simulates some candidates


print(choose(profile).why())

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
# When messages are cheap the order of plans changes, if not at the top then below it. Where do they cross? The same
# strategies over links of all speeds:

# %%
speeds = [0.25, 0.5, 1, 2, 4, 8]
links = [Link(latency=20e-6, bandwidth=speed * 1e9) for speed in speeds]
machines = [profile.on(Cluster((4,), link, link)) for link in links]
curves = {name: [1e3 * foretold(s, machine).time for machine in machines] for name, s in strategies.items()}
ht.look.curves_svg(curves, speeds, label="bandwidth in GB/s", up="ms per step", log=True, log_x=True)

# %% [markdown]
# **Less memory.** Give each rank a budget, and plans that need less come up, or memory decides instead of time:

# %%
peak = there.why().best.peak
print(choose(faster, budget=0.9 * peak).why())
try:
    choose(faster, budget=0.2 * peak)
except ht.errors.BudgetError as error:
    print(f"\n{error.message}")

# %% [markdown]
# A plan that keeps less may even be as fast. Where it says "decided by memory", it tells what a larger machine would
# gain. That is worth knowing before you buy one.
#
# **Try it:** how many bytes does the plan for the fast network need on a rank? Then find the smallest budget that has
# a plan: the error above names it, and `choose` with one byte less must fail.

# %%
try_it(None, lambda: there.why().best.peak, "it stands in the text that says why")

# %% [markdown]
# ## What you know, and what it may keep
#
# `hints` fixes your own decisions. A plan is plain data: choose once, keep it as JSON, run it as often as you like.
# It trains like one process:

# %%
text = choose(profile, hints={"data": 2}).to_json()
kept = Plan.from_json(text)
print(kept.name, "-", len(text), "characters of JSON")


def losses(comm, strategy=None):
    executor = ht.Executor(step, strategy=strategy, comm=comm if strategy else None)
    return np.round([executor.run(feeds)[0] for _ in range(4)], 5)


print("one process", losses(None), " this plan", run_ranks(4, lambda comm: losses(comm, kept))[0])

# %% [markdown]
# **Try it:** `{"data": 2}` on four ranks: how many ranks are left for each copy of the model?

# %%
try_it(None, b"Mg==", "four divided by two")

# %% [markdown]
# ## 64 GPUs that you do not have
#
# A data sheet can describe a cluster too. Here is a language model of 1.7 billion weights on hosts with eight H100
# each; links have 450 GB/s inside a host and 50 between hosts. Nothing is allocated: executors make variables, graphs
# do not.

# %%
ids, wanted = (ht.placeholder(name, (None, 1024), "int64") for name in ("ids", "wanted"))
h = ht.nn.Embedding(8192, 4096)(ids)
for _ in range(8):
    h = ht.nn.TransformerBlock(4096, 16, causal=True, name="block")(h)
loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(4096, 8192, name="head")(h), wanted))
gpt, batch = [loss, ht.optim.Adam(1e-4).minimize(loss)], {"ids": (64, 1024), "wanted": (64, 1024)}
print(f"{sum(v.tensor.size for v in ht.Graph([loss]).leaves('variable')) / 1e9:.2f} billion weights")
eights = {"8 tensor x 8 data": Parallel(data=8, tensor=8), "the same, ZeRO 1": Parallel(data=8, tensor=8, zero=1)}
for name, strategy in {"data": DataParallel(), "ZeRO 3": ZeRO(3), **eights}.items():
    cost = simulate(gpt, strategy, MachineProfile.of(dgx_h100(8)), world_size=64, shapes=batch, traced=1)
    print(f"{name:18} {1e3 * cost.time:6.0f} ms per step, {max(cost.peak) / 1e9:5.1f} of 80 GB per GPU")

# %% [markdown]
# **Try it:** how many GB are the weights alone, in float32? Then ask: what if all links had 450 GB/s (`Cluster((64,),
# ...)`)? What if the batch were 512? Which plan wins?

# %%
try_it(None, lambda: 4 * sum(v.tensor.size for v in ht.Graph([loss]).leaves("variable")) / 1e9, "four bytes each")

# %% [markdown]
# **What to remember.** Everything that decides about a plan is known before the first step, so it can be computed
# instead of tried. A good planner shows its reasons and how far behind the others were.
# In lab 10 you write a planner.
#
# Next: [a kernel for a GPU, proven without one](12_a_cuda_kernel_without_a_gpu.ipynb).
