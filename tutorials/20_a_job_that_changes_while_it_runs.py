# %% [markdown]
# # 20. A job that changes while it runs
#
# **After this notebook you can** move a running training from one strategy to another, say what the others do when one
# of them dies, read who had a copy of what, and kill a real process without losing a step.

# %%
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import hetu as ht
from hetu.dist import DataParallel, Pipeline, ZeRO, run_ranks, world
from hetu.dist.launch import openmpi
from hetu.teach.overheard import overheard, story_svg
from hetu.teach.try_it import try_it

# %% [markdown]
# ## From strategy to strategy
#
# A job that takes weeks does not stay as it began: sequences get longer, a machine is needed elsewhere, another one
# comes. To end the job, and start it otherwise, costs a way over the disk. Here is a small training to try what else
# there is: four layers learn digits. Ranks are threads, so that all can be seen.

# %%
STEPS, BATCH = 24, 48
images, digits = ht.data.mnist("train")[np.arange(STEPS * BATCH)][:2]
X = np.asarray(images, np.float32).reshape(STEPS, BATCH, 784)
T = np.asarray(digits).reshape(STEPS, BATCH)


def network():
    x, t = ht.placeholder("x", (None, 784)), ht.placeholder("t", (None,), "int64")
    h = x
    for width in (64, 48, 32):
        h = ht.nn.Linear(h.shape[1], width, activation=ht.relu)(h)
    loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(32, 10)(h), t))
    return {"train": [loss, ht.optim.Adam(2e-3).minimize(loss)]}


def train(executor, step):
    return float(executor.run("train", {"x": X[step], "t": T[step]})[0])


def nbytes(executor):
    return sum(array.nbytes for array in executor.state.arrays.values())


def pieces(losses, names):
    """A curve for each name, of the steps that have it."""
    return {
        one: [loss if name == one else math.nan for loss, name in zip(losses, names)] for one in [*dict.fromkeys(names)]
    }


# %% [markdown]
# `executor.switch` goes over to another strategy between two steps. All ranks call it, and what it returns says what
# was moved: `print` shows who has sent how many bytes to whom.


