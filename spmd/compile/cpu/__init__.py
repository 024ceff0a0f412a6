"""The CPU backend: kernels as LLVM IR text, and the assembly of programs that run them.

`codegen` writes kernels, with the functions of `math`; `matmul` and `sort` have generators of their
own; `assemble` makes a program of a schedule. `native` compiles and runs all of it.
"""
