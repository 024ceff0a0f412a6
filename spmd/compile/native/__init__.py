"""Execution of programs on the host, whatever computes their kernels."""
