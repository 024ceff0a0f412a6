"""`jax._src.state` and its module `types`: the aval of mutable arrays."""

__path__: list[str] = []


class AbstractRef:
    """No aval is one."""
