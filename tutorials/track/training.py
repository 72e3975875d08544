"""Lab 4: data loader and training.

Training repeats one step: take the next few samples, the *batch*; compute the gradients of their loss; move the weights
a little against them. A loader decides which samples are next: in each pass over the data, an *epoch*, every sample at
most once, in a new random order that can be had again from its seed. Experiments that cannot be repeated cannot be
compared, least of all across ranks.

The network is LeNet (LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998, figure 2), with
relu and max-pooling. `Model` joins it with its loss and its gradients to one program; labs 6 to 9 change where the
parts of this step are done, and no line of the step itself.
"""

import numpy as np
from operators import conv2d, cross_entropy, linear, max_pool, relu
from program import Program
from values import gradients, placeholder, reshape

LENET = {  # the shape of each weight and bias, in the order of the network
    "conv1/w": (25, 6), "conv1/b": (6,), "conv2/w": (150, 16), "conv2/b": (16,),
    "fc1/w": (400, 120), "fc1/b": (120,), "fc2/w": (120, 84), "fc2/b": (84,), "fc3/w": (84, 10), "fc3/b": (10,),
}  # fmt: skip


def batches(samples, batch_size, seed, epoch):
    """The batches of one epoch: a list of arrays of sample numbers, each of exactly `batch_size`; the rest is left out.

    The order is `permutation(samples)` of `np.random.default_rng([seed, epoch])`: another in each epoch, and the same
    whenever seed and epoch are.
    """
    ### BEGIN SOLUTION
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    return [order[i : i + batch_size] for i in range(0, samples - batch_size + 1, batch_size)]
    ### END SOLUTION


def initial(shapes, seed):
    """{name: float32 array} for {name: shape}. Biases (of one axis) are 0.

    Weights are normal, with the variance 2 / (number of rows): relu loses half of a signal, and this makes up for it
    (He et al., "Delving Deep into Rectifiers", 2015). Draw from one `default_rng(seed)`, in the order of `shapes`.
    """
    ### BEGIN SOLUTION
    rng = np.random.default_rng(seed)
    values = {}
    for name, shape in shapes.items():
        scale = (2 / shape[0]) ** 0.5
        values[name] = (rng.normal(0, scale, shape) if len(shape) > 1 else np.zeros(shape)).astype(np.float32)
    return values
    ### END SOLUTION


def features(x, w):
    """The first half of LeNet: images (n, 28, 28, 1) to (n, 400). `w` has a node for each name in LENET.

    A convolution of size 5 with padding 2, relu, pooling by 2; again without padding; then one row for each sample.
    """
    ### BEGIN SOLUTION
    x = max_pool(relu(conv2d(x, w["conv1/w"], w["conv1/b"], size=5, padding=2)), size=2)
    x = max_pool(relu(conv2d(x, w["conv2/w"], w["conv2/b"], size=5, padding=0)), size=2)
    return reshape(x, size=(x.shape[0], 400))
    ### END SOLUTION


def classifier(x, w):
    """The second half: (n, 400) to the scores (n, 10), by three linear layers with relu between them."""
    ### BEGIN SOLUTION
    x = relu(linear(x, w["fc1/w"], w["fc1/b"]))
    x = relu(linear(x, w["fc2/w"], w["fc2/b"]))
    return linear(x, w["fc3/w"], w["fc3/b"])
    ### END SOLUTION


def lenet(x, w):
    return classifier(features(x, w), w)


class Model:
    """A network with its loss and gradients, as one program for batches of one size.

    `network(x, w)` makes the scores from a node and a dict of nodes, `shapes` has the shape of each weight, and
    `input_shape` that of a batch.
    """

    def __init__(self, network, shapes, input_shape, classes=10):
        self.x, self.t = placeholder(size=input_shape), placeholder(size=(input_shape[0], classes))
        self.w = {name: placeholder(size=shape) for name, shape in shapes.items()}
        self.classes, self.scores = classes, network(self.x, self.w)
        loss = cross_entropy(self.scores, self.t)
        self.training = Program([loss, *gradients(loss, list(self.w.values()))])
        self.inference = Program([self.scores])

    def feeds(self, weights, x):
        return {self.x: x} | {self.w[name]: array for name, array in weights.items()}

    def gradients(self, weights, x, labels):
        """(loss, {name: gradient}) for a batch; `labels` are class numbers, and the loss is a float."""
        ### BEGIN SOLUTION
        one_hot = np.eye(self.classes, dtype=np.float32)[labels]
        loss, *found = self.training.run(self.feeds(weights, x) | {self.t: one_hot})
        return float(loss), dict(zip(self.w, found))
        ### END SOLUTION

    def accuracy(self, weights, x, labels):
        """The share of all samples whose largest score is that of their class.

        There may be any number of samples, but the program takes `self.x.shape[0]` at a time: fill the last batch up
        with anything, and do not count that.
        """
        ### BEGIN SOLUTION
        size, right = self.x.shape[0], 0
        for start in range(0, len(x), size):
            part = x[start : start + size]
            filled = np.zeros(self.x.shape, np.float32)
            filled[: len(part)] = part
            (scores,) = self.inference.run(self.feeds(weights, filled))
            right += int((scores[: len(part)].argmax(1) == labels[start : start + size]).sum())
        return right / len(x)
        ### END SOLUTION


class Momentum:
    """Gradient descent with momentum: v = momentum * v + g, then w = w - rate * v. v begins as 0.

    `update(weights, found)` changes the arrays of the dict `weights` themselves, as others may hold them.
    """

    def __init__(self, rate, momentum=0.9):
        self.rate, self.momentum, self.velocity = rate, momentum, {}

    def update(self, weights, found):
        ### BEGIN SOLUTION
        for name, g in found.items():
            v = self.velocity.get(name, 0) * self.momentum + g
            self.velocity[name] = v
            weights[name] -= self.rate * v
        ### END SOLUTION


def fit(step, samples, batch_size, seed, epochs):
    """Call `step(numbers)`, which trains on these samples and returns their loss, for every batch of every epoch.

    Returns the mean loss of each epoch.
    """
    ### BEGIN SOLUTION
    means = []
    for epoch in range(epochs):
        means.append(float(np.mean([step(numbers) for numbers in batches(samples, batch_size, seed, epoch)])))
    return means
    ### END SOLUTION
