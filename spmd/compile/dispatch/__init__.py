"""From a call in Python to an executable: jit, signatures, operations outside jit, fast calls."""
