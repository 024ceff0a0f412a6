"""Discrete Fourier transforms as native code."""
