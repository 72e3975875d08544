# %% [markdown]
# # 11. Automatic parallelism, and why this plan
#
# **After this notebook you can** measure your machine, foretell how long a step takes under any strategy and see it
# come true (or learn what was wrong), let a planner choose, and make it say *why*: for four ranks here, and for 64 GPUs
# that you do not have.

# %%
import numpy as np

import hetu as ht
from hetu.dist import DataParallel, Link, Parallel, Pipeline, TensorParallel, ZeRO, rehearse
from hetu.plan import Cluster, MachineProfile, Plan, auto, cluster, simulate, trace
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
    h += ht.nn.Linear(768, 192, name=f"layer_{k}/down")(ht.relu(ht.nn.Linear(192, 768, name=f"layer_{k}/up")(h)))
loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(192, 10, name="head")(h), digit))
step = [loss, ht.optim.SGD(0.1).minimize(loss)]
rng = np.random.default_rng(0)
feeds = {"x": rng.standard_normal((256, 192), "float32"), "digit": rng.integers(0, 10, 256)}

# %% [markdown]
# **Try it:** how many weights and biases has this model, in thousands?

# %%
try_it(
    None,
    lambda: ht.summary(loss).trainable / 1e3,
    "twice two layers, and the head",
)

# %% [markdown]
# ## Measure
#
# A `MachineProfile` knows how long instructions take on one kind of machine. It learns by running a step, even the step
# of one rank of four: the others need not exist. It interpolates what was never measured. `hetu profile` measures
# the links between ranks; this notebook invents them: 50 microseconds, 2 GB/s.

# %%
wire = Link(latency=50e-6, bandwidth=2e9)
profile = MachineProfile(cluster=Cluster((4,), wire))
strategies = {"data": DataParallel(), "ZeRO 3": ZeRO(3), "tensor": TensorParallel(), "pipeline": Pipeline(4, 8)}
for strategy in strategies.values():
    profile.learn(step, feeds, strategy, world_size=4)
print(len(profile.timings), "kinds of instruction measured")

# %% [markdown]
# **Try it:** how many microseconds does a message of 1 MB take on this wire?

# %%
try_it(None, lambda: 1e6 * (wire.latency + 1e6 / wire.bandwidth), "the latency, and the bytes by the bandwidth")

# %% [markdown]
# ## Foretell
#
# `simulate` cuts the graph for every rank as an executor would, plays all instruction lists on a clock, and returns
# the cost of a step: time, memory, and bytes on each link. Nothing runs. These are our predictions, written down before
# we look:


# %%
def foretold(strategy, profile=profile):
    return simulate(step, strategy, profile, world_size=4, shapes=feeds)


told = {name: foretold(strategy) for name, strategy in strategies.items()}
for name, cost in told.items():
    print(f"{name:9}{cost}")

# %% [markdown]
# The simulation knows every event and every byte, so it can be drawn. Here are two of the four on one scale of time:
# on each rank what it computes, what is on the wire, and below it the memory it holds. Data parallelism keeps four
# copies of all weights and waits at the end. The pipeline keeps a quarter on each rank, and pays with idle time while
# it fills and drains.

# %%
ht.plan.draw({name: told[name].timeline for name in ("data", "pipeline")})

# %% [markdown]
# **Try it:** which of the four strategies needs the fewest bytes on its fullest rank? Answer with its name.

# %%
try_it(None, lambda: min(told, key=lambda name: max(told[name].peak)), "`told[name].peak` has the bytes of each rank")

# %% [markdown]
# ## Does it come true?
#
# `trace` (tutorial 6) really runs the ranks, on a virtual clock over the same wire. We bet on 10 %. Where a bet is
# lost, the parts of the step say why: the rank that computes most computes longer or shorter than foretold, waits for
# communication, or idles.


# %%
def verdict(told, ran):
    off, parts = ran.seconds / told.seconds - 1, zip(told.spent._fields, told.spent, ran.spent)
    missed = ", ".join(f"{part} {1e3 * (after - before):+.2f} ms" for part, before, after in parts)
    return f"{off:+.0%}, " + ("won" if abs(off) <= 0.1 else f"lost: {missed}")


ran = {name: trace(step, strategy, feeds, world_size=4, link=wire, repeat=15) for name, strategy in strategies.items()}
for name, timeline in ran.items():
    print(f"{name:9}ran in {1e3 * timeline.seconds:.3f} ms, {verdict(told[name].timeline, timeline)}")

# %%
ht.plan.draw({"foretold": told["pipeline"].timeline, "as it ran": ran["pipeline"]})

