"""The passes of the compiler: pure functions from closed jaxpr to closed jaxpr.

Their order is `spmd.compile.passes.pipeline.PASSES`. A pass never changes its input, keeps
the inputs and outputs of the program, and may be run on any well formed jaxpr.
"""
