"""orbax: checkpoints of arrays that are split over processes, written beside the training.

spmdrun -n 2 --as-jax examples/libraries/parallel/orbax_sharded.py
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec


def main():
    """Train, save each step, and take the state back: in the same parts, and in others."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    split, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    start = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    state = {
        "w": jax.make_array_from_callback(start.shape, split, lambda index: start[index]),
        "bias": jax.device_put(jnp.ones(3), whole),
    }
    folder = tempfile.mkdtemp() if jax.process_index() == 0 else ""
    text = multihost_utils.broadcast_one_to_all(np.frombuffer(folder.encode().ljust(256), np.uint8))
    folder = bytes(text).decode().strip()
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 0.5, state))
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as kept:
        for n in range(3):
            kept.save(n, args=ocp.args.StandardSave(state))
            state = step(state)
        kept.wait_until_finished()
        assert kept.all_steps() == [1, 2]
        back = kept.restore(2, args=ocp.args.StandardRestore(state))
        assert back["w"].sharding.is_equivalent_to(split, 2)
        for shard in back["w"].addressable_shards:
            assert np.array_equal(shard.data, start[shard.index] / 4)
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state
        )
        again = kept.restore(1, args=ocp.args.StandardRestore(wanted))
        assert np.array_equal(again["w"].addressable_data(0), start / 2)
    print("process", jax.process_index(), "has", back["w"].addressable_data(0).shape)


if __name__ == "__main__":
    main()
