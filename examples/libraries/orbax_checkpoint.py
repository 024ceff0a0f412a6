"""orbax: save the state of a training, restore it, and keep the last checkpoints."""

import tempfile

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp


def main():
    """Write and read pytrees of arrays."""
    state = {
        "params": {"w": jax.random.normal(jax.random.key(0), (4, 3)), "b": jnp.zeros(3)},
        "step": 7,
        "half": jnp.arange(4, dtype=jnp.bfloat16),
    }
    with tempfile.TemporaryDirectory() as folder:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(f"{folder}/one", state)
            checkpointer.wait_until_finished()
            shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            again = checkpointer.restore(f"{folder}/one", shapes)
        same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), state, again)
        print("equal:", all(jax.tree.leaves(same)), type(again["params"]["w"]).__name__)
        assert all(jax.tree.leaves(same))

        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        with ocp.CheckpointManager(f"{folder}/many", options=options) as manager:
            for step in range(4):
                manager.save(step, args=ocp.args.StandardSave({"x": jnp.full(2, float(step))}))
            manager.wait_until_finished()
            print("kept", manager.all_steps())
            last = manager.restore(3, args=ocp.args.StandardRestore({"x": jnp.zeros(2)}))
        assert jnp.array_equal(last["x"], jnp.full(2, 3.0))


if __name__ == "__main__":
    main()
