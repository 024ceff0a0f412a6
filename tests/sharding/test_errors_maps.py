"""The texts of the errors that users of pmap, shard_map and collectives meet most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.errors import SpmdError
from spmd.sharding import PartitionSpec as P

X = np.arange(4, dtype=np.float32)


def f(x: Any, y: Any) -> Any:
    return x * lax.psum(y, "i")


def text_of(call: Callable[[], Any]) -> str:
    """The message of the error that a call raises, after this file's name and line."""
    with pytest.raises(SpmdError) as caught:
        call()
    place, text = str(caught.value).split(": ", 1)
    assert "test_errors_maps.py:" in place, str(caught.value)
    return text


def pmap_f(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: spmd.pmap(f, axis_name="i", **options)(*args)


def mapped(body: Any, ins: Any, outs: Any, *args: Any) -> Callable[[], Any]:
    mesh = spmd.make_mesh((4,), ("i",))
    return lambda: spmd.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs)(*args)


def g(x: Any) -> Any:
    return x


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "sizes": (
        pmap_f(X, X[:3]),
        "pmap(f): mapped arguments must agree about the size of the mapped dim:\n"
        "  x has shape (4,), dim 0 is 4\n"
        "  y has shape (3,), dim 0 is 3\n"
        "Make them all 4, or give in_axes=None for those that are shared.",
    ),
    "sizes of leaves": (
        lambda: spmd.pmap(g)({"a": X, "b": [X, X[:2]]}),
        "pmap(g): mapped arguments must agree about the size of the mapped dim:\n"
        "  x['a'] has shape (4,), dim 0 is 4\n"
        "  x['b'][0] has shape (4,), dim 0 is 4\n"
        "  x['b'][1] has shape (2,), dim 0 is 2\n"
        "Make them all 4, or give in_axes=None for those that are shared.",
    ),
    "in_axes count": (
        pmap_f(X, X, in_axes=(0,)),
        "pmap(f): in_axes=(0,) has 1 entries, but the call has 2 positional arguments (x, y); "
        "give one entry for each, or one for all",
    ),
    "in_axes dim": (
        pmap_f(X, X, in_axes=(0, 1)),
        "pmap(f): in_axes asks to map dim 1 of argument y, which has 1 dims (shape (4,)). "
        "Give in_axes=None for arguments that are not mapped.",
    ),
    "in_axes of a number": (
        pmap_f(X, 3.0),
        "pmap(f): in_axes asks to map dim 0 of argument y, which has no dims. "
        "Give in_axes=None for arguments that are not mapped.",
    ),
    "in_axes kind": (
        pmap_f(X, X, in_axes=(0, "i")),
        "pmap(f): in_axes=(0, 'i') holds 'i' of type str; each entry must be an integer dim or "
        "None",
    ),
    "in_axes structure": (
        lambda: spmd.pmap(g, in_axes=({"w": 0, "b": None},))({"w": X}),
        "pmap(g): in_axes[0] has keys 'b', 'w', but x has keys 'w'; they must correspond one to "
        "one",
    ),
    "out_axes structure": (
        lambda: spmd.pmap(lambda x: (x, x), out_axes=(0, 1, 0))(X),
        "pmap(<lambda>): out_axes has 3 children, but the output has 2 children; they must "
        "correspond one to one",
    ),
    "out_axes dim": (
        lambda: spmd.pmap(g, out_axes=3)(X),
        "pmap(g): out_axes=3 for output 0, whose result has 1 dims; it must be None or an integer "
        "in [-1, 1)",
    ),
    "nothing mapped": (
        lambda: spmd.pmap(g, in_axes=None)(X),
        "pmap(g): no argument is mapped (every in_axes entry is None) and axis_size is not given; "
        "map at least one argument or pass axis_size",
    ),
    "unbound axis": (
        lambda: spmd.pmap(lambda x: lax.psum(x, "j"), axis_name="i")(X),
        "unbound axis name 'j'. Axis names in scope here: 'i'. Call this inside "
        "pmap(..., axis_name='j'), vmap(..., axis_name='j') or a shard_map over a mesh that has "
        "this axis.",
    ),
    "no axis": (
        lambda: lax.psum(X, "i"),
        "unbound axis name 'i'. Axis names in scope here: none. Call this inside "
        "pmap(..., axis_name='i'), vmap(..., axis_name='i') or a shard_map over a mesh that has "
        "this axis.",
    ),
    "axis twice": (
        lambda: spmd.pmap(spmd.pmap(g, axis_name="i"), axis_name="i")(X.reshape(2, 2)),
        "pmap(g): axis name 'i' is already in use by an enclosing map; choose another",
    ),
    "too many rows": (
        lambda: spmd.pmap(g)(np.ones(9)),
        "pmap(g) over 9 rows needs 9 devices, but there are 4. On CPU set "
        'spmd.config.update("num_cpu_devices", 9) or SPMD_NUM_CPU_DEVICES=9 for virtual devices '
        "in this process, or start more ranks: spmdrun -n 9 ...",
    ),
    "too large a mesh": (
        lambda: spmd.make_mesh((2, 4), ("x", "y")),
        "make_mesh((2, 4), ('x', 'y')) needs 8 devices, but there are 4. On CPU set "
        'spmd.config.update("num_cpu_devices", 8) or SPMD_NUM_CPU_DEVICES=8 for virtual devices '
        "in this process, or start more ranks: spmdrun -n 8 ...",
    ),
    "not an array": (
        lambda: spmd.pmap(g)({"a": [X, "abc"]}),
        "pmap(g): argument x['a'][1] is 'abc' of type str, which is not an array or number.",
    ),
    "unhashable static": (
        lambda: spmd.pmap(lambda x, c: x, static_broadcasted_argnums=1)(X, [1]),
        "pmap(<lambda>): static_broadcasted_argnums must be hashable, got {1: [1]}",
    ),
    "spec does not divide": (
        mapped(lambda p: p["w"], ({"w": P("i")},), P("i"), {"w": np.ones((7, 2))}),
        "shard_map(<lambda>): p['w'] has shape (7, 2), and P('i',) splits dim 0 "
        "(size 7) over mesh axis 'i' (size 4); 7 is not a multiple of 4.\n"
        "Pad dim 0 to 8, or leave it whole with None.",
    ),
    "spec too long": (
        mapped(g, P("i", None), P("i"), X),
        "shard_map(g): x has shape (4,) (1 dims), but P('i', None) has 2 entries; it "
        "may have at most one for each dim",
    ),
    "spec of no axis": (
        mapped(g, P("z"), P("i"), X),
        "shard_map(g): P('z',): mesh axis 'z' does not exist; the mesh has 'i'",
    ),
    "spec kind": (
        mapped(g, "i", P("i"), X),
        "shard_map(g): in_specs must hold PartitionSpecs, got 'i'",
    ),
    "output varies": (
        mapped(g, P("i"), P(), X),
        "shard_map(g): output 0 has out_spec P(), which says that it is equal along "
        "mesh axis 'i', but it varies there (its type is float32[1]{V:i}). Combine it first, e.g. "
        "lax.psum(x, 'i'), or put 'i' into the out_spec.",
    ),
    "output too small": (
        mapped(lambda x: x.sum(), P("i"), P("i"), X),
        "shard_map(<lambda>): output 0 has shape () on each device, but its out_spec "
        "P('i',) has 1 entries; it may have at most one for each dim",
    ),
    "no mesh": (
        lambda: spmd.shard_map(g, in_specs=P("i"), out_specs=P("i"))(X),
        "shard_map(g): no mesh; pass mesh= or call it inside `with mesh:`",
    ),
    "mesh names": (
        lambda: spmd.Mesh(spmd.devices()[:4], ("x", "y")),
        "Mesh: 2 axis names ('x', 'y') for a grid of 1 dims (shape (4,)); each dim needs one name",
    ),
    "permutation twice": (
        lambda: spmd.pmap(lambda x: lax.ppermute(x, "i", [(0, 1), (2, 1)]), axis_name="i")(X),
        "ppermute: perm=((0, 1), (2, 1)) names target 1 more than once; each device can send to "
        "one device and receive from one",
    ),
    "permutation range": (
        lambda: spmd.pmap(lambda x: lax.ppermute(x, "i", [(0, 4)]), axis_name="i")(X),
        "ppermute: perm=((0, 4),) names target 4, but the axis has positions 0 to 3",
    ),
    "groups": (
        lambda: spmd.pmap(
            lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1], [2]]), axis_name="i"
        )(X),
        "psum: axis_index_groups=[[0, 1], [2]] must name each of the indices 0 to 3 of the axis "
        "exactly once",
    ),
    "all_to_all size": (
        lambda: spmd.pmap(lambda x: lax.all_to_all(x, "i", 0, 0), axis_name="i")(np.ones((4, 3))),
        "all_to_all: dim split_axis=0 of the operand float32[3] has size 3; it must be equal to 4, "
        "the number of devices",
    ),
    "pmax of complex": (
        lambda: spmd.pmap(lambda x: lax.pmax(x, "i"), axis_name="i")(X.astype(np.complex64)),
        "pmax: complex numbers have no order",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_text(name: str):
    call, expected = CASES[name]
    found = text_of(call)
    assert found.startswith(expected), found


def test_donated_arguments():
    g = spmd.pmap(lambda x: x + 1, donate_argnums=0)
    x = spmd.pmap(lambda x: x)(X)
    g(x)
    assert text_of(lambda: g(x)).startswith(
        "pmap(<lambda>): argument 0 (float32[4]) was deleted or donated to an earlier call "
        "(donate_argnums)"
    )
    assert repr(x) == "Array(deleted, float32[4])"


def test_a_python_branch_on_a_traced_value_names_the_line():
    text = text_of(lambda: spmd.pmap(lambda x: 1 if x > 0 else 2)(X))
    assert text.startswith("this needs the value of a traced array as a Python bool")
    assert "where" in text and "lax.cond" in text
