"""Lowering: what each primitive becomes in kernel IR, or in which other step of a program.

`steps` is the list of steps that a program becomes, before memory is planned. The kernel of a fused
group is built by `expressions`.
"""
