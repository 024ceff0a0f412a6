"""Settings that forbid: tracing, transfers, raw keys; and the default device."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import errors, lax
from spmd import numpy as snp


def test_nothing_is_traced_where_it_must_not():
    f = spmd.jit(lambda x: x + 1)
    f(1.0)
    with spmd.no_tracing():
        assert f(2.0) == 3
        with pytest.raises(RuntimeError, match="would be traced, and no_tracing is set"):
            f(np.ones(2))
        with spmd.no_tracing(False):
            f(np.ones(2))
        f(np.ones(2))


def test_arrays_without_a_device_are_on_the_default_one():
    one = spmd.devices()[1]
    with spmd.default_device(one):
        assert snp.ones(2).devices() == {one}
    with spmd.default_device("cpu"):
        assert snp.ones(2).devices() == {spmd.devices()[0]}
    assert snp.ones(2).devices() == {spmd.devices()[0]}


def test_host_arrays_are_no_operands_under_a_guard(capsys):
    x, host = snp.ones(3), np.ones(3, np.float32)
    with spmd.transfer_guard("disallow"):
        for use in (lambda: x + host, lambda: snp.dot(x, host)):
            with pytest.raises(errors.DeviceError, match=r"Disallowed host-to-device.*device_put"):
                use()
        assert float((x + spmd.device_put(host)).sum()) == 6
        assert spmd.config.jax_transfer_guard == "disallow"
    with spmd.transfer_guard_host_to_device("log"):
        snp.add(x, host)
    assert "host-to-device transfer" in capsys.readouterr().err
    assert float((x + host).sum()) == 6
    with pytest.raises(errors.ArgumentError, match="must be one of allow"):
        spmd.transfer_guard_device_to_host("never").__enter__()


LEVELS = ("allow", "log", "disallow", "log_explicit", "disallow_explicit")


def spoken_of(capsys, guard, level, call):
    """ "error", "told" or "" for a call under a guard, and that a second call says the same."""
    found = []
    for _ in range(2):
        try:
            with guard(level):
                call()
            found.append("told" if "transfer: " in capsys.readouterr().err else "")
        except errors.DeviceError as error:
            assert "Disallowed" in str(error) and "test_guards.py" in str(error)
            found.append("error")
    assert found[0] == found[1]
    return found[0]


def moves():
    """Calls that move: what each moves, whether it says so, what a guard's text must name."""
    one, two = spmd.devices()[:2]
    host = np.ones(4, np.float32)
    x, mesh = snp.ones(4), spmd.make_mesh((2,), ("i",))
    layout = spmd.NamedSharding(mesh, spmd.P("i"))
    there, split = spmd.device_put(x, two), spmd.device_put(x, layout)
    f, g = spmd.jit(lambda a: a + 1), spmd.jit(lambda a, b: a + b)
    return {
        "array of NumPy": ("host", False, lambda: f(host)),
        "scalar of NumPy": ("host", False, lambda: f(np.float32(1))),
        "number": ("host", False, lambda: f(1.0)),
        "leaf of a tree": ("host", False, lambda: spmd.jit(lambda t: t["k"] + 1)({"k": host})),
        "put of NumPy": ("host", True, lambda: spmd.device_put(host)),
        "put of NumPy there": ("host", True, lambda: spmd.device_put(host, two)),
        "put there": ("device", True, lambda: spmd.device_put(x, two)),
        "put over a mesh": ("device", True, lambda: spmd.device_put(x, layout)),
        "put back": ("", True, lambda: spmd.device_put(split, one)),
        "beside another": ("device", False, lambda: g(x, there)),
        "beside a mesh": ("device", False, lambda: g(x, split)),
        "in_shardings": (
            "device",
            False,
            lambda: spmd.jit(lambda a: a + 1, in_shardings=layout)(x),
        ),
        "none": ("", False, lambda: f(x)),
        "none there": ("", False, lambda: f(there)),
        "none split": ("", False, lambda: f(split)),
        "put where it is": ("", True, lambda: spmd.device_put(split, layout)),
    }


