"""evosax: evolution strategies that minimise a function, each a compiled loop."""

import jax
import jax.numpy as jnp
from evosax.algorithms import CMA_ES, Open_ES


def rosenbrock(x):
    """Its minimum is at ones."""
    return jnp.sum(100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (1 - x[..., :-1]) ** 2, axis=-1)


def main():
    """Run two strategies."""
    start = jnp.zeros(4)
    for name, kind in (("CMA-ES", CMA_ES), ("OpenES", Open_ES)):
        strategy = kind(population_size=32, solution=start)
        params = strategy.default_params

        @jax.jit
        def run(key, strategy=strategy, params=params):
            def generation(state, key):
                ask, tell = jax.random.split(key)
                population, state = strategy.ask(ask, state, params)
                state, metrics = strategy.tell(
                    tell, population, rosenbrock(population), state, params
                )
                return state, metrics["best_fitness"]

            state = strategy.init(key, start, params)
            return jax.lax.scan(generation, state, jax.random.split(key, 150))

        state, best = run(jax.random.key(0))
        print(name, "best", best[::30], "at", state.best_solution)
        assert best[-1] < best[0] / 2


if __name__ == "__main__":
    main()
