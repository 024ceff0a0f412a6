"""Factorizations as native code: calls of LAPACK for each matrix of a stack."""