@pytest.mark.parametrize("name", moves())
def test_moves_are_told_of_as_the_guard_says(name, capsys):
    of, explicit, call = moves()[name]
    call()  # closures of calls don't let a move pass
    for direction in ("host", "device"):
        guard = getattr(spmd, f"transfer_guard_{direction}_to_device")
        for level in LEVELS:
            is_told_of = of == direction and (level.endswith("_explicit") or not explicit)
            kind = {"log": "told", "disallow": "error"}.get(level.partition("_")[0], "")
            wanted = kind if is_told_of else ""
            assert spoken_of(capsys, guard, level, call) == wanted, (direction, level)
    call()


CREATIONS = {
    "zeros": lambda: snp.zeros(3),
    "ones": lambda: snp.ones(3),
    "empty": lambda: snp.empty(3),
    "full": lambda: snp.full(3, 2.0),
    "zeros_like": lambda: snp.zeros_like(X),
    "ones_like": lambda: snp.ones_like(X),
    "full_like": lambda: snp.full_like(X, 2),
    "array": lambda: snp.array([1, 2]),
    "array of NumPy": lambda: snp.array(np.ones(2)),
    "asarray": lambda: snp.asarray(1.0),
    "float32": lambda: snp.float32(1),
}
X = np.ones(3, np.float32)


@pytest.mark.parametrize("name", CREATIONS)
def test_new_arrays_are_told_of(name, capsys):
    for level in LEVELS:
        wanted = {"log": "told", "disallow": "error"}.get(level.partition("_")[0], "")
        guard = spmd.transfer_guard_host_to_device
        assert spoken_of(capsys, guard, level, CREATIONS[name]) == wanted, level
    assert (
        spoken_of(capsys, spmd.transfer_guard_device_to_device, "disallow", CREATIONS[name]) == ""
    )


def test_what_spmd_makes_for_itself_is_not_told_of():
    x = snp.arange(4.0)
    with spmd.transfer_guard("disallow"):
        for free in (
            lambda: snp.asarray(x),
            lambda: snp.arange(3),
            lambda: snp.stack([x, x]),
            lambda: snp.reshape(x, (2, 2)),
            lambda: snp.sum(x) + snp.max(x),
            lambda: lax.cumsum(x),
            lambda: spmd.vmap(lambda a: a)(x),
        ):
            free()


def test_a_guard_names_the_argument():
    f = spmd.jit(lambda first, second: first + second["k"])
    x, host = snp.ones(3), np.ones(3, np.float32)
    with spmd.transfer_guard("disallow"):
        with pytest.raises(errors.DeviceError, match=r"argument second\['k'\] \(f32\[3\]\)"):
            f(x, {"k": host})
        assert float(f(x, {"k": x}).sum()) == 6


def test_raw_keys_can_be_found():
    raw = spmd.random.PRNGKey(0)
    with spmd.legacy_prng_key("error"):
        with pytest.raises(errors.ArgumentError, match=r"random\.normal: a raw key"):
            spmd.random.normal(raw)
        spmd.random.normal(spmd.random.key(0))
    with spmd.legacy_prng_key("warn"), pytest.warns(UserWarning, match="a raw key"):
        spmd.random.normal(raw)
    with pytest.raises(errors.ArgumentError, match="'dice'"), spmd.default_prng_impl("dice"):
        pass


def test_the_structure_of_what_cannot_be_hashed_has_a_hash():
    class Box:
        def __init__(self, x, table):
            self.x, self.table = x, table

    spmd.tree_util.register_pytree_node(Box, lambda b: ((b.x,), b.table), lambda t, c: Box(c[0], t))
    a, b = (spmd.tree.structure(Box(1, {"k": k})) for k in (1, 1))
    assert a == b and hash(a) == hash(b)
    assert str(a) == "PyTreeDef(CustomNode(Box[{'k': 1}], [*]))"
    assert spmd.jit(lambda b: b.x + b.table["k"])(Box(2, {"k": 5})) == 7
