"""From a jaxpr to a running program: passes, lowering to kernels, executables, dispatch.

A reader starts at `passes/pipeline.py`, which is the compiler on one screen; `dispatch/jit.py` is
the function that a user calls, `dispatch/eager.py` runs operations outside `jit`.
"""
