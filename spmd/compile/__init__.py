"""From a jaxpr to a running program: passes, lowering to kernels, executables, dispatch.

A reader starts at `passes/pipeline.py`, which is the compiler on one screen; `dispatch/jit.py` is
what a user calls, `dispatch/eager.py` what an operation outside `jit` does.
"""
