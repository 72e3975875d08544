# %% [markdown]
# # 7. The parameter server: BSP, ASP, SSP
#
# **After this notebook you can** start a parameter server, train with it in three modes of consistency, see how far
# workers drift apart, and say what a slow machine costs in each mode.

# %%
# %load_ext hetu
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import hetu as ht
from hetu.ps import BSP, SSP, Client, Options, Parameter, ServerProcess
from hetu.ps.wire.environment import Place, connect
from hetu.strategies import Connected, ParameterServer
from hetu.teach.try_it import try_it

# %% [markdown]
# ## A process that keeps numbers
#
# In data parallelism all ranks wait for each other in every step, so one slow machine slows all. A *parameter server*
# ([M. Li et al., 2014](https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu)) keeps the
# weights in a process of its own. Workers **pull** them, compute a gradient and **push** it; the server does the
# update. Here are a real server and one worker:

# %%
with ServerProcess(Options(workers=1, token="classroom")) as server:
    print("a server process listens at", server.address.rpartition(":")[0] + ":...")
    with Client([server.address], worker=0, token="classroom") as client:
        client.create({"w": Parameter((3,), options={"learning_rate": 0.5})}, {"w": np.ones(3)})
        print("pulled:", client.pull("w").wait())
        client.push("w", np.array([1.0, 0.0, -2.0]))
        client.clock().wait()
        print("after one gradient:", client.pull("w").wait())

# %% [markdown]
# `clock()` says "my step is done". The server counts the clocks of every worker. A *mode of consistency* is a rule
# about these clocks: how far may the fastest worker be ahead of the slowest?
#
# * **BSP**, bulk synchronous: 0. All wait for all, and updates are applied together.
# * **SSP**, stale synchronous: s. A worker that is s clocks ahead waits ([Q. Ho et al., 2013][ho]).
# * **ASP**, asynchronous: no bound. Nobody ever waits.
#
# [ho]:
# https://papers.nips.cc/paper/4894-more-effective-distributed-ml-via-a-stale-synchronous-parallel-parameter-server
#
# **Try it:** the worker pushes `[0, 2, 0]` as well. What does it pull then? The rate is 0.5.

# %%
try_it(None, b"WzAuNSwgMC4wLCAyLjBd", "the server subtracts 0.5 times the gradient from what it holds")

# %% [markdown]
# ## Three workers, one of them slow
#
# We fit a line by [gradient descent](README.md#gradient-descent). Worker 2 needs four times as long per step. We
# record when each step begins and ends.

# %%
STEPS, TRUTH = 20, np.linspace(-1, 1, 8)


def gradient(w, worker, step):
    rows = np.random.default_rng([worker, step]).normal(size=(16, 8))
    return rows.T @ (rows @ (w - TRUTH)) / len(rows)


def work(server, worker, seconds, rate, steps, errors):
    with Client([server.address], worker, "classroom") as client:
        client.create({"w": Parameter((8,), "float64", options={"learning_rate": rate})}, {"w": np.zeros(8)})
        for clock in range(STEPS):
            w, begin = client.pull("w").wait(), time.perf_counter()
            time.sleep(seconds(worker, clock))  # a machine of that speed
            client.push("w", gradient(w, worker, clock))
            steps.append((worker, clock, begin, time.perf_counter()))
            client.clock().wait()
            errors[worker].append(np.abs(w - TRUTH).max())
        client.leave()


def train(consistency, seconds, rate=0.15):
    steps, errors = [], ([], [], [])
    with ServerProcess(Options(3, "classroom", consistency)) as server, ThreadPoolExecutor(3) as pool:
        for worker in [pool.submit(work, server, worker, seconds, rate, steps, errors) for worker in range(3)]:
            worker.result()
    return steps, errors[2]


def one_slow(worker, clock):
    return (0.006, 0.007, 0.024)[worker]


# %% [markdown]
# **BSP.** There is one lane per worker and one box per clock. White is waiting. The histogram shows how far ahead of
# the slowest a worker was when it began a step.

# %%
bsp, bsp_errors = train("bsp", one_slow)
ht.look.staleness_svg(bsp, bound=0)

# %% [markdown]
# The two fast workers wait three quarters of their time. **ASP**: nobody waits.

# %%
asp, asp_errors = train("asp", one_slow)
ht.look.staleness_svg(asp)

# %% [markdown]
# The fast workers finish long before the slow one. The histogram has a long tail: worker 2 pushes gradients of
# weights that were replaced long ago. **SSP** with a bound of 3 lies between the two:

# %%
ssp, ssp_errors = train("ssp:3", one_slow)
ht.look.staleness_svg(ssp, bound=3)

# %% [markdown]
# The bound is a promise that the server keeps: no step begins more than three clocks ahead. First the fast workers
# run ahead, then they keep the pace of the slow one.
#
# With a worker that is *always* slow, SSP waits nearly as much as BSP. It was made for workers that are slow *now and
# then*, as machines are: the slack absorbs the hiccup of one worker. Now every fourth step of each worker hiccups, at
# different times:


# %%
def hiccups(worker, clock):
    return 0.060 if (clock + worker) % 4 == 0 else 0.005


for mode in ("bsp", "ssp:3"):
    steps, _ = train(mode, hiccups)
    print(f"{mode:5} {max(end for *_, end in steps) - min(begin for _, _, begin, _ in steps):5.2f} s")

