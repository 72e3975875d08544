"""Lab 2: the operators of a network.

LeNet needs a few more operators than lab 1 has. Each is written down once and for all: the shape of its result, the
arithmetic, the gradient. Images have the axes (samples, height, width, channels). With the channels last, a convolution
is one product of matrices, as soon as all patches of the images stand in the rows of a matrix. Taking patches is an
operator of its own, and its gradient is its mirror image: a pixel was copied into several patches, so its gradient is
the sum of theirs.

A gradient is written with operators. Where none serves (which element was the largest?), make one that has no gradient
itself: `positive`, `share`.
"""

import numpy as np
from values import as_it_is, operator, reshape, total, total_shape


@operator(shape=lambda x: x[::-1])
def transpose(out, x):
    """The transpose of a matrix."""
    out[...] = x.T


@transpose.gradient
def transpose_gradient(g, y, x):
    return [transpose(g)]


@operator(shape=lambda a, b: (a[0], b[1]))
def matmul(out, a, b):
    """The product of two matrices, (n, k) times (k, m)."""
    np.matmul(a, b, out=out)


@matmul.gradient
def matmul_gradient(g, y, a, b):
    """For Y = A B: dL/dA = G Bᵀ and dL/dB = Aᵀ G. The shapes allow nothing else."""
    ### BEGIN SOLUTION
    return matmul(g, transpose(b)), matmul(transpose(a), g)
    ### END SOLUTION


@operator(shape=as_it_is)
def positive(out, x):
    """1 where x > 0, else 0. It has no gradient."""
    np.greater(x, 0, out=out, casting="unsafe")


@operator(shape=as_it_is)
def relu(out, x):
    """max(x, 0); its slope at 0 is 0."""
    np.maximum(x, 0, out=out)


@relu.gradient
def relu_gradient(g, y, x):
    ### BEGIN SOLUTION
    return [g * positive(y)]
    ### END SOLUTION


@operator(shape=lambda x, y, axes: x)
def share(out, x, y, *, axes):
    """y is the maximum of x along `axes`: 1/k where x is one of the k elements equal to it, else 0. No gradient."""
    ### BEGIN SOLUTION
    np.equal(x, y, out=out, casting="unsafe")
    out /= out.sum(tuple(axes), keepdims=True)
    ### END SOLUTION


@operator(shape=total_shape)
def largest(out, x, *, axes):
    """The maximum along `axes`, which stay with size 1. Its gradient goes to the largest, and equal ones share it."""
    np.max(x, tuple(axes), keepdims=True, out=out)


@largest.gradient
def largest_gradient(g, y, x, *, axes):
    ### BEGIN SOLUTION
    return [g * share(x, y, axes=axes)]
    ### END SOLUTION


def patches_shape(x, *, size, padding):
    n, h, w, c = x
    ### BEGIN SOLUTION
    return n, h + 2 * padding - size + 1, w + 2 * padding - size + 1, size, size, c
    ### END SOLUTION


@operator(shape=patches_shape)
def patches(out, x, *, size, padding):
    """(n, h, w, c) to (n, H, W, size, size, c): at each place (i, j) the square of pixels whose corner it is.

    `padding` rows and columns of zeros are put on each side of the images first. All squares that lie inside count.
    """
    ### BEGIN SOLUTION
    x = np.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    _, height, width, *_ = out.shape
    for i in range(size):
        for j in range(size):
            out[:, :, :, i, j] = x[:, i : i + height, j : j + width]
    ### END SOLUTION


def fold_shape(x, *, size, padding):
    n, height, width, _, _, c = x
    return n, height - 2 * padding + size - 1, width - 2 * padding + size - 1, c


@operator(shape=fold_shape)
def fold(out, x, *, size, padding):
    """The mirror image of `patches`: (n, H, W, size, size, c) to (n, h, w, c).

    Each pixel is the sum of its copies in all squares; what was padding is cut off.
    """
    ### BEGIN SOLUTION
    n, h, w, c = out.shape
    _, height, width, *_ = x.shape
    whole = np.zeros((n, h + 2 * padding, w + 2 * padding, c), out.dtype)
    for i in range(size):
        for j in range(size):
            whole[:, i : i + height, j : j + width] += x[:, :, :, i, j]
    out[...] = whole[:, padding : padding + h, padding : padding + w]
    ### END SOLUTION


@patches.gradient
def patches_gradient(g, y, x, *, size, padding):
    return [fold(g, size=size, padding=padding)]


@fold.gradient
def fold_gradient(g, y, x, *, size, padding):
    return [patches(g, size=size, padding=padding)]


@operator(shape=as_it_is)
def softmax(out, x):
    """exp(x) / sum(exp(x)) in each row of a matrix. exp(1000) is infinite: subtract the largest of the row first."""
    ### BEGIN SOLUTION
    np.exp(x - x.max(-1, keepdims=True), out=out)
    out /= out.sum(-1, keepdims=True)
    ### END SOLUTION


@softmax.gradient
def softmax_gradient(g, y, x):
    """dL/dx_i = y_i (g_i - sum_j g_j y_j), in each row."""
    ### BEGIN SOLUTION
    return [y * (g + total(g * y, axes=(1,)) * -1)]
    ### END SOLUTION


@operator(shape=lambda x, t: ())
def cross_entropy(out, x, t):
    """The mean over the rows of -sum(t log softmax(x)). The rows of `t` are data, and add up to 1.

    The logarithm of softmax is x - log(sum(exp(x))): never take that of a number which may have become 0.
    """
    ### BEGIN SOLUTION
    x = x - x.max(-1, keepdims=True)
    out[...] = np.mean(np.log(np.exp(x).sum(-1)) - (x * t).sum(-1))
    ### END SOLUTION


@cross_entropy.gradient
def cross_entropy_gradient(g, y, x, t):
    """Row i: dL/dx_i = (softmax(x_i) - t_i) / n."""
    ### BEGIN SOLUTION
    return g * (softmax(x) + t * -1) * (1 / x.shape[0]), None
    ### END SOLUTION


def linear(x, w, b):
    """x w + b: (n, k) times (k, m), plus (m,)."""
    return matmul(x, w) + b


def conv2d(x, w, b, *, size, padding):
    """A convolution with stride 1: x (n, h, w, c), w (size * size * c, filters), b (filters,).

    The patches, as rows of a matrix, times w; the rows of the result are the pixels of the new images.
    """
    ### BEGIN SOLUTION
    seen = patches(x, size=size, padding=padding)
    n, height, width, *_ = seen.shape
    pixels = linear(reshape(seen, size=(n * height * width, w.shape[0])), w, b)
    return reshape(pixels, size=(n, height, width, w.shape[1]))
    ### END SOLUTION


def max_pool(x, *, size):
    """(n, h, w, c) to (n, h / size, w / size, c): the largest of each square of `size` pixels a side, which divides.

    Reshape first, so that a square's pixels lie along two axes of their own.
    """
    ### BEGIN SOLUTION
    n, h, w, c = x.shape
    squares = reshape(x, size=(n, h // size, size, w // size, size, c))
    return reshape(largest(squares, axes=(2, 4)), size=(n, h // size, w // size, c))
    ### END SOLUTION
