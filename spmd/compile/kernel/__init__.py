"""Kernel IR: loop nests over scalar expressions, once for all backends.

`ir` the data structures, `ops` and `dtypes` the tables, `builder` a builder, `check` the law,
`format` the readable form, `iteration_space` the transformations of iteration spaces that every
renderer starts with. The meaning of a kernel is the interpreter of tests/compile/kernel, the oracle
of every renderer.
"""
