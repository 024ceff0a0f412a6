"""The transformations as users call them, over pytrees, with argnums, checks and clear errors.

`jit` is in `compile/dispatch/jit.py`, `pmap` and `shard_map` in `sharding/`; the files here
differentiate, vectorise and inspect.
"""
