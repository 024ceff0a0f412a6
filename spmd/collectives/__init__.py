"""The collectives: operations between the devices along a named axis, under JAX's names."""

# ruff: noqa: F401

from spmd.collectives.all_gather import all_gather, all_gather_p
from spmd.collectives.all_to_all import all_to_all, all_to_all_p, pswapaxes
from spmd.collectives.axis import (
    axis_index,
    axis_index_p,
    axis_size,
    pcast,
    pcast_p,
    pvary,
    pvary_p,
)
from spmd.collectives.ppermute import pbroadcast, ppermute, ppermute_p, pshuffle
from spmd.collectives.psum import pmax, pmax_p, pmean, pmin, pmin_p, psum, psum_p
from spmd.collectives.psum_scatter import psum_scatter, reduce_scatter_p
from spmd.collectives.ragged import ragged_all_to_all