# %% [markdown]
# BSP pays for every hiccup, SSP(3) for hardly any.
#
# **Try it:** worker 0 has finished 7 clocks, worker 2 has finished 4. May worker 0 begin another under SSP(2)? Answer
# True or False. Then add `"ssp:1"` to the loop: is that bound enough?

# %%
try_it(None, lambda: SSP(2).may_work(clock=7, slowest=4), "how far is it ahead?")

# %% [markdown]
# ## What does staleness cost?
#
# A gradient of old weights is the slope at a place that was left. How far from the truth are the weights in each
# mode, as the slow worker sees them before each of its steps?

# %%
ht.look.curves_svg(
    {"bsp": bsp_errors, "ssp:3": ssp_errors, "asp": asp_errors}, label="steps of worker 2", up="error", log=True
)

# %% [markdown]
# In ASP and SSP the others have done more by *its* step, so these modes are ahead here. With larger steps the picture
# turns: a stale gradient is the slope at a place that was left, and a large step along it overshoots. It takes no
# server to see that. Here gradients are always `delay` updates old:


# %%
def delayed(rate, delay):
    weights = [np.zeros(8)] * (delay + 1)
    for step in range(60):
        weights.append(weights[-1] - rate * gradient(weights[-1 - delay], 0, step))
    return np.abs(weights[-1] - TRUTH).max()


for rate in (0.05, 0.1, 0.2, 0.3, 0.4):
    print(f"rate {rate:4}:", *(f"{delayed(rate, delay):8.0e} if {delay} updates old" for delay in (0, 3, 8)))

# %% [markdown]
# Small steps forgive a delay, large ones do not: the more stale the gradients, the smaller the rate has to be. And only
# BSP gives the same result in every run, to the bit.
#
# **Try it:** which of the rates above is the largest that still brings gradients which are 8 updates old closer to the
# truth than 0.1? On the server ask `train("bsp", one_slow, rate=0.6)[1][-1]`, the error after the last step, in both
# modes at 0.6, 0.9 and 1.2: from which rate on is BSP ahead?

# %%
try_it(None, lambda: max(r for r in (0.05, 0.1, 0.2, 0.3, 0.4) if delayed(r, 8) < 0.1), "read the last column")

# %% [markdown]
# ## From one-device code
#
# You need not write pulls and pushes. As with ranks, a strategy takes the one-device model, cuts out its updates and
# inserts communication. Two workers train on halves of each batch under BSP, and one process on whole batches:


# %%
def network():
    x, digit = ht.placeholder("x", (None, 784)), ht.placeholder("digit", (None,), "int64")
    with ht.scope("net"):
        hidden = ht.nn.Linear(784, 32, activation=ht.relu)(x)
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(32, 10)(hidden), digit))
    return [loss, ht.optim.Adam(0.01).minimize(loss)]


images, labels = (column[:200] for column in ht.data.mnist("train").flat().arrays)


def losses(strategy=None, comm=None):
    executor = ht.Executor(network(), strategy=strategy, comm=comm)
    for _ in range(5):
        loss = executor.run({"x": images, "digit": labels})[0]
    return loss.item()


def worker_losses(address, rank):
    with Client([address], rank, "classroom") as client:
        found = losses(ParameterServer(consistency=BSP()), Connected(Place(rank, 2), client))
        client.leave()
        return found


with ServerProcess(Options(2, "classroom")) as server, ThreadPoolExecutor(2) as pool:
    halves = list(pool.map(worker_losses, [server.address] * 2, range(2)))
print(f"two workers, each on its half: {halves[0]:.5f} and {halves[1]:.5f}, mean {np.mean(halves):.5f}")
print(f"one process on whole batches:  {losses():.5f}")

# %% [markdown]
# Adam ran *on the server*, which keeps the two means. The result is that of one process.
#
# **Try it:** how many numbers does the server keep for one weight?

# %%
try_it(None, b"Mw==", "Adam needs two means")

# %% [markdown]
# ## Real workers
#
# `%%ranks 2 --servers 1` runs a cell on two MPI processes with a server between them. There the strategy finds the
# server and the workers by itself. (`%servers` shows below its cell what the servers of such a job do: clocks, traffic,
# how long requests take, which rows are hot. `%servers --stop` ends that.)

# %%
# %%ranks 2 --servers 1
mine = losses(ParameterServer(consistency=SSP(3)))
client = connect()
(server_says,) = client.status()
print(f"worker {client.worker}: loss {mine:.4f}, clocks {server_says['clocks']}, under {server_says['consistency']}")

# %% [markdown]
# **Try it:** kill a worker in the middle: put `if worker == 1 and clock == 5: return` into `work`. Others wait for it
# until its lease is over: how many seconds is that, if nobody says otherwise? (See `help(Options)`.)

# %%
try_it(None, lambda: Options(1, "classroom").lease, "look for `lease`")

# %% [markdown]
# **What to remember.** Pull, compute, push, clock. A mode of consistency bounds how far clocks may drift apart: 0, s,
# or no bound. A looser bound saves time on slow machines and pays with older gradients.
# In lab 12 you write the server's side of all three.
#
# Next: a server's best use, [tables that are too large for a worker](08_hybrid_and_the_embedding_cache.ipynb).