# %% [markdown]
# Messages are foretold almost to the digit: both take them from the model of the wire. What is off is computing. The
# profile has seen one rank alone. In the trace four ranks take turns on one machine, so after a message each finds the
# caches full of what the others left, and each collective waits for whichever of the four is the slowest that time.
# What else your machine does at that moment is in the second column only. Instructions that were never timed would be
# interpolated, which errs to either side: leave `ZeRO(3)` out of what is learned, and look. How well the *order* of
# plans is foretold, which is what a planner needs, `examples/benchmarks/auto.py` measures.
#
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
# we only ask for its choice, on ranks that need not exist.


# %%
def choose(profile, **options):
    return auto(profile=profile, **options).choose(step, world_size=4)


print(choose(profile).why())

# %% [markdown]
# Read it from the top: the plan and its cost, the cost of the next best, and the constraint that decided.
#
# **Another network**, with 25 times the bandwidth and a tenth of the latency, needs no new measurement:

# %%
faster = profile.on(Cluster((4,), Link(latency=5e-6, bandwidth=50e9)))
there = choose(faster)
print(there.why())

# %% [markdown]
# When messages are cheap the order of plans changes, if not at the top then below it. Where do they cross? The same
# strategies over links of all speeds:

# %%
speeds = [0.25, 0.5, 1, 2, 4, 8]
machines = [profile.on(Cluster((4,), Link(latency=20e-6, bandwidth=speed * 1e9))) for speed in speeds]
curves = {name: [1e3 * foretold(s, machine).time for machine in machines] for name, s in strategies.items()}
ht.look.curves_svg(curves, speeds, label="bandwidth in GB/s", up="ms per step", log=True, log_x=True)

# %% [markdown]
# **Less memory.** Give each rank a budget, and plans that need less come up, or memory decides instead of time:

# %%
print(choose(faster, budget=0.9 * there.why().best.peak).why())
try:
    choose(faster, budget=0.2 * there.why().best.peak, hints={"stages": 1})
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
# It trains like one process, as `rehearse` (tutorial 9) shows by the losses of four steps:

# %%
kept = Plan.from_json(choose(profile, hints={"data": 2}).to_json())
for ranks, plan in ((1, None), (4, kept)):
    print(ranks, "ranks:", np.round(rehearse(step, plan, feeds, world_size=ranks, steps=4).losses, 5))

# %% [markdown]
# **Try it:** `{"data": 2}` on four ranks: how many ranks are left for each copy of the model?

# %%
try_it(None, b"Mg==", "four divided by two")

# %% [markdown]
# ## 64 GPUs that you do not have
#
# A data sheet can describe a cluster too. `cluster("dgx-h100:8")` reads eight hosts of eight H100 each from a text file
# with the source of each figure: links have 450 GB/s inside a host and 50 between hosts. A file of your own describes
# yours. Here is a language model of 1.7 billion weights, with products in 16 bits. Nothing is allocated: executors make
# variables, graphs do not.

# %%
ids, wanted = (ht.placeholder(name, (64, 1024), "int64") for name in ("ids", "wanted"))
loss = ht.mean(ht.softmax_cross_entropy(ht.models.text.gpt(ids, 8192, features=4096, layers=8, heads=16), wanted))
gpt = [loss, ht.optim.Adam(1e-4).minimize(loss)]
print(f"{ht.summary(loss).trainable / 1e9:.2f} billion weights")
eights = {"8 tensor x 8 data": Parallel(data=8, tensor=8), "the same, ZeRO 1": Parallel(data=8, tensor=8, zero=1)}
dgx = MachineProfile.of(cluster("dgx-h100:8"))
for name, strategy in {"data": DataParallel(), "ZeRO 3": ZeRO(3), **eights}.items():
    print(f"{name:18}", simulate(gpt, strategy, dgx, world_size=64, traced=1, precision="bfloat16"))

# %% [markdown]
# From a terminal, `hetu plan MODEL --cluster dgx-h100:8 --batch 64` lets the planner choose. `MODEL` is a text file of
# sizes, or a Python file that makes `entries`, such as our `step`. It prints what a step takes and needs, the share of
# the devices' operations that the model uses, tokens per second, what a million of them costs (`--price`), and why.
# The search takes minutes for a large model.
#
# **Try it:** how many GB are the weights alone, in float32? Then ask: what if all links had 450 GB/s (`Cluster((64,),
# ...)`)? What if the batch were 512? Which plan wins?

# %%
try_it(None, lambda: 4 * ht.summary(loss).trainable / 1e9, "four bytes each")

# %% [markdown]
# **What to remember.** Everything that decides about a plan is known before the first step, so it can be computed
# instead of tried. A good planner shows its reasons and how far behind the others were.
# In lab 10 you write a planner.
#
# Next: [a kernel for a GPU, proven without one](12_a_cuda_kernel_without_a_gpu.ipynb).
