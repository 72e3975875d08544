"""What people get wrong, and what they are told: one row a mistake.

Each answer names the user's line, what was got, and one remedy, in at most 15 lines of traceback, and nothing is lost.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import traceback
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import pytest

import hetu as ht
from hetu.core import errors
from hetu.core.graph import OPS

MISTAKES: dict[str, tuple[Callable, type[Exception], list[str]]] = {}


def mistake(error: type[Exception], *fragments: str):
    """Enter a function that makes one mistake, the error class it gets, and what the text must say."""

    def enter(function: Callable) -> Callable:
        MISTAKES[function.__name__] = function, error, list(fragments)
        return function

    return enter


def x(*shape, dtype="float32", name="x"):
    return ht.placeholder(name, shape, dtype)


def v(name, *shape, dtype=np.float32):
    return ht.variable(name, np.ones(shape, dtype))


# -- while the graph is built ----------------------------------------------------------------------------------


@mistake(ValueError, "matmul(f32[?, 784], f32[256, 10])", "784 against 256", "matrix_transpose")
def inner_sizes_differ():
    x(None, 784) @ v("w", 256, 10)


@mistake(ValueError, "add(f32[4, 3], f32[4])", "do not broadcast")
def shapes_do_not_broadcast():
    x(4, 3) + v("b", 4)


@mistake(TypeError, "indices of f32[]", "np.int64(i) or [i]")
def an_index_alone():
    ht.take(x(4, 3), 0)


@mistake(ValueError, "mean got keepdims=1", "bool")
def a_mean_that_is_called_a_sum():
    ht.mean(x(4, 3), keepdims=1)


@mistake(ValueError, "learning_rate=Decimal('0.1')", "such as float(Decimal('0.1'))")
def a_rate_that_is_no_float():
    ht.optim.SGD(Decimal("0.1"))


@mistake(ValueError, "Mesh got sizes=<generator", "such as list(sizes)")
def a_generator_for_a_sequence():
    ht.dist.Mesh((n for n in (2, 2)), ("data", "tensor"))


@mistake(ValueError, "Mesh got sizes={2, 3}", "in an order, such as sorted(sizes)")
def a_set_for_a_sequence():
    ht.dist.Mesh({2, 3}, ("data", "tensor"))


@mistake(ValueError, "reshape()", "test_mistakes.py", "run_ranks")
def what_ranks_call_is_none_of_the_users():
    ht.dist.run_ranks(2, functools.partial(ht.reshape, x(4), (5,)))


@mistake(ValueError, "plan got src=[4, 4]", "as Layout")
def a_shape_for_a_layout():
    ht.dist.plan([4, 4], [4, 4], (4, 4))


@mistake(ValueError, "12 elements", "-1")
def elements_do_not_fill_the_shape():
    ht.reshape(x(3, 4), (5, 3))


@mistake(ValueError, "axis 2 does not exist", "use -2 to 1")
def no_such_axis():
    ht.sum(x(3, 4), axis=2)


@mistake(ValueError, "conv2d", "channels", "channels-last")
def images_with_channels_last():
    ht.conv2d(x(None, 28, 28, 1), v("w", 6, 1, 5, 5))


@mistake(ValueError, "conv2d", "kernel")
def kernel_larger_than_image():
    ht.conv2d(x(None, 1, 3, 3), v("w", 6, 1, 5, 5))


@mistake(ValueError, "concat", "f32[2, 3]", "f32[2, 4]")
def joining_unequal_arrays():
    ht.concat([x(2, 3), x(2, 4, name="y")], axis=0)


@mistake(ValueError, "mse_loss", "f32[?, 1]", "f32[?]")
def a_loss_that_would_broadcast():
    ht.mse_loss(x(None, 1), x(None, name="t"))


@mistake(ValueError, "mae_loss", "f32[?, 1]", "f32[?]", "squeeze")
def a_column_of_predictions_against_a_row_of_targets():
    ht.mae_loss(ht.nn.Linear(3, 1)(x(None, 3)), x(None, name="t"))


@mistake(ValueError, "huber_loss", "f32[32, 4]", "f32[4]", "does not broadcast")
def one_target_for_a_whole_batch():
    ht.huber_loss(x(32, 4), x(4, name="t"))


@mistake(ValueError, "binary_cross_entropy_with_logits", "f32[?, 1]", "f32[?]")
def binary_labels_without_the_axis_of_the_logits():
    ht.binary_cross_entropy_with_logits(x(None, 1), x(None, name="t"))


@mistake(ValueError, "kl_divergence", "f32[?, 10]", "f32[10]")
def one_distribution_for_a_whole_batch():
    ht.kl_divergence(x(None, 10), x(10, name="t"))


@mistake(ValueError, "softmax_cross_entropy", "i64[?, 10]", "one-hot", "ht.argmax")
def one_hot_labels_as_class_ids():
    ht.softmax_cross_entropy(x(None, 10), x(None, 10, dtype="int64", name="t"))


@mistake(ValueError, "softmax_cross_entropy", "f32[?, 9]", "f32[?, 10]")
def distributions_over_other_classes():
    ht.softmax_cross_entropy(x(None, 10), x(None, 9, name="t"))


@mistake(ValueError, "softmax_cross_entropy", "(32,)", "(10,)", "last axis, the classes")
def logits_with_classes_first():
    ht.softmax_cross_entropy(x(10, 32), x(32, dtype="int64", name="t"))


@mistake(TypeError, "nll_loss", "f32[?, 10]", "integers of shape (?,)")
def distributions_where_class_ids_are_wanted():
    ht.nll_loss(x(None, 10), x(None, 10, name="t"))


@mistake(ValueError, "was built for inputs with 784", "f32[?, 28, 28]", "ht.flatten(x, 1)")
def images_fed_to_a_layer_of_vectors():
    ht.nn.Linear(784, 10)(x(None, 28, 28))


@mistake(ValueError, "index 5", "size 3", "-3 to 2")
def index_outside_of_an_axis():
    x(3)[5]


@mistake(ValueError, "softmax_cross_entropy", "[?, 1]")
def labels_with_an_extra_axis():
    ht.softmax_cross_entropy(x(None, 10), x(None, 1, dtype="int64", name="t"))


@mistake(TypeError, "softmax_cross_entropy", "int64")
def class_ids_as_floats():
    ht.softmax_cross_entropy(x(None, 10), x(None, name="t"))


@mistake(TypeError, "take", "int64")
def embedding_ids_as_floats():
    ht.embedding(v("table", 10, 4), x(None, name="ids"))


@mistake(TypeError, "add", "bool", "astype")
def arithmetic_on_booleans():
    (x(3) > 0) + (x(3) < 1)


@mistake(TypeError, "unknown dtype 'float33'", "float32")
def misspelt_dtype():
    x(3, dtype="float33")


@mistake(TypeError, "no attribute 'strides'", "did you mean 'stride'?")
def misspelt_argument():
    ht.conv2d(x(None, 1, 8, 8), v("w", 6, 1, 3, 3), strides=2)


@mistake(TypeError, "misses its attribute 'shape'")
def missing_argument():
    ht.reshape(x(3, 4))


@mistake(AttributeError, "no attribute 'shap'", "did you mean 'shape'?")
def misspelt_attribute_of_a_node():
    x(3).shap  # noqa: B018


@mistake(AttributeError, "call ht.relu(node)")
def method_instead_of_function():
    x(3).relu()


@mistake(AttributeError, "'softmx'", "did you mean 'softmax'?")
def misspelt_operator():
    ht.softmx(x(3))


@mistake(TypeError, "has no value yet", "ht.where")
def a_node_as_a_condition():
    if x() > 0:
        pass


@mistake(TypeError, "compares the node, not its value", "ht.equal")
def a_node_compared_with_a_number():
    ht.where(x(3) == 0, 1.0, 0.0)


@mistake(TypeError, "an entry cannot be set", "ht.where")
def setting_an_entry_of_a_node():
    x(3)[0] = 1.0


@mistake(TypeError, "fed to numpy.exp", "ht.exp")
def a_node_fed_to_numpy():
    np.exp(x(3))


@mistake(TypeError, "has no value yet", "ht.evaluate")
def a_node_as_a_number():
    float(x())


@mistake(TypeError, "indexed by a node", "ht.take")
def indexing_by_a_node():
    x(3)[x(2, dtype="int64", name="ids")]


@mistake(ValueError, "getitem", "ht.take")
def indexing_by_a_list():
    x(3)[[0, 2]]


@mistake(TypeError, "not known while the graph is built", "None")
def looping_over_an_unknown_size():
    for _ in range(x(None, 3).shape[0]):
        pass


@mistake(ValueError, "not a scalar", "f32[?]", "ht.mean")
def a_loss_that_is_not_a_scalar():
    ht.gradients(ht.square(x(None)), [x(None)])


@mistake(ValueError, "does not depend on", "unused")
def a_variable_that_does_not_reach_the_loss():
    w, unused = v("w", 3), v("unused", 3)
    ht.gradients(ht.sum(w), [unused])


@mistake(ValueError, "depends on no trainable variable", "stop_gradient")
def a_loss_without_any_variable():
    ht.optim.SGD(0.1).minimize(ht.mean(ht.stop_gradient(v("w", 3))))


@mistake(ValueError, "not a float", "argmax")
def a_loss_of_integers():
    ht.optim.SGD(0.1).minimize(ht.argmax(v("w", 3)))


@mistake(ValueError, "no gradient rule", "stop_gradient")
def an_operator_without_a_gradient():
    @ht.op
    def mystery(xp, x):
        return xp.sin(x)

    try:
        w = v("w", 3)
        ht.gradients(ht.sum(mystery(w)), [w])
    finally:
        del OPS["mystery"]


@mistake(ValueError, "fails on these shapes", "broadcast", "its function takes")
def shapes_that_an_operator_of_ones_own_does_not_take():
    @ht.op
    def mystery(xp, x, y):
        return x + y

    try:
        mystery(v("x", 3), v("y", 4))
    finally:
        del OPS["mystery"]


@mistake(AttributeError, "hetu.nn has no 'BatchNorm2d'", "it is ht.nn.BatchNorm here")
def a_layer_by_the_name_of_another_framework():
    ht.nn.BatchNorm2d(3)


@mistake(AttributeError, "hetu.nn has no 'LeakyReLU'", "call the function ht.leaky_relu")
def an_activation_as_a_layer():
    ht.nn.LeakyReLU()


@mistake(AttributeError, "no attribute 'T'", "call ht.matrix_transpose(node)")
def the_transpose_as_of_an_array():
    x(3, 4).T  # noqa: B018


@mistake(TypeError, "Conv2d takes no 'ksize'", "did you mean 'kernel_size'?")
def an_argument_of_a_layer_by_the_name_of_another_framework():
    ht.nn.Conv2d(3, 8, ksize=3)


@mistake(TypeError, "ConvTranspose2d takes no 'out_padding'", "did you mean 'output_padding'?")
def a_misspelt_argument_that_a_layer_hands_on():
    ht.nn.ConvTranspose2d(3, 8, 2, out_padding=1)


@mistake(ValueError, "padding=((1, 1),)", "pass ((top, bottom), (left, right))")
def a_frame_of_one_axis():
    ht.max_pool2d(ht.placeholder("x", (1, 1, 6, 6)), kernel=2, padding=((1, 1),))


@mistake(ValueError, "padding=((1, 1), (1, 1), (1, 1))", "pass ((top, bottom), (left, right))")
def a_frame_of_three_axes():
    ht.conv2d(ht.placeholder("x", (1, 1, 6, 6)), ht.placeholder("w", (1, 1, 2, 2)), padding=((1, 1),) * 3)


@mistake(TypeError, "AvgPool2d takes 1 by position (kernel_size), got 2", "name the others: stride=2")
def too_many_arguments_by_position():
    ht.nn.AvgPool2d(3, 2)


@mistake(TypeError, "Linear misses outputs", "pass outputs=...")
def a_layer_without_its_size():
    ht.nn.Linear(3)


@mistake(ValueError, "no keys to attend to: (2, 0, 4)", "pass one key at least")
def attention_to_nothing():
    ht.scaled_dot_product_attention(x(2, 3, 4), x(2, 0, 4, name="k"), x(2, 0, 4, name="v"))


@mistake(ValueError, "no keys to attend to: (2, 0, 4)", "pass one key at least")
def attention_to_nothing_with_a_mask_of_floats():
    ht.scaled_dot_product_attention(x(2, 3, 4), x(2, 0, 4), x(2, 0, 5), x(2, 3, 0))


@mistake(ValueError, "f32[2, 3, 0] and f32[2, 3, 0] have no features to compare", "give both one at least")
def attention_of_nothing():
    ht.scaled_dot_product_attention(x(2, 3, 0), x(2, 3, 0, name="k"), x(2, 3, 4, name="v"))


@mistake(ValueError, "the kernel covers no pixel: f32[4, 3, 0, 3]", "a height and a width of 1 at least")
def a_kernel_without_rows():
    ht.conv2d(x(1, 3, 8, 8), x(4, 3, 0, 3, name="w"))


@mistake(ValueError, "the logits f32[2, 0] have no classes", "one class at least")
def no_classes():
    ht.softmax_cross_entropy(x(2, 0), [0, 0])


@mistake(ValueError, "f32[0, 3] has no samples, and so no mean and no variance", "leave an empty batch out")
def the_statistics_of_an_empty_batch():
    ht.nn.BatchNorm(3)(x(0, 3))


@mistake(ValueError, "nothing is to be normalized", "give x one at least")
def a_norm_of_no_features():
    ht.layer_norm(x(2, 0), np.ones(0, "f"), np.zeros(0, "f"))


@mistake(TypeError, "arange of booleans", "compare an arange of integers")
def truths_in_order():
    ht.arange(5, dtype="bool")


@mistake(ValueError, "from 0.0 to inf by 1 are inf numbers", "pass finite numbers")
def counting_without_an_end():
    ht.arange(0.0, float("inf"))


@mistake(ValueError, "int32 does not hold nan", 'another dtype, such as "float32"')
def integers_that_are_nan():
    ht.full((2,), float("nan"), "int32")


@mistake(ValueError, "bool does not hold 2", 'another dtype, such as "float32"')
def a_truth_that_is_two():
    ht.full_like(x(2, dtype="bool"), 2)


@mistake(ValueError, "uint8 does not hold -1", 'another dtype, such as "float32"')
def a_border_beyond_the_dtype():
    ht.pad(x(2, dtype="uint8"), 1, value=-1)


@mistake(ValueError, "int32 does not hold 0.5", 'another dtype, such as "float32"')
def a_border_of_fractions_around_integers():
    ht.pad(x(2, dtype="int32"), 1, value=0.5)


@mistake(ValueError, "int8 does not hold 200", 'another dtype, such as "float32"')
def counting_beyond_the_dtype():
    ht.arange(0, 300, 100, "int8")


@mistake(ValueError, "int32 does not hold 4.5", 'another dtype, such as "float32"')
def counting_integers_by_halves():
    ht.arange(0, 5, 0.5, "int32")


@mistake(ValueError, "by 0.5 with a size that is not known yet", "ht.arange(n) * 0.5")
def counting_to_an_open_size_by_halves():
    ht.arange(0, x(None).shape[0], 0.5)


@mistake(ValueError, "uint8 does not hold 299", 'another dtype, such as "float32"')
def drawing_beyond_the_dtype():
    ht.randint(0, 300, (3,), dtype="uint8")


@mistake(TypeError, "got booleans, wanted numbers", "convert with ht.astype")
def adding_truths_to_rows():
    ht.scatter_add(x(3, dtype="bool"), np.array([0, 0]), x(2, dtype="bool", name="y"))


@mistake(ValueError, "sum_to_like(f32[2, 3], f32[3, 2])", "do not broadcast")
def summing_to_another_shape():
    ht.sum_to_like(x(2, 3), x(3, 2, name="y"))


@mistake(ValueError, "broadcast_like(f32[3], f32[4])", "do not broadcast")
def repeating_to_another_shape():
    ht.broadcast_like(x(3), x(4, name="y"))


@mistake(TypeError, "got booleans, wanted numbers", "convert with ht.astype")
def adding_up_truths():
    ht.sum_to_like(x(3, 2, dtype="bool"), x(2, name="y"))


@mistake(ValueError, "300 out of bounds for int8", 'ht.astype(x, "int64")')
def a_number_beyond_its_neighbor():
    ht.equal(x(2, dtype="int8"), 300)


@mistake(TypeError, "Linear got name=5", "pass name as str or None")
def a_name_that_is_a_number():
    ht.nn.Linear(3, 4, name=5)


@mistake(TypeError, "gradients got loss=None", "pass loss as Node")
def gradients_of_nothing():
    ht.gradients(None, [v("w", 2)])


@mistake(TypeError, "minimize got loss=None", "pass loss as Node")
def nothing_to_minimize():
    ht.optim.SGD(0.1).minimize(None)


@mistake(TypeError, "partition got nodes=2.0", "pass nodes as a whole number of 1 at least")
def a_size_that_numpy_refuses():
    ht.data.partition([[0, 1]], 2.0, 2)


@mistake(TypeError, "uniform got low='a'", "pass low as float")
def a_bound_that_is_a_text():
    ht.uniform((2,), "a")


@mistake(TypeError, "Linear got 'inputs' twice", "pass it once")
def a_size_by_position_and_by_name():
    ht.nn.Linear(3, inputs=3)


@mistake(TypeError, "Momentum misses learning_rate", "pass learning_rate=...")
def an_optimizer_without_its_rate():
    ht.optim.Momentum()


@mistake(AttributeError, "SGD takes no 'momentum'", "use Momentum, which does")
def a_hyperparameter_of_another_optimizer():
    ht.optim.SGD(0.1, momentum=0.9)


@mistake(TypeError, "Doubled takes no 'bais'", "did you mean 'bias'?")
def a_misspelt_argument_of_a_layer_of_ones_own():
    class Doubled(ht.nn.Linear):
        def __init__(self, size, **options):
            super().__init__(size, size, **options)

    Doubled(3, bais=False)


@mistake(TypeError, "max_pool2d takes no 'strid'", "did you mean 'stride'?")
def a_misspelt_argument_of_a_function():
    ht.max_pool2d(x(1, 2, 4, 4), 2, strid=2)


@mistake(TypeError, "placeholder misses shape", "pass shape=...")
def a_function_without_an_argument():
    ht.placeholder("x")


@mistake(TypeError, "run takes 2 by position (name, feed), got 3", "name the others: ahead=None")
def too_many_arguments_of_a_method():
    ht.Executor([x(3)]).run("default", {}, None)


@mistake(TypeError, "Momentum misses learning_rate", "pass learning_rate=...")
def an_optimizer_with_an_option_that_it_hands_on_but_without_its_rate():
    ht.optim.Momentum(weight_decay=0.1)


@mistake(TypeError, "Labeled misses size", "pass size=...")
def a_layer_that_takes_any_option_without_its_size():
    class Labeled(ht.nn.Layer):
        def __init__(self, size, **labels):
            super().__init__()

    Labeled(color="red")


@mistake(TypeError, "Sequential takes no 'nam'", "did you mean 'name'?")
def a_misspelt_argument_behind_any_number_of_others():
    ht.nn.Sequential(ht.relu, ht.tanh, nam="head")


@mistake(TypeError, "einsum takes no 'optimize'", "known names: equation")
def an_option_of_numpy_alone():
    ht.einsum("ij,ij->i", x(2, 3), x(2, 3), optimize=True)


@mistake(TypeError, "Stack misses depth", "pass depth=...")
def an_argument_by_name_alone_behind_any_number_of_others():
    class Stack(ht.nn.Layer):
        def __init__(self, *sizes, depth):
            super().__init__()

    Stack(1, 2)


@mistake(TypeError, "Scaled misses factor", "pass factor=...")
def an_argument_by_position_alone():
    class Scaled(ht.nn.Layer):
        def __init__(self, size, factor, /):
            super().__init__()

    Scaled(3)


@mistake(TypeError, "minimize takes no 'var_list'", "known names: loss, variables")
def an_argument_of_a_method_by_the_name_of_another_framework():
    ht.optim.SGD(0.1).minimize(ht.sum(v("w", 3)), var_list=[])


@mistake(ValueError, "clip(f32[3])", "nan and 1", "None for no bound")
def clip_to_a_bound_that_is_no_number():
    ht.clip(x(3), float("nan"), 1.0)


@mistake(TypeError, "variable got init=(784, 10)", "if (784, 10) is a shape, pass it as shape=")
def a_shape_taken_for_a_value():
    ht.variable("w", (784, 10))


@mistake(TypeError, "data is masked", "array.filled(0)")
def a_mask_in_an_expression():
    x(3) + np.ma.masked_array(np.ones(3), mask=[1, 0, 0])


@mistake(ValueError, "placeholder 'x' is masked", "array.filled(0)")
def a_mask_as_feed():
    ht.Executor([x(3) * 2]).run({"x": np.ma.masked_array(np.ones(3), mask=[1, 0, 0])})


class Tracked:
    """A tensor of another library that it differentiates."""

    def __array__(self, *args, **kwargs):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")


@mistake(
    ValueError,
    "placeholder 'x' got a Tracked whose numbers cannot be read: Can't",
    "detach a tensor of another library first",
)
def a_tracked_tensor_as_feed():
    ht.Executor([x(3) * 2]).run({"x": Tracked()})


@mistake(
    TypeError,
    "data got a Tracked whose numbers cannot be read: Can't",
    "detach a tensor of another library first",
)
def a_tracked_tensor_as_a_value():
    ht.variable("w", Tracked())


@mistake(ValueError, "placeholder 'ids' is int32, got 1099511627776", "declare a wider dtype")
def an_id_beyond_its_dtype():
    ht.Executor([ht.take(v("t", 3, 2), x(None, dtype="int32", name="ids"))]).run({"ids": [2**40]})


@mistake(TypeError, "Adam got learning_rate=nan", "a number of 0 at least")
def a_rate_that_is_no_number():
    ht.optim.Adam(float("nan"))


@mistake(TypeError, "SGD got learning_rate=inf", "a number of 0 at least")
def an_infinite_rate():
    ht.optim.SGD(float("inf"))


@mistake(TypeError, "Adam got beta1=1.5", "a number from 0 to below 1")
def a_beta_beyond_one():
    ht.optim.Adam(beta1=1.5)


@mistake(TypeError, "Adam got clip_norm=0", "a number above 0")
def clipping_at_zero():
    ht.optim.Adam(clip_norm=0)


@mistake(ValueError, "f32[1, 3] has one sample, whose variance is 0", "two rows at least")
def one_row_in_batch_norm():
    layer = ht.nn.BatchNorm(3)
    loss = ht.sum(layer(x(None, 3)) * v("q", 3))
    ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)]).run({"x": np.ones((1, 3))})


def a_mystery(run, function=lambda xp, x: x * 2, view=None, **rules):
    """Runs the operator of a stranger, of the type of its input unless it says otherwise."""
    made = ht.op(function, **{"name": "mystery", "infer": lambda x: x} | rules)
    try:
        if view is not None:
            made.view(view)
        ht.Executor([made(v("w", 2, 3))], passes=[]).run() if run else ht.evaluate(made(np.ones((2, 3))))
    finally:
        OPS.pop("mystery", None)


SUMMED = "its function gave shapes ((1, 3),), `infer` says ((2, 3),)"


@mistake(ValueError, "mystery: " + SUMMED, "correct one")
def a_type_rule_of_another_shape_in_a_program():
    a_mystery(True, lambda xp, x: xp.sum(x, axis=0, keepdims=True))


@mistake(ValueError, "mystery: " + SUMMED, "correct one")
def a_type_rule_of_another_shape_in_a_look_at_a_value():
    a_mystery(False, lambda xp, x: xp.sum(x, axis=0, keepdims=True))


@mistake(ValueError, "`infer` says ((2, 3), (2, 3))")
def a_type_rule_of_more_outputs():
    two = ht.op(lambda xp, x: (x,), name="mystery", infer=lambda x: (x, x))
    try:
        ht.Executor([*two(v("w", 2, 3))]).run()
    finally:
        del OPS["mystery"]


@mistake(ValueError, "the view of 'mystery' is no part of its first input that is f32[2, 3]", "or None")
def a_view_of_another_shape():
    a_mystery(True, view=lambda xp, x: x.T)


@mistake(ValueError, "the view of 'mystery' is no part of its first input that is f32[2, 3]", "or None")
def a_view_of_another_dtype():
    a_mystery(True, view=lambda xp, x: x.view("int32"))


@mistake(ValueError, "the view of 'mystery' is no part of its first input that is f32[2, 3]", "or None")
def a_view_that_is_computed_once():
    a_mystery(True, view=lambda xp, x: x * 2)


@mistake(TypeError, "mystery: ufunc='add' for 1 inputs", "as many")
def a_ufunc_of_two_arrays():
    a_mystery(True, ufunc="add")


@mistake(TypeError, "mystery: precision='slow'", "low or follow or wide")
def an_unknown_precision():
    a_mystery(True, precision="slow")


@mistake(TypeError, "mystery: reduce='a->a'", "sum or max or min")
def an_unknown_way_to_combine_parts():
    a_mystery(True, reduce="a->a")


@mistake(TypeError, "mystery: dims='ab'", "inputs->result, by axes")
def a_rule_of_axes_without_a_result():
    a_mystery(True, dims="ab")


@mistake(ValueError, "the gradient rule of 'mystery' returned f32[] for f32[3]", "of the input's shape")
def a_gradient_of_another_shape():
    @ht.op
    def mystery(xp, x):
        return x * 2

    try:
        mystery.grad(lambda g, y, x: ht.sum(g))
        w = v("w", 3)
        ht.gradients(ht.sum(mystery(w)), [w])
    finally:
        del OPS["mystery"]


@mistake(ValueError, "the gradient rule of 'mystery' returned (2.0,)", "one node or None per input")
def a_gradient_that_is_no_node():
    @ht.op
    def mystery(xp, x):
        return x * 2

    try:
        mystery.grad(lambda g, y, x: 2.0)
        w = v("w", 3)
        ht.gradients(ht.sum(mystery(w)), [w])
    finally:
        del OPS["mystery"]


@mistake(ValueError, "cannot be copied, as names of variables are unique", "build a second layer")
def copying_a_layer():
    copy.deepcopy(ht.nn.Linear(3, 4))


@mistake(ValueError, "cannot be copied: it is one value", "build it again")
def copying_a_node():
    copy.deepcopy(x(3))


@mistake(TypeError, "Sequential got layers=<class 'hetu", "an object such as Flatten(...) makes")
def a_class_for_a_layer():
    ht.nn.Sequential(ht.nn.Linear(3, 4), ht.nn.Flatten)


@mistake(TypeError, "fit got executor=<class 'hetu", "an object such as Executor(...) makes")
def a_class_for_an_executor():
    ht.fit(ht.Executor, [], epochs=1, inputs=[])


@mistake(TypeError, "SGD got learning_rate=<class 'hetu", "an object such as Plateau(...) makes")
def a_class_for_a_schedule():
    ht.optim.SGD(ht.schedules.Plateau)


@mistake(TypeError, "Linear got bias='no'", "pass bias as bool")
def a_text_for_a_truth():
    ht.nn.Linear(3, 4, bias="no")


@mistake(ValueError, "LogisticRegression got tol=-1.0", "pass tol as a number of 0 at least")
def a_number_for_a_field_of_a_base():
    ht.ml.LogisticRegression(tol=-1.0)


@mistake(ValueError, "KNeighborsClassifier got weights='near'", "pass weights as 'uniform' or 'distance'")
def a_text_that_is_none_of_those():
    ht.ml.KNeighborsClassifier(weights="near")


@mistake(TypeError, "Bayesian got surrogate=<class 'dict'>", "pass surrogate as Callable[[], Surrogate]")
def a_class_without_the_methods():
    ht.automl.Bayesian(dict)


# -- making an executor and running it ---------------------------------------------------------------------------


@mistake(ValueError, "two variables are called 'w'", "scope")
def two_variables_of_one_name():
    ht.Executor([v("w", 3) + v("w", 3)])


@mistake(TypeError, "where() misses its input 'a'", "call where(condition, a, b)")
def a_choice_without_what_to_choose():
    ht.where(x(3) > 0)


@mistake(TypeError, "Linear got activation='relu'", "a function of nodes, such as ht.relu")
def an_activation_by_name():
    ht.nn.Linear(4, 3, activation="relu")


@mistake(ValueError, "3 entries in the axis 1 (channels)", "ht.permute_dims(x, (0, 3, 1, 2))")
def an_image_whose_channels_stand_last():
    ht.nn.Conv2d(3, 8, 3)(x(5, 28, 28, 3))


@mistake(TypeError, "updates were passed alone")
def updates_without_a_list():
    w = v("w", 3)
    ht.Executor({w: w + 1})


@mistake(TypeError, "sub-graph 'train' is a Node", "[loss, train_op]")
def a_loss_without_a_list():
    ht.Executor({"train": ht.sum(v("w", 3))})


@mistake(TypeError, "fetches a str: 'loss'", "list nodes")
def fetching_by_name():
    ht.Executor({"train": ["loss"]})


@mistake(ImportError, "CuPy", 'pip install "hetu-dl[gpu]"')
def a_gpu_without_cupy():
    sys.modules["cupy"] = None  # as if it were not installed, also where it is
    try:
        ht.Executor([x(3) * 2], device="gpu")
    finally:
        del sys.modules["cupy"]


@mistake(ValueError, "was not fed 't' i64[?]")
def missing_feed():
    a, t = x(None), x(None, dtype="int64", name="t")
    ht.Executor([ht.sum(a), ht.sum(t)]).run({a: [1.0]})


@mistake(ValueError, "no placeholder 'X'", "known names: x")
def extra_feed():
    ht.Executor([x(3) * 2]).run({"X": [1.0]})


@mistake(ValueError, "'x' is f32[?, 784]", "(2, 28, 28)", "axes")
def misshaped_feed():
    ht.Executor([x(None, 784) * 2]).run({"x": np.zeros((2, 28, 28))})


@mistake(ValueError, "wants int64, got float64", 'astype("int64")')
def mistyped_feed():
    ht.Executor([x(None, dtype="int64") * 2]).run({"x": [0.5]})


@mistake(ValueError, "wants int64, got ['cat', 'dog']", "array of numbers")
def words_as_feed():
    ht.Executor([x(None, dtype="int64") * 2]).run({"x": ["cat", "dog"]})


@mistake(ValueError, "wants float32, got None", "array of numbers")
def nothing_as_feed():
    ht.Executor([x(3) * 2]).run({"x": None})


@mistake(ValueError, "placeholder 'x' got a Node whose numbers cannot be read: <constant f32[3] at", "array of numbers")
def node_as_feed():
    ht.Executor([x(3) * 2]).run({"x": ht.constant([1.0, 2.0, 3.0])})


@mistake(TypeError, "data got a Node whose numbers cannot be read: <constant f32[3] at", "array of numbers")
def node_as_value_of_a_variable():
    ht.variable("w", ht.constant([1.0, 2.0, 3.0]))


@mistake(TypeError, "variable 'count' wants int64, got float64", 'astype("int64")')
def fractions_of_a_count():
    ht.variable("count", 1.5, (2,), "int64")


@mistake(ValueError, "rows of different lengths", "pad or cut")
def ragged_feed():
    ht.Executor([x(None, 2) * 2]).run({"x": [[1, 2], [3]]})


@mistake(ValueError, "the feed is a list", "{placeholder: array}")
def a_feed_without_names():
    ht.Executor([x(None, 2) * 2]).run([[1.0, 2.0]])


@mistake(ValueError, "variable 'w'", "only placeholders", "executor.state")
def feeding_a_variable():
    w = v("w", 3)
    ht.Executor([w * x(3)]).run({w: np.zeros(3), "x": np.zeros(3)})


@mistake(ValueError, "'x' was fed twice")
def feeding_by_node_and_by_name():
    a = x(3)
    ht.Executor([a * 2]).run({a: np.zeros(3), "x": np.ones(3)})


@mistake(ValueError, "do not broadcast", "(2,)", "(3,)")
def sizes_that_differ_at_run_time():
    a, b = x(None), x(None, name="y")
    ht.Executor([a + b]).run({a: [1, 2], b: [1, 2, 3]})


@mistake(KeyError, "no sub-graph 'trian'", "did you mean 'train'?")
def misspelt_subgraph():
    ht.Executor({"train": [x(3)], "eval": [x(3)]}).run("trian", {})


@mistake(ValueError, "softmax_cross_entropy", "10", "0 to 9")
def class_id_out_of_range():
    logits, ids = x(None, 10), x(None, dtype="int64", name="t")
    ht.Executor([ht.softmax_cross_entropy(logits, ids)]).run({logits: np.zeros((2, 10)), ids: [3, 10]})


@mistake(ValueError, "softmax_cross_entropy", "-1")
def class_id_negative():
    logits, ids = x(None, 10), x(None, dtype="int64", name="t")
    ht.Executor([ht.softmax_cross_entropy(logits, ids)]).run({logits: np.zeros((2, 10)), ids: [-1, 3]})


@mistake(ValueError, "take", "7", "0 to 3")
def embedding_id_out_of_range():
    ids = x(None, dtype="int64")
    ht.Executor([ht.embedding(v("table", 4, 2), ids)]).run({ids: [1, 7]})


@mistake(ValueError, "take", "-2")
def embedding_id_negative():
    ids = x(None, dtype="int64")
    ht.Executor([ht.embedding(v("table", 4, 2), ids)]).run({ids: [-2]})


@mistake(ValueError, "wants int64, got float64", 'astype("int64")')
def embedding_ids_fractional():
    ids = x(None, dtype="int64")
    ht.Executor([ht.embedding(v("table", 4, 2), ids)]).run({ids: [1.5, 2.0]})


@mistake(ValueError, "wants int64, got float32", 'astype("int64")')
def class_ids_fractional():
    logits, ids = x(None, 10), x(None, dtype="int64", name="t")
    feed = {logits: np.zeros((2, 10)), ids: np.float32([0.5, 1])}
    ht.Executor([ht.softmax_cross_entropy(logits, ids)]).run(feed)


@mistake(ValueError, "take", "index 9 at position [1]", "0 to 3")
def embedding_id_out_of_range_in_a_notebook():
    ids = x(None, dtype="int64")
    ht.evaluate(ht.embedding(v("table", 4, 2), ids), {ids: [1, 9]})


@mistake(ValueError, "take: index 7 at position []", "0 to 3")
def one_id_out_of_range():
    one = x(dtype="int64")
    ht.Executor([ht.take(v("table", 4, 2), one)]).run({one: 7})


@mistake(ValueError, "softmax_cross_entropy: class id 9 at position [1]", "5 classes")
def a_class_that_does_not_exist_in_a_fused_group():
    logits, ids = x(2, 5), x(2, dtype="int64", name="t")
    ht.Executor([ht.mean(ht.softmax_cross_entropy(logits, ids) * 2)]).run({logits: np.zeros((2, 5)), ids: [1, 9]})


@mistake(ValueError, "floor_divide", "divided by 0", "float32")
def integers_divided_by_zero():
    ids = x(None, dtype="int64")
    ht.Executor([5 // ids]).run({ids: [1, 0]})


@mistake(ArithmeticError, "log", "made the first NaN", "-1 to 0.5")
def a_logarithm_of_a_negative_number():
    a = x(None)
    with ht.debug_nans():
        ht.Executor([ht.sum(ht.log(a * 0.5) * 2)]).run({a: [1.0, -2.0]})


# -- data and checkpoints -------------------------------------------------------------------------------------------


@mistake(ValueError, "without rows")
def empty_data():
    ht.data.DataLoader(ht.data.ArrayDataset(np.zeros((0, 3))), batch_size=2)


@mistake(ValueError, "batch", "5")
def batch_larger_than_data():
    ht.data.DataLoader(ht.data.ArrayDataset(np.zeros((5, 3))), batch_size=8)


@mistake(ValueError, "4", "5")
def inputs_and_labels_of_different_length():
    ht.data.ArrayDataset(np.zeros((5, 3)), np.zeros(4))


def saved(tmp_path, name="w"):
    path = tmp_path / "model.safetensors"
    ht.Executor([v(name, 2, 3)]).save(path)
    return path


@mistake(ValueError, "not a whole checkpoint", "earlier checkpoint")
def truncated_checkpoint(tmp_path):
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    ht.Executor([v("w", 2, 3)]).load(path)


@mistake(ValueError, "not a whole checkpoint")
def foreign_checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x80\x04not a checkpoint at all")
    ht.Executor([v("w", 2, 3)]).load(path)


@mistake(ValueError, "another model", "missing     b", "unexpected  w", "different")
def checkpoint_of_another_model(tmp_path):
    path = tmp_path / "model.safetensors"
    ht.Executor([ht.sum(v("w", 2, 3)) + ht.sum(v("c", 4))]).save(path)
    ht.Executor([ht.sum(v("b", 2, 3)) + ht.sum(v("c", 5))]).load(path)


@mistake(ValueError, "no manifest.json", "path")
def a_folder_that_is_no_checkpoint(tmp_path):
    ht.Executor([v("w", 2)]).load(tmp_path)


@mistake(ValueError, "does not exist", "create it")
def saving_into_a_folder_that_is_not_there(tmp_path):
    ht.Executor([v("w", 2)]).save(tmp_path / "nowhere" / "model.safetensors")


@mistake(ValueError, "no checkpoint", "path")
def missing_checkpoint(tmp_path):
    ht.Executor([v("w", 2)]).load(tmp_path / "nothing")


@mistake(ValueError, "cannot be written", "make room")
def a_log_that_can_be_written_no_more(tmp_path):
    note = ht.look.log_steps(tmp_path / "steps.csv")
    (tmp_path / "steps.csv").unlink()
    (tmp_path / "steps.csv").mkdir()
    note(1, 0.5)


@mistake(ValueError, "a list has no rows", "ArrayDataset(rows, labels)")
def a_list_for_a_data_set():
    ht.data.DataLoader([1, 2, 3], 1)


@mistake(ValueError, "clip_norm=inf", "above 0, finite")
def an_infinite_number_where_none_is_meant():
    ht.optim.SGD(0.1, clip_norm=float("inf"))


@mistake(ValueError, "normalized=None", "'symmetric' or 'mean' or 'none'")
def a_name_of_ours_in_an_annotation():
    ht.data.adjacency([[0, 1]], 2, None)


def test_an_error_in_code_of_ones_own_stays_what_it_is():
    """Whatever the code was given."""

    class Shift(ht.nn.Layer):
        def forward(self, x: int) -> None:
            return "a" - 1

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        Shift()(x(2))
    assert not isinstance(caught.value, errors.HetuError)


@pytest.mark.parametrize("name", MISTAKES)
def test_the_answer_is_clear(name, tmp_path):
    function, error, fragments = MISTAKES[name]
    arguments = (tmp_path,) if function.__code__.co_argcount else ()
    with pytest.raises(error) as caught:
        function(*arguments)
    assert isinstance(caught.value, errors.HetuError)
    text = str(caught.value)
    assert not text.startswith("fused")  # but the operator that the user wrote
    for fragment in fragments:
        assert fragment in text, f"{fragment!r} is not in:\n{text}"
    assert "fix: " in text, text
    assert f"{os.path.basename(__file__)}:" in text, f"the user's line is not named:\n{text}"
    shown = traceback.format_exception(type(caught.value), caught.value, caught.tb.tb_next)
    assert sum(part.count("\n") for part in shown) <= 15, "".join(shown)


def test_there_are_enough_rows():
    assert len(MISTAKES) >= 25


def test_copying_an_executor_is_told():
    with pytest.raises(errors.GraphError, match="cannot be copied"):
        copy.deepcopy(ht.Executor([v("w", 3) * 2]))


@pytest.mark.parametrize("into", [False, True])
def test_an_operator_of_ones_own_cannot_change_what_it_is_lent(monkeypatch, into):
    """A variable's own array may lie there; NumPy names the line."""
    monkeypatch.setenv("HETU_KERNELS", "0")

    @ht.op(infer=lambda x: x)
    def adding(xp, x):
        x += 1
        return x

    if into:
        adding.into(lambda xp, out, x: xp.copyto(out, adding.forward(xp, x)))
    w = ht.variable("w", np.zeros(3, "float32"))
    ex = ht.Executor([adding(w)])
    try:
        with pytest.raises(ValueError, match="read-only"):
            ex.run()
    finally:
        del OPS["adding"]
    assert ex.state["w"].tolist() == [0.0, 0.0, 0.0]


# -- nothing is lost ------------------------------------------------------------------------------------------------


def test_a_refused_checkpoint_changes_nothing(tmp_path):
    path = tmp_path / "model.safetensors"
    ht.Executor([ht.sum(v("w", 2)) + ht.sum(v("c", 4))]).save(path)
    ex = ht.Executor([ht.sum(v("w", 2)) * ht.sum(v("b", 4))])
    before = {name: ex.state[name] for name in ex.state}
    with pytest.raises(errors.CheckpointError):
        ex.load(path)
    assert all((ex.state[name] == value).all() for name, value in before.items())


def test_a_nan_keeps_the_variables_of_the_step_before():
    a, w = x(3), v("w", 3)
    ex = ht.Executor([{w: w * ht.log(a)}])
    with ht.debug_nans(), pytest.raises(errors.NumericError):
        ex.run({a: [-1.0, 1.0, 1.0]})
    assert ex.state["w"].tolist() == [1.0, 1.0, 1.0]
