"""Digests of bytes, the same in every process and everywhere.

`hashlib` offers the same function, but its import loads OpenSSL, which takes a twentieth of what
`import spmd` takes.
"""

from __future__ import annotations

try:
    from _blake2 import blake2b
except ImportError:  # a Python without that module has another one behind `hashlib`
    from hashlib import blake2b

__all__ = ["blake2b"]