# %%
def switching(comm):
    executor = ht.Executor(network(), strategy=DataParallel(), comm=comm)
    losses, names, moved, sizes = [], [], {}, {}
    for step in range(STEPS):
        if step == 8:
            moved["to a pipeline of four stages"] = executor.switch(Pipeline(4, 4))
        if step == 16:
            moved["to ZeRO-3"] = executor.switch(ZeRO(3))
        losses.append(train(executor, step))
        names.append(("data parallel", "pipeline", "ZeRO-3")[step // 8])
        sizes[names[-1]] = nbytes(executor)
    return losses, names, moved, sizes


switched = run_ranks(4, switching)
losses, names, moved, _ = switched[0]
for name, exchange in moved.items():
    print(f"{name}: {exchange}")
print()
for rank, (*_, sizes) in enumerate(switched):
    print(f"rank {rank} keeps", ", ".join(f"{size:,} bytes ({name})" for name, size in sizes.items()))

# %% [markdown]
# With data parallelism every rank has everything, so nobody lacks anything for its stage: no message at all. Under
# ZeRO-3 each has a fourth of everything, and three fourths of that lie in other stages. Nothing is sent twice, and
# between two ranks there is one message. The losses do not know of it. Here they lie on those of one process, which can
# be seen only where there is a gap:


# %%
def alone(comm):
    executor = ht.Executor(network(), comm=comm)
    return [train(executor, step) for step in range(STEPS)]


wanted = run_ranks(1, alone)[0]
print(f"largest difference of a loss: {np.abs(np.subtract(losses, wanted)).max():.1e}")
ht.look.curves_svg({"one process": wanted, **pieces(losses, names)}, label="step", up="loss")

# %% [markdown]
# **Try it:** suppose that the job goes back from ZeRO-3 to data parallelism. Every rank then lacks three fourths of
# everything. How many megabytes do all ranks send together? Use what rank 0 kept at first.

# %%
try_it(None, lambda: 3 * switched[0][-1]["data parallel"] / 1e6, "four ranks lack three fourths each")

# %% [markdown]
# ## A rank dies
#
# Now the same training under ZeRO-3, where each rank alone has its fourth of the weights and of what Adam keeps. If it
# is gone, so is that fourth, unless somebody has a copy. `run_ranks(..., die_in={2: 10})` kills rank 2 in its step 10,
# in the middle of what it communicates there first: some of the others have its part by then, and some have not. Every
# rank has a flight recorder, which notes what it communicates; `overheard` looks over their shoulders.


# %%
def surviving(comm):
    executor = ht.Executor(network(), strategy=ZeRO(3), comm=comm)
    losses, names = [], []
    for step in range(STEPS):
        losses.append(train(executor, step))
        names.append(f"{world().world_size} ranks")
    return losses, names, world().recorder


with overheard() as said:
    found = run_ranks(4, surviving, die_in={2: 10})
for rank, of in enumerate(found):
    print(f"rank {rank}:", f"{len(of[0])} losses; {of[2].event}" if of else "lost")
losses, names, _ = found[0]
print(f"largest difference of a loss: {np.abs(np.subtract(losses, wanted)).max():.1e}")
ht.look.curves_svg({"one process": wanted, **pieces(losses, names)}, label="step", up="loss")

# %% [markdown]
# The script knows nothing of it: it has asked for 24 steps, and has the 24 losses of one process. What has happened?
# Phase by phase, around the death, with the bytes that a rank sends to others by name:

# %%
story_svg(said, dead=2)

# %% [markdown]
# Behind each step every rank **copies** what it has now, and sends the next rank a copy of what nobody else has. Then
# all **vote** that they have that; only now do their scripts see the loss, and ask for the next step. Rank 2 is killed
# in the middle of one. The others find that out in different ways: one waits for rank 2, another has what it needed and
# waits for a third. Whoever knows *revokes* the group, so that nobody waits any more, and all who are left meet: they
# vote (no: one is missing), and **shrink** to a group of three. They build a ZeRO-3 for three, **move** the values of
# the last vote to where they belong now (rank 3 sends what only rank 2 had), and copy those. Then they make the
# **step** again: a loss costs one.
#
# That needs agreement among those of whom some may die at any moment; `vote` and `shrink` are after
# [W. Bland et al., 2013](https://doi.org/10.1177/1094342013488238), the moves after Hetu v2 (Haoyang Li et al., 2025).
# Under data parallelism all have everything: the copies stay at home, and nothing is sent behind a step.
#
# **Try it:** if rank 1 dies there instead, who sends most when values are moved?


# %%
def sends_most(dead):
    with overheard() as said:
        run_ranks(4, surviving, die_in={dead: 10})
    moved = {rank: [h for h in calls if h.mends and f"from {rank} " in h.what] for rank, calls in said.items()}
    return max(moved, key=lambda rank: sum(heard.nbytes for heard in moved[rank]))


try_it(None, lambda: sends_most(1), "who had the copy of what rank 1 had?")

# %% [markdown]
# ## Another one comes
#
# With `most=4` there shall be four again: a new rank starts for each one that is lost. It waits until the others let it
# in, before one call in eight. Its script runs from the beginning, as it must build its model, and asks for step 1.
# But that was long ago. So it is **told** what each call has returned to the others, until it has caught up; after that
# it computes with them.

# %%
with overheard() as said:
    found = run_ranks(4, surviving, die_in={2: 10}, most=4)
for rank, of in enumerate(found):
    print(f"rank {rank}:", f"{len(of[0])} losses, {of[2].runs} steps made" if of else "lost")
print(found[0][2].event)
print("\nThe first that rank 4 hears:")
for heard in [heard for heard in said[4] if heard.what.startswith(("broadcast", "message"))][1:5]:
    print(f"{heard.what:20} {heard.nbytes:8,} bytes")

# %% [markdown]
# The broadcast is the past, and how values lie. The messages are its fourth of the values. The scripts of ranks may
# shuffle and draw by seeds: then what they do depends only on what their calls return, and that is the same for
# the newcomer. (25 steps made by the others: 24, and the one that was broken off.)
#
# **Try it:** how many of its 24 losses was rank 4 told?

# %%
try_it(None, lambda: STEPS - found[4][2].runs, "it has made the others itself")

# %% [markdown]
# ## When both copies are lost
#
# Each part that only one rank has is kept twice. So if a rank and the one behind it die in one step, a part is gone.
# For this there are **checkpoints**. `ht.Checkpoints` copies the values in memory and goes on; a thread of each rank
# writes them meanwhile. Whatever happens while it writes, there is a whole one in the folder, and it is read on as many
# ranks as there are then, under any strategy:


# %%
folder = tempfile.TemporaryDirectory()


def with_checkpoints(comm):
    executor = ht.Executor(network(), strategy=ZeRO(3), comm=comm)
    checkpoints, losses = ht.Checkpoints(executor, folder.name, keep=3), []
    for step in range(STEPS):
        losses.append(train(executor, step))
        if step % 4 == 3:
            checkpoints.save({"step": step})
    checkpoints.wait()
    return losses


losses = run_ranks(4, with_checkpoints, die_in={1: 14, 2: 14})[0]
others = np.flatnonzero(np.abs(np.subtract(losses, wanted)) > 1e-5)
print(f"{len(losses)} losses; from step {others[0] + 1} on they are not those of one process")
print("checkpoints that are left:", ", ".join(sorted(os.listdir(folder.name), key=int)))

# %% [markdown]
# Nobody goes on with half a model: all values are those of the newest checkpoint again, on the two ranks that are left,
# and one of them says how many steps that has undone. A loop of your own goes on with the data that come next, as
# nobody can turn it back. `ht.fit(..., checkpoint=...)` goes back in the data, too, so that its losses stay those of
# one process.
#
# **Try it:** how many of the checkpoints would be left with `keep=9`?

# %%
try_it(None, lambda: STEPS // 4, "one every four steps")
folder.cleanup()

# %% [markdown]
# ## Kill a real one
#
# Over real processes MPI itself must survive the loss of a rank. Open MPI 5 does; it lies in a folder of its own, and
# `python -m hetu.dist.launch.openmpi` prints the command that gets it. Then `heturun --elastic 2:4` starts four ranks,
# goes on while two are left, and starts a new one for each that is lost. This script trains without an end:

# %%
SCRIPT = """
import itertools, os, pathlib, time
import numpy as np
import hetu as ht
from hetu.dist import world

x, y = ht.placeholder("x", (None, 32)), ht.placeholder("y", (None,), "int64")
hidden = ht.nn.Linear(32, 64, activation=ht.tanh)(x)
loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(64, 8)(hidden), y))
executor = ht.Executor([loss, ht.optim.Adam(1e-3).minimize(loss)], strategy="zero3")
for step in itertools.count():
    draw = np.random.default_rng(step)
    executor.run({x: draw.standard_normal((64, 32)).astype("float32"), y: draw.integers(0, 8, 64)})
    pathlib.Path(f"rank.{world().ranks[world().rank]}").write_text(str(os.getpid()))
    time.sleep(0.005)
"""
folder = tempfile.TemporaryDirectory()
here, variables = Path(folder.name), os.environ | {"TMPDIR": folder.name}
(here / "train.py").write_text(SCRIPT)


def look(*words):
    found = subprocess.run([sys.executable, "-m", "hetu", *words], env=variables, capture_output=True, text=True)
    return found.stdout


def process(job, rank):
    """The number of the process of a rank, or of one that is like this, once it has made a step."""
    until = time.monotonic() + 50
    while not (found := [said for file in here.glob(f"rank.{rank}") if (said := file.read_text())]):
        if job.poll() is not None or time.monotonic() > until:
            raise TimeoutError((here / "log").read_text())
        time.sleep(0.05)
    return int(found[0])


def killed():
    """Start the job, look, kill rank 2, and look again when another one has come."""
    line = [sys.executable, "-m", "hetu.dist.launch.heturun", "--elastic", "2:4", sys.executable, "train.py"]
    with open(here / "log", "w") as log, subprocess.Popen(line, cwd=here, env=variables, stdout=log, stderr=log) as job:
        try:
            pids = [process(job, rank) for rank in range(4)]
            print(look("top", "--once"))
            os.kill(pids[2], signal.SIGKILL)
            process(job, "[4-9]")  # numbers never come back
            print(look("top", "--once"))
        finally:
            job.send_signal(signal.SIGINT)
    print((here / "log").read_text())


try:
    openmpi.find()
except ht.errors.MissingDependencyError:
    print("Open MPI is not here: python -m hetu.dist.launch.openmpi prints the command that gets it")
else:
    killed()
folder.cleanup()

# %% [markdown]
# `hetu top` is a page about a running job, here printed once; without `--once` it stays and moves, and in a notebook
# `%ranks watch` puts it below a cell. Each rank says how many steps it has made, how long one takes, what share of the
# time it waits, and where it is. A rank that is stopped, or hangs in C code, is lost like one that is killed, after
# some seconds. What no job survives so is a bug: an exception ends all ranks, as it would come again.
#
# **Try it:** four ranks run under `--elastic 2:4`. How many must be lost at once for the job to end?

# %%
try_it(None, lambda: 4 - 2 + 1, "two must be left")

# %% [markdown]
# **What to remember.** Values that lie on ranks can move: to another strategy, to fewer ranks, to more. Before each
# step what it starts from is kept twice and all agree on that, so a loss costs one step; who comes later is told the
# past. Against the loss of both copies there is a checkpoint, written while training goes on.
# The files are `hetu/dist/layout/fused.py`, which says who sends what, and `hetu/dist/elastic.py`. The
# [guide](guides/changing.md) has the commands, and `examples/benchmarks/kills.py` kills a hundred ranks.
#
# This was the last notebook. The [README](../README.md) has the rest of the map.
