"""rlax: Q-learning with targets from lambda returns on a chain, where only the last state pays."""

import jax
import jax.numpy as jnp
import optax
import rlax

STATES = 6


def rollout(key, table):
    """16 steps of an epsilon-greedy walk: states, actions, rewards, discounts, Q-values."""
    policy = rlax.epsilon_greedy(0.3)

    def step(state, key):
        action = policy.sample(key, table[state])
        after = jnp.clip(state + 2 * action - 1, 0, STATES - 1)
        won = after == STATES - 1
        reward, discount = jnp.where(won, 1.0, 0.0), jnp.where(won, 0.0, 0.9)
        return jnp.where(won, 0, after), (state, action, reward, discount, after)

    return jax.lax.scan(step, jnp.int32(0), jax.random.split(key, 16))[1]


def main():
    """Learn the way to the right, with Adam on a table of values."""
    optimizer = optax.adam(0.05)
    errors = jax.vmap(rlax.q_lambda, in_axes=(0, 0, 0, 0, 0, None))

    @jax.jit
    def update(table, opt, key):
        def loss(table):
            keys = jax.random.split(key, 8)
            s, a, r, d, after = jax.vmap(rollout, in_axes=(0, None))(keys, table)
            return rlax.huber_loss(errors(table[s], a, r, d, table[after], 0.8)).mean()

        value, grads = jax.value_and_grad(loss)(table)
        updates, opt = optimizer.update(grads, opt)
        return optax.apply_updates(table, updates), opt, value

    table = jnp.zeros((STATES, 2))
    opt = optimizer.init(table)
    for key in jax.random.split(jax.random.key(0), 300):
        table, opt, value = update(table, opt, key)
    print("loss", value, "values", table.max(axis=1)[:-1])
    probabilities = rlax.softmax().probs(table[:-1] / 0.05)
    gradient = jax.grad(lambda x: rlax.entropy_loss(x, jnp.ones(5)))(table[:-1])
    print("probability of right", probabilities[:, 1], "entropy", jnp.abs(gradient).sum())
    assert (table[:-1].argmax(axis=1) == 1).all()


if __name__ == "__main__":
    main()
