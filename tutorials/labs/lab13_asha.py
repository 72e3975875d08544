"""Lab 13: a search that many workers share. After tutorial 19.

A *trial* trains a model with one learning rate for some epochs, its *budget*, and ends with a loss. Whenever a worker
is free, it asks two questions.

For how long? ASHA (L. Li et al., MLSys 2020, algorithm 2) lets many trials begin with a small budget. Those that are
among the best of their budget go on with a larger one: budgets are the *rungs* of a ladder. Nobody waits for others.

With which number? TPE (J. Bergstra et al., NIPS 2011, section 4) parts the numbers that were tried into good and bad,
and takes one that is likely among the good and unlikely among the bad. Here a number lies between 0 and 1.

Check yourself with `hetu lab check 13`.
"""

from math import ceil, erf, exp, inf, pi, sqrt
from typing import NamedTuple


class Trial(NamedTuple):
    budget: float  # epochs at its end
    loss: float | None  # None while it runs, inf if it failed
    parent: int | None  # the trial that it goes on from, as its place in the list of all trials


def ladder(least, most, factor):
    """The budgets from `least` to `most`: each is `factor` (above 1) times the one before, and the last is `most`.

    A product that misses `most` by a billionth of it or by less does so by rounding: it is no rung of its own.
    """
    ### BEGIN SOLUTION
    budgets = []
    while least < most * (1 - 1e-9):
        budgets.append(least)
        least *= factor
    return [*budgets, most]
    ### END SOLUTION


def may_go_on(trials, budget, factor):
    """The trials with this budget that may go on now: a list of their places in `trials`, the best first.

    Of n trials with this budget that have ended, the best n / factor (rounded down) go on, each of them once. A trial
    that failed has ended, but does not go on. Of equal losses the one of the earlier trial is better.
    """
    ### BEGIN SOLUTION
    ended = [place for place, trial in enumerate(trials) if trial.budget == budget and trial.loss is not None]
    best = sorted(ended, key=lambda place: trials[place].loss)[: int(len(ended) / factor)]
    parents = {trial.parent for trial in trials}
    return [place for place in best if place not in parents and trials[place].loss < inf]
    ### END SOLUTION


def next_trial(trials, budgets, factor):
    """What a free worker runs: a pair (budget, parent).

    It takes the best that may go on from the highest rung where one may, and gives it the budget of the next rung. If
    none may go on, a new trial begins: its budget is the smallest, its parent None.
    """
    ### BEGIN SOLUTION
    for rung in reversed(range(len(budgets) - 1)):
        places = may_go_on(trials, budgets[rung], factor)
        if places:
            return budgets[rung + 1], places[0]
    return budgets[0], None
    ### END SOLUTION


def below(z):
    """The chance that a standard normal number is less than z."""
    return (1 + erf(z / sqrt(2))) / 2


def window(x, center, width):
    """A Parzen window, at x: a normal density of mean `center` and standard deviation `width` that is cut at 0 and 1.

    What is left between 0 and 1 is higher by as much as makes its integral 1.
    """
    ### BEGIN SOLUTION
    bell = exp(-(((x - center) / width) ** 2) / 2) / (width * sqrt(2 * pi))
    return bell / (below((1 - center) / width) - below(-center / width))
    ### END SOLUTION


def density(x, centers, width):
    """The density at x: 0.9 times the mean of the windows around the centers, and 0.1. Without any center it is 1."""
    ### BEGIN SOLUTION
    if not centers:
        return 1.0
    return 0.1 + 0.9 * sum(window(x, center, width) for center in centers) / len(centers)
    ### END SOLUTION


def parted(numbers, losses, share):
    """The numbers that were tried as two lists in any order: the good, which have the least losses, and the others.

    Of n numbers share * n (rounded up) are good. Of equal losses the earlier one is less.
    """
    ### BEGIN SOLUTION
    order = sorted(range(len(numbers)), key=lambda place: losses[place])
    count = ceil(share * len(numbers))
    return [numbers[place] for place in order[:count]], [numbers[place] for place in order[count:]]
    ### END SOLUTION


def choice(candidates, good, bad, width):
    """The candidate where the density of the good numbers, divided by that of the bad ones, is largest."""
    ### BEGIN SOLUTION
    return max(candidates, key=lambda x: density(x, good, width) / density(x, bad, width))
    ### END SOLUTION
