"""Layouts of arrays in memory: `Layout` and `Format`, which `device_put` takes for a sharding."""

from spmd.sharding.named import Format, Layout

__all__ = ["Format", "Layout"]
