"""Lowering: what each primitive becomes in kernel IR, or in which other step of a program.

`elementwise` and `indexing` are the tables (primitive to scalar expression, primitive to index
map), `region` builds a kernel from a fused group, `schedule` is the list of steps that a program
becomes, before memory is planned.
"""
