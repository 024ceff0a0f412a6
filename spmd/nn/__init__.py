"""Functions for neural networks, with the names of `jax.nn`: activations, softmax, initializers."""

# ruff: noqa: F401

import typing as _typing

from spmd.base.lazy_import import without as _without
from spmd.nn import initializers
from spmd.nn.activations import (
    celu,
    elu,
    gelu,
    glu,
    hard_sigmoid,
    hard_silu,
    hard_swish,
    hard_tanh,
    identity,
    leaky_relu,
    log1mexp,
    log_sigmoid,
    mish,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    soft_sign,
    softplus,
    sparse_plus,
    sparse_sigmoid,
    squareplus,
    swish,
)
from spmd.nn.attention import dot_product_attention
from spmd.nn.functions import (
    log_softmax,
    logmeanexp,
    logsumexp,
    one_hot,
    scaled_matmul,
    softmax,
    standardize,
)
from spmd.nn.scaled import get_scaled_dot_general_config, scaled_dot_general
from spmd.numpy.ufuncs import tanh

if not _typing.TYPE_CHECKING:  # which knows what is missing by itself
    __getattr__ = _without(__name__)
