"""Kernels of the kernel IR as LLVM IR text."""
