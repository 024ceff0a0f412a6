"""Lowering: the form of each primitive in kernel IR, or as another step of a program.

`steps` is the list of steps that a program becomes, before memory is planned. The kernel of a fused
group is built by `expressions`.
"""
