"""pgx: games of tic-tac-toe and Othello between random players, a batch in one compiled loop."""

import jax
import jax.numpy as jnp
import pgx


def play(env, key, games):
    """The rewards of the first player, and the lengths of the games."""

    def choose(key, state):
        logits = jnp.where(state.legal_action_mask, 0.0, -jnp.inf)
        return jax.random.categorical(key, logits)

    def turn(carry):
        key, state = carry
        key, now = jax.random.split(key)
        action = jax.vmap(choose)(jax.random.split(now, games), state)
        return key, jax.vmap(env.step)(state, action)

    key, start = jax.random.split(key)
    state = jax.vmap(env.init)(jax.random.split(start, games))
    rewards = jnp.zeros((games, 2))

    def more(carry):
        return ~carry[1].terminated.all()

    def body(carry):
        *rest, rewards = carry
        key, state = turn(rest)
        return key, state, rewards + state.rewards

    _, state, rewards = jax.lax.while_loop(more, body, (key, state, rewards))
    return rewards[:, 0], state._step_count


def main():
    """Play both games."""
    for name in ("tic_tac_toe", "othello"):
        env = pgx.make(name)
        rewards, steps = jax.jit(play, static_argnums=(0, 2))(env, jax.random.PRNGKey(0), 16)
        print(name, "rewards", rewards, "steps", steps)
        assert set(rewards.tolist()) <= {-1.0, 0.0, 1.0}


if __name__ == "__main__":
    main()
