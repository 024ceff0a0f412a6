"""Pictures of shardings: which device holds which part of an array, as a table of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.context import state
from spmd.base.device import default_device
from spmd.base.errors import ArgumentError
from spmd.base.record import record
from spmd.base.source import current_source
from spmd.base.tree import tree_leaves
from spmd.core.trace import Tracer
from spmd.lax.callback import debug_callback, here
from spmd.sharding.array import Array
from spmd.sharding.constraint import inspect_sharding_p
from spmd.sharding.named import SingleDeviceSharding


def sharding_table(shape: Sequence[int], sharding: Any) -> str:
    """A table with a cell for each part of a 1-D or 2-D array, naming the devices that hold it."""
    if len(shape) not in (1, 2):
        raise ArgumentError(
            f"{current_source()}: visualize_sharding draws arrays of 1 or 2 dims, got {len(shape)}"
        )
    cells: dict[tuple[int, int], list[Any]] = {}
    whole = (*(1 for _ in range(2 - len(shape))), *shape)
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        index = (*(slice(None) for _ in range(2 - len(shape))), *index)
        starts = [s.indices(n)[0] for s, n in zip(index, whole, strict=True)]
        cells.setdefault((starts[0], starts[1]), []).append(device)
    rows = sorted({r for r, _ in cells})
    columns = sorted({c for _, c in cells})
    texts = [[_label(cells.get((r, c), [])) for c in columns] for r in rows]
    width = max(len(t) for row in texts for t in row) + 2
    bars = ["─" * width] * len(columns)
    lines = ["┌" + "┬".join(bars) + "┐"]
    for k, row in enumerate(texts):
        if k:
            lines.append("├" + "┼".join(bars) + "┤")
        lines.append("│" + "│".join(t.center(width) for t in row) + "│")
    lines.append("└" + "┴".join(bars) + "┘")
    return "\n".join(lines)


def _label(devices: Sequence[Any]) -> str:
    """Devices by platform and number: `CPU 0,1`."""
    if not devices:
        return ""
    return f"{devices[0].platform.upper()} {','.join(str(d.id) for d in devices)}"


def visualize_sharding(
    shape: Sequence[int],
    sharding: Any,
    *,
    use_color: bool = True,
    scale: float = 1.0,
    min_width: int = 9,
    max_width: int = 80,
    color_map: Any = None,
) -> None:
    """Print which device holds which part of an array of this shape, of 1 or 2 dims.

    The other parameters are those of JAX's coloured boxes; the table here is plain text, and as
    large as its words. Raises `ArgumentError` for an array of other dims.

    >>> import spmd
    >>> mesh = spmd.make_mesh((2, 2), ("a", "b"))
    >>> spmd.debug.visualize_sharding((4, 4), spmd.NamedSharding(mesh, spmd.P("b", "a")))
    ┌───────┬───────┐
    │ CPU 0 │ CPU 2 │
    ├───────┼───────┤
    │ CPU 1 │ CPU 3 │
    └───────┴───────┘
    """
    print(sharding_table(shape, sharding))


def visualize_array_sharding(arr: Any, **kwargs: Any) -> None:
    """Print which device holds which part of an array of 1 or 2 dims.

    The keyword arguments are those of `visualize_sharding`.

    >>> import spmd, spmd.numpy as snp
    >>> mesh = spmd.make_mesh((4,), ("a",))
    >>> x = spmd.device_put(snp.arange(8), spmd.NamedSharding(mesh, spmd.P("a")))
    >>> spmd.debug.visualize_array_sharding(x)
    ┌───────┬───────┬───────┬───────┐
    │ CPU 0 │ CPU 1 │ CPU 2 │ CPU 3 │
    └───────┴───────┴───────┴───────┘
    """
    inspect_array_sharding(
        arr, callback=lambda sharding: visualize_sharding(arr.shape, sharding, **kwargs)
    )


def inspect_array_sharding(value: Any, *, callback: Callable[[Any], None]) -> None:
    """Call `callback` with the sharding of an array, or of each array of a pytree.

    In a traced function it is called when the program is compiled, with the layout that the value
    has there; under `vmap` with that of all examples together. In the per-device code of `pmap`
    and `shard_map` a value is the shard of one device; there the call comes when the program runs,
    for each device with its own.

    >>> import spmd, spmd.numpy as snp
    >>> seen = []
    >>> spmd.debug.inspect_array_sharding(snp.ones(2), callback=seen.append)
    >>> len(seen[0].device_set)
    1
    """
    for leaf in tree_leaves(value):
        if isinstance(leaf, Array):
            callback(leaf.sharding)
        elif not isinstance(leaf, Tracer):
            raise ArgumentError(
                f"{current_source()}: inspect_array_sharding needs arrays, got {leaf!r}"
            )
        elif all(frame.kind == "vmap" for frame in state.axes):
            inspect_sharding_p.bind(leaf, callback=callback)
        else:
            debug_callback(_OfDevice(callback), leaf)


@record
class _OfDevice:
    """Calls back with the sharding of a shard; equal for equal callbacks."""

    callback: Callable[[Any], None]

    def __call__(self, shard: Any) -> None:
        device = here().device
        self.callback(SingleDeviceSharding(default_device() if device is None else device))
