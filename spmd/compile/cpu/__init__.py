"""The CPU backend: native code made of LLVM IR text at run time, and the runtime that executes it.

`loader` turns IR text into addresses (`cache` remembers the object code on disk), `runner`
executes programs of native steps over virtual devices, `pool` holds the worker threads,
`allocator` recycles memory, `gemm` generates matrix products.
"""
