"""Arrays over devices: meshes, partition specs, shardings, `shard_map` and `pmap`."""
