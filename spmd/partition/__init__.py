"""Automatic partitioning: a program of whole arrays becomes one that each device runs on its parts.

`propagate` decides for every value which mesh axes split which of its dims; `write` makes the
per-device program, a single `shard_map` equation, with the collectives that this takes.
"""
