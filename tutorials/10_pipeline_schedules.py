# %% [markdown]
# # 10. Pipeline schedules
#
# **After this notebook you can** cut a model into stages, read a pipeline schedule, predict how much of the time ranks
# wait, measure that it is so, and say why everybody uses 1F1B.

# %%
import numpy as np

import hetu as ht
from hetu.dist import Link, Pipeline, Schedule, run_ranks, stage
from hetu.plan import trace

# %% [markdown]
# ## An assembly line
#
# A pipeline splits a model by *layers*: rank 0 has the first ones, rank 1 the next, and they hand on activations. It is
# the parallelism that sends least. But with one batch, only one rank works at a time. So the batch is cut into
# **micro-batches** that follow one another, as cars do on an assembly line.
#
# A `Schedule` says who does what when; a backward pass takes twice as long as a forward pass. Blue is forward, green is
# backward, the number is the micro-batch. First **GPipe** (Y. Huang et al., 2019): all forward, then all backward.

# %%
Schedule.of("gpipe", stages=4, microbatches=8)

# %% [markdown]
# The white triangles are the *bubble*: ranks that wait. Each rank has M forward and M backward passes to do, and the
# line needs P - 1 more of both to fill and to drain. So the share of waiting is (P - 1) / (M + P - 1). More
# micro-batches, less waiting:

# %%
for microbatches in (1, 2, 4, 8, 16, 32):
    schedule = Schedule.of("gpipe", 4, microbatches)
    print(f"M = {microbatches:2}: bubble {schedule.bubble:.1%}, formula {3 / (microbatches + 3):.1%}")

# %% [markdown]
# Why not a thousand micro-batches? Look at rank 0 again: all eight forward passes are done before the first backward
# one. Each has left activations in memory, waiting to be used. **1F1B** (D. Narayanan et al., 2019) does one backward
# pass as soon as there is one to do:

# %%
Schedule.of("1f1b", stages=4, microbatches=8)

# %% [markdown]
# The same length, the same bubble. But count the micro-batches that have gone forward and not yet backward:

# %%
for kind in ("gpipe", "1f1b"):
    print(f"{kind:6}", [Schedule.of(kind, 4, 8).live(stage) for stage in range(4)], "live on stages 0 to 3")

# %% [markdown]
# With 1F1B a stage holds as many as there are stages behind it, *however many micro-batches there are*. Now the bubble
# can be made as small as you like.
#
# ## Run it
#
# You mark the stages, or let hetu cut between layers at equal cost. Everything else is a strategy, as always. Is it
# still the same training?


# %%
def staged(stages=4, width=384):
    x, wanted = ht.placeholder("x", (None, width)), ht.placeholder("wanted", (None, width))
    with ht.scope("line"):
        h = x
        for k in range(stages):
            with stage(k):
                h = ht.tanh(ht.nn.Linear(width, width, name=f"part_{k}")(h))
        with stage(stages - 1):
            loss = ht.mean((h - wanted) ** 2)
    return [loss, ht.optim.SGD(30.0).minimize(loss)]


rng = np.random.default_rng(0)
feeds = {name: rng.normal(size=(1024, 384)).astype(np.float32) for name in ("x", "wanted")}


def losses(strategy=None, comm=None):
    executor = ht.Executor(staged(), strategy=strategy, comm=comm)
    return np.round([executor.run(feeds)[0].item() for _ in range(4)], 5)


print("one process", losses())
for kind in ("gpipe", "1f1b", "pipedream"):
    print(f"{kind:11}", run_ranks(4, lambda comm, kind=kind: losses(Pipeline(4, 8, kind), comm))[0])

# %% [markdown]
# GPipe and 1F1B are the same training to the digit: they add up the gradients of all micro-batches and update once.
# *PipeDream* is something else; we come to it.
#
# ## Measure it
#
# `trace` runs the four ranks on a virtual clock (tutorial 6): every pass takes what it takes here, only the wire is a
# model. This is GPipe as it really ran:

# %%
wire = Link(latency=10e-6, bandwidth=10e9)


def measured(kind, microbatches=8):
    return trace(staged(), Pipeline(4, microbatches, kind), feeds, world_size=4, link=wire)


measured("gpipe")

# %%
one_f_one_b = measured("1f1b")
one_f_one_b

# %% [markdown]
# The staircases of the plan, with what reality adds: messages take time, the last stage computes the loss as well, and
# the first one goes backward in half the time, because nobody asks for the gradient of its input. Does the formula
# hold? The bubble is the share of the step in which the busiest rank waits:

# %%
counts = [1, 2, 4, 8, 16]
found = []
for microbatches in counts:
    timeline = measured("1f1b", microbatches)
    length = max(event.end for event in timeline.events)
    found.append(1 - max(timeline.overlap(rank).compute for rank in range(4)) / length)
formula = [3 / (m + 3) for m in counts]
print("measured", *(f"{share:6.1%}" for share in found))
print("formula ", *(f"{share:6.1%}" for share in formula))
ht.look.curves_svg({"measured bubble": found, "formula": formula}, counts, label="micro-batches")

# %% [markdown]
# It holds until the micro-batches get small: then every message and every call costs more than it brings, which the
# formula does not know. A good number is a few times the number of stages.
#
# And memory? What each rank's program needs at its peak, which is known before the first step:


# %%
def arena(kind, microbatches):
    def run(comm):
        executor = ht.Executor(staged(), strategy=Pipeline(4, microbatches, kind), comm=comm)
        return executor.program(feeds).plan.arena_bytes

    return run_ranks(4, run)


for kind in ("gpipe", "1f1b"):
    print(f"{kind:6}", *(f"{nbytes:>10,}" for nbytes in arena(kind, 16)), "bytes on ranks 0 to 3")

# %% [markdown]
# ## No flush: PipeDream
#
# At the end of each batch the line runs empty, because the update needs all gradients. PipeDream does not wait: every
# backward pass updates at once, and the next batch follows on its heels. There is no bubble but at the very beginning.
# The price: a micro-batch goes forward with weights that are not the newest ones.

# %%
flowing = Schedule.of("pipedream", 4, 12)
for at in range(4):
    print(
        f"stage {at}: micro-batch m = 0 to 7 sees weights after", [flowing.version(at, m) for m in range(8)], "updates"
    )

# %% [markdown]
# Stage 3 is always up to date; stage 0 is three updates behind. And since backward must use the *same* weights as
# forward did, stage 0 keeps up to four versions: the *stash*. In hetu that needs no mechanism: new weights are new
# values in the graph, and an old version is a value that is still needed. In the losses above you have seen the
# effect: eight small updates instead of one large one, here even to the better.
#
# **Try it:** mark the stages unevenly (three layers on stage 0) and look at the measured picture: who waits for whom?
# Then leave the marks out, and see where `Pipeline(4)` cuts.
#
# **What to remember.** Bubble = (P - 1) / (M + P - 1). 1F1B has the bubble of GPipe with memory for P instead of M
# micro-batches. Without a flush there is no bubble, but there are old weights.
#
# You know four ways to be parallel now. Which one should you take? Ask
# [the planner](11_automatic_parallelism.ipynb).
