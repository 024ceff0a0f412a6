"""Definitions: primitives that have no kernel, as programs of primitives that have one.

The one idea: a GPU that waits for the host loses more than a longer program costs it. So there the
first pass writes the definition in the place of an equation that the host would compute; on CPUs
the library that the primitive's `impl` calls is the faster way.
"""
