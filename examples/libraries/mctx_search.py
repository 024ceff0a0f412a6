"""mctx: a Gumbel MuZero search that finds the shortest way on a ring, for a batch of starts."""

import jax
import jax.numpy as jnp
import mctx

SIZE = 9


def recurrent(params, key, action, state):
    """The model: one step to the left or right, paid at place 4."""
    del params, key
    after = (state + 2 * action - 1) % SIZE
    won = after == 4
    out = mctx.RecurrentFnOutput(
        reward=jnp.where(won, 1.0, 0.0),
        discount=jnp.where(won, 0.0, 0.9),
        prior_logits=jnp.zeros((state.shape[0], 2)),
        value=jnp.zeros(state.shape[0]),
    )
    return out, after


@jax.jit
def search(key, state):
    """The policy after 64 simulations."""
    batch = state.shape[0]
    root = mctx.RootFnOutput(
        prior_logits=jnp.zeros((batch, 2)), value=jnp.zeros(batch), embedding=state
    )
    return mctx.gumbel_muzero_policy(
        (), key, root, recurrent, num_simulations=64, max_depth=8, gumbel_scale=0.5
    )


def main():
    """Search from places to both sides of the goal."""
    states = jnp.array([1, 2, 3, 5, 6, 7])
    out = search(jax.random.key(0), states)
    summary = out.search_tree.summary()
    print("actions", out.action, "values", summary.value)
    print("visits", summary.visit_counts, "weights", out.action_weights[:, 1])
    assert (out.action == (states < 4)).all()
    root = mctx.RootFnOutput(prior_logits=jnp.zeros((6, 2)), value=jnp.zeros(6), embedding=states)
    muzero = mctx.muzero_policy((), jax.random.key(1), root, recurrent, 32, temperature=0.0)
    print("by visits", muzero.action, muzero.action_weights[:, 1])


if __name__ == "__main__":
    main()
