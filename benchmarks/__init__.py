"""spmd beside JAX and NumPy: the same programs, in alternating blocks, checked against each other.

`python -m benchmarks` runs everything and prints ratios; README.md says how the figures are made.
"""
