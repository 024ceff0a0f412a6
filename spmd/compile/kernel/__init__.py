"""Kernel IR: loop nests over scalar expressions, once for all backends.

`ir` the data structures, `ops` and `dtypes` the tables, `builder` a builder, `check` the law,
`interpret` the meaning (the oracle of every renderer), `format` the readable form,
`iteration_space` the transformations of iteration spaces that every renderer starts with.
"""
