# %% [markdown]
# # 10. Pipeline schedules
#
# **After this notebook you can** cut a model into stages, read a pipeline schedule, predict how much of the time
# ranks wait, check that by measurement, and say why everybody uses 1F1B.

# %%
import numpy as np

import hetu as ht
from hetu.dist import Link, Pipeline, Schedule, rehearse, stage
from hetu.plan import trace
from hetu.teach.try_it import try_it

# %% [markdown]
# ## An assembly line
#
# A pipeline splits a model by *layers*: rank 0 has the first ones, rank 1 the next, and they hand on activations. No
# other parallelism sends less. But with one batch only one rank works at a time. So the batch is cut into
# **micro-batches** that follow one another like cars on an assembly line.
#
# A `Schedule` says what each rank does when; a backward pass takes twice as long as a forward pass. Blue is forward,
# red is backward, and the number is the micro-batch. First **GPipe**
# ([Y. Huang et al., 2019](https://arxiv.org/abs/1811.06965)): all forward, then all backward.

# %%
Schedule.of("gpipe", stages=4, microbatches=8)

# %% [markdown]
# The white triangles are the *bubble*: ranks that wait. Each of $P$ ranks has $M$ forward and $M$ backward passes to
# do, and the line needs $P - 1$ more of both to fill and drain. So the share of the time that ranks wait is
#
# $$\text{bubble} = \frac{P - 1}{M + P - 1}.$$
#
# More micro-batches mean less waiting:

# %%
for microbatches in (1, 2, 4, 8, 16, 32):
    schedule = Schedule.of("gpipe", 4, microbatches)
    print(f"M = {microbatches:2}: bubble {schedule.bubble:.1%}, formula {3 / (microbatches + 3):.1%}")

# %% [markdown]
# Why not a thousand micro-batches? Look at rank 0 again: all eight forward passes end before the first backward one.
# Each has left activations in memory. **1F1B**
# ([D. Narayanan et al., 2019](https://arxiv.org/abs/1806.03377)) does a backward pass as soon as one is ready:

# %%
Schedule.of("1f1b", stages=4, microbatches=8)

# %% [markdown]
# Length and bubble are the same. But count the micro-batches that have gone forward and not yet backward:

# %%
for kind in ("gpipe", "1f1b"):
    print(f"{kind:6}", [Schedule.of(kind, 4, 8).live(stage) for stage in range(4)], "live on stages 0 to 3")

# %% [markdown]
# With 1F1B a stage holds one micro-batch for itself and one per stage after it, *however many micro-batches there
# are*. Now you can make the bubble as small as you like.
#
# **Try it:** how many micro-batches make the bubble of 8 stages smaller than 15 %? Solve the formula.

# %%
try_it(
    None,
    lambda: next(m for m in range(1, 99) if Schedule.of("1f1b", 8, m).bubble < 0.15),
    "7 / (M + 7) < 0.15",
)

# %% [markdown]
# ## Run it
#
# You mark the stages, or let hetu cut between layers at equal cost. The rest is a strategy, as always. Is the
# training still the same?


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


def rehearsed(strategy, ranks=4):
    return rehearse(staged(), strategy, feeds, world_size=ranks, steps=4)


print("one process", np.round(rehearsed(None, 1).losses, 5))
for kind in ("gpipe", "1f1b", "pipedream"):
    print(f"{kind:11}", np.round(rehearsed(Pipeline(4, 8, kind)).losses, 5))

# %% [markdown]
# GPipe and 1F1B train alike, to the digit: they add the gradients of all micro-batches and update once. *PipeDream*
# differs; we come to it.
#
# **Try it:** how many rows has each of the 8 micro-batches?

# %%
try_it(None, b"MTI4", "the batch has 1,024")

# %% [markdown]
# ## Measure it
#
# `trace` runs the four ranks on a virtual clock (tutorial 6): passes take their real time, only the wire is a model.
# This is GPipe as it ran:

# %%
wire = Link(latency=10e-6, bandwidth=10e9)


def measured(kind, microbatches=8, link=wire):
    return trace(staged(), Pipeline(4, microbatches, kind), feeds, world_size=4, link=link)


measured("gpipe")

# %%
measured("1f1b")

# %% [markdown]
# These are the staircases of the plan, plus reality: messages take time, the last stage also computes the loss, and
# the first goes backward in half the time, because nobody needs the gradient of its input. Does the formula hold? The
# bubble is the share of the step in which the busiest rank waits:


# %%
def bubble(timeline):
    return 1 - max(timeline.overlap(rank).compute for rank in range(4)) / timeline.seconds


counts = [2, 4, 8, 16]
found = [bubble(measured("1f1b", m)) for m in counts]
formula = [3 / (m + 3) for m in counts]
free = bubble(measured("1f1b", 16, Link(latency=0.0, bandwidth=1e15)))
print("micro-batches", *(f"{m:6}" for m in counts))
print("measured     ", *(f"{share:6.1%}" for share in found), f" without a wire {free:.1%}")
print("formula      ", *(f"{share:6.1%}" for share in formula))
ht.look.curves_svg({"measured bubble": found, "formula": formula}, counts, label="micro-batches")

# %% [markdown]
# With few micro-batches it does, to a few points. With many the line lies above the formula, which supposes that all
# passes are equally long and that messages take no time. Small passes vary more, each rank waits for the slowest, and
# what a wire that costs nothing would save is in the first line. So more micro-batches do not help forever; a good
# number is a few times the number of stages.
#
# And memory? The peak of each rank's program is known before the first step:

# %%
for kind in ("gpipe", "1f1b"):
    arena = rehearsed(Pipeline(4, 16, kind)).arena
    print(f"{kind:6}", *(f"{nbytes:>10,}" for nbytes in arena), "bytes on ranks 0 to 3")

# %% [markdown]
# **Try it:** of how many micro-batches does stage 0 hold activations under 1F1B when there are 16 of them, and 4
# stages?

# %%
try_it(None, lambda: Schedule.of("1f1b", 4, 16).live(0), "one for itself, and one for each stage after it")

# %% [markdown]
# ## No flush: PipeDream
#
# At the end of each batch the line runs empty, because the update needs all gradients. PipeDream does not wait: every
# backward pass updates at once, and the next batch follows immediately. The only bubble is at the very beginning. The
# price: a micro-batch goes forward with weights that are not the newest.

# %%
flowing = Schedule.of("pipedream", 4, 12)
for at in range(4):
    print(
        f"stage {at}: micro-batch m = 0 to 7 sees weights after", [flowing.version(at, m) for m in range(8)], "updates"
    )

# %% [markdown]
# Stage 3 is always up to date; stage 0 is three updates behind. The backward pass must use the *same* weights as the
# forward pass, so stage 0 keeps up to four versions: the *stash*. In hetu that needs no mechanism: new weights are
# new values in the graph, and an old version is a value that is still needed. The losses above showed the effect:
# eight small updates instead of one large one, here even for the better.
#
# **Try it:** how many versions of its weights does stage 1 of these four keep? Then mark the stages unevenly (three
# layers on stage 0), measure, and look who waits for whom; leave the marks out, and see where `Pipeline(4)` cuts.

# %%
try_it(None, b"Mw==", "stage 0 keeps four, stage 3 one")

# %% [markdown]
# **What to remember.** The bubble is $(P - 1) / (M + P - 1)$. 1F1B has the bubble of GPipe with memory for P instead
# of M micro-batches. Without a flush there is no bubble, but weights are old.
# In lab 9 you write the order 1F1B and play it on a clock.
#
# You now know four ways to be parallel. Which should you take? Ask [the planner](11_automatic_parallelism.ipynb).
