"""Lab 2: reverse-mode automatic differentiation in fifteen lines. After tutorial 2.

A `Number` knows its value, the numbers it was computed from, and the *local* slope toward each of them: by how much it
changes when that one alone changes by one unit. For c = a * b, dc/da is the value of b.

Complete the operators, then write `slopes`. Check yourself with `hetu lab check 2`.
"""

import math


class Number:
    """A value and `inputs`, pairs (number it was computed from, local slope toward it)."""

    def __init__(self, value, inputs=()):
        self.value, self.inputs = value, inputs

    def __add__(self, other):
        return Number(self.value + other.value, [(self, 1.0), (other, 1.0)])

    def exp(self):
        value = math.exp(self.value)
        return Number(value, [(self, value)])  # the slope of exp is exp

    def __mul__(self, other):
        ### BEGIN SOLUTION
        return Number(self.value * other.value, [(self, other.value), (other, self.value)])
        ### END SOLUTION

    def tanh(self):
        """The slope of tanh is 1 - tanh squared; `math.tanh` computes it."""
        ### BEGIN SOLUTION
        y = math.tanh(self.value)
        return Number(y, [(self, 1 - y * y)])
        ### END SOLUTION


def slopes(output, wanted):
    """d output / d w for each number w of the list `wanted`; 0.0 for one that the output does not depend on.

    Walk from the output to the inputs. When it is a number's turn, its own slope must be complete: every number that
    was computed from it must have had its turn before. Which order does that?
    """
    ### BEGIN SOLUTION
    order, seen, stack = [], set(), [(output, False)]
    while stack:
        number, inputs_are_done = stack.pop()
        if inputs_are_done:
            order.append(number)
        elif number not in seen:
            seen.add(number)
            stack.append((number, True))
            stack.extend((i, False) for i, _ in number.inputs)
    found = {output: 1.0}
    for number in reversed(order):
        for i, local in number.inputs:
            found[i] = found.get(i, 0.0) + found[number] * local
    return [found.get(w, 0.0) for w in wanted]
    ### END SOLUTION
