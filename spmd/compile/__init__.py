"""From a jaxpr to a running program: passes, lowering to kernels, executables, dispatch.

A reader starts at `pipeline.py`, which is the compiler on one screen; `jit.py` is what a user
calls, `dispatch.py` what an operation outside `jit` does.
"""
