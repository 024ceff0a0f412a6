"""What users read when they make a mistake: the text of the errors, and what holds for all of them.

The programs are in `mistakes.py`, `mistakes_inside.py` and `mistakes_over_meshes.py`; their
messages are kept in `golden/errors/`, with the user's line shown as the text of that line, so that
the files read like a session and survive edits.
"""

from __future__ import annotations

import inspect
import linecache
import re
import traceback

import numpy as np
import pytest

import spmd
import spmd.numpy as jnp
from spmd import lax, pmap, vmap
from tests import mistakes, mistakes_inside, mistakes_over_meshes
from tests.mistakes import MISTAKES

PROGRAMS = [(topic, name) for topic, programs in MISTAKES.items() for name in programs]
PLACE = re.compile(r"(?P<file>\S+mistakes\w*\.py):(?P<line>\d+) \([^)]*\)")

FILES = {mistakes.__file__, mistakes_inside.__file__, mistakes_over_meshes.__file__}

# Python's own questions to an array get Python's own words.
PLAIN = {"iteration over a scalar": TypeError, "bool of many": ValueError}


def make(topic: str, name: str) -> Exception:
    """The exception that a mistake ends in."""
    with pytest.raises(Exception) as caught:
        MISTAKES[topic][name]()
    return caught.value


def readable(text: str) -> str:
    """The message, with the text of the user's line in place of its number."""
    lines = PLACE.sub(lambda m: f"<{linecache.getline(m['file'], int(m['line'])).strip()}>", text)
    return "\n".join(f"    {line}".rstrip() for line in lines.splitlines())


# ---- the texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", MISTAKES)
def test_texts(topic, golden):
    parts = []
    for name in MISTAKES[topic]:
        error = make(topic, name)
        parts.append(f"{name}\n  {type(error).__name__}\n{readable(str(error))}\n")
    golden(f"errors/{topic}.txt", "\n".join(parts))


# What JAX's page of errors explains class by class is a class here too, under the same name.
JAX_PAGES = {
    "ConcretizationTypeError": ("tracing", "float of a traced value"),
    "KeyReuseError": ("arguments", "random key used twice"),
    "NonConcreteBooleanIndexError": ("tracing", "boolean mask under jit"),
    "TracerArrayConversionError": ("tracing", "numpy function of a traced value"),
    "TracerBoolConversionError": ("tracing", "if on a traced value"),
    "TracerIntegerConversionError": ("tracing", "range of a traced value"),
    "UnexpectedTracerError": ("tracing", "value kept in a global"),
}

# Complaints about JAX's messages, and what each asked for: words that the message must have.
COMPLAINTS = {
    9928: (("maps", "vmap with too few in axes"), ["in_axes=(0, 0)", "(params, state, image)"]),
    3120: (("axes", "collective under a map without a name"), ["axis name 'i'", "axis_name='i'"]),
    13137: (
        ("maps", "pmap over more devices than there are"),
        ["needs 8 devices, but there are 4", "SPMD_NUM_CPU_DEVICES=8", "spmdrun -n 8"],
    ),
    13214: (("maps", "pmap in axes with a list for a tuple"), ["in_axes[0]", "pair"]),
    5201: (
        ("maps", "vmap in axes with another structure"),
        ["in_axes[0] has keys 'w', but params has keys 'b', 'w'"],
    ),
    4563: (
        ("maps", "vmap over a scalar"),
        ["argument rate, which has no dims", "Give in_axes=None"],
    ),
}


@pytest.mark.parametrize("name", JAX_PAGES)
def test_classes_of_jax_s_error_pages(name):
    error = make(*JAX_PAGES[name])
    assert type(error) is getattr(spmd.errors, name)
    theirs = getattr(pytest.importorskip("jax").errors, name)
    builtin = [kind for kind in theirs.__mro__ if kind.__module__ == "builtins"]
    # A program that catches the built-in exception of JAX's class catches ours.
    assert isinstance(error, builtin[0])


@pytest.mark.parametrize("number", COMPLAINTS)
def test_complaints_about_jax_s_messages_are_answered(number):
    program, words = COMPLAINTS[number]
    text = readable(str(make(*program)))
    assert all(word in text for word in words), text
    assert len(text.splitlines()) <= 6 and "PyTree" not in text and "pytree" not in text


@pytest.mark.parametrize("mapped", [vmap, pmap])
def test_a_list_of_in_axes_is_a_tuple(mapped):
    add = lambda x, y: x + y  # noqa: E731
    out = mapped(add, in_axes=[0, None])(jnp.arange(4.0), 1.0)
    np.testing.assert_array_equal(out, np.arange(4.0) + 1)


# ---- what holds for all of them ----------------------------------------------------------------


@pytest.mark.parametrize(("topic", "name"), PROGRAMS, ids=lambda x: x.replace(" ", "-"))
def test_error_is_ours_and_names_the_user_s_line(topic, name):
    error = make(topic, name)
    if name in PLAIN:
        assert type(error) is PLAIN[name]
        return
    assert isinstance(error, spmd.errors.SpmdError), f"{type(error).__name__}: {error}"
    source, start = inspect.getsourcelines(MISTAKES[topic][name])
    places = [(m["file"], int(m["line"])) for m in PLACE.finditer(str(error))]
    inside = [line for _, line in places if start <= line < start + len(source)]
    helper = {frame.lineno for frame in traceback.extract_tb(error.__traceback__)
              if frame.filename in FILES}  # fmt: skip
    assert inside or helper & {line for _, line in places}, f"no line of the program in: {error}"
    assert "spmd/core/" not in str(error) and "site-packages" not in str(error)
    assert "spmd/base/" not in str(error)


def test_errors_are_caught_by_their_python_names():
    for program, kind in [
        (mistakes_inside.add_of_shapes_that_do_not_broadcast, (TypeError, ValueError)),
        (mistakes_inside.float_operation_on_an_integer, TypeError),
        (mistakes.collective_outside_any_map, NameError),
        (mistakes.pmap_over_more_devices_than_there_are, (RuntimeError, ValueError)),
        (mistakes_inside.index_with_too_many_indices, IndexError),
        (mistakes_inside.assignment_in_place, TypeError),
        (mistakes_inside.if_on_a_traced_value, TypeError),
        (mistakes.vmap_over_sizes_that_differ, ValueError),
        (mistakes.donated_array_used_again, RuntimeError),
    ]:
        for one in kind if isinstance(kind, tuple) else (kind,):
            with pytest.raises(one):
                program()


def test_a_quoted_error_names_its_line_once():
    message = str(make("maps", "vmap in axes with another structure"))
    assert len(PLACE.findall(message)) == 1


def test_many_offending_arguments_are_counted_not_listed():
    many = {f"w{k}": jnp.ones(3) for k in range(9)}
    with pytest.raises(ValueError) as caught:
        vmap(lambda params, x: x)(many, jnp.ones(4))
    message = str(caught.value)
    assert "params['w0'] has shape (3,)" in message and "x has shape (4,)" in message
    assert "and 4 more of size 3" in message and "params['w8']" not in message


# ---- what is no mistake ------------------------------------------------------------------------


def test_lists_are_as_good_as_tuples():
    x = jnp.arange(4.0)
    for mapped in (vmap, pmap):
        found = mapped(lambda pair, y: pair[0] + y, in_axes=[[0, None], None])([x, 1.0], 2.0)
        np.testing.assert_array_equal(found, np.arange(4) + 2)
        one, two = mapped(lambda x: (x, 2 * x), out_axes=[0, 0])(x)
        np.testing.assert_array_equal(two, 2 * np.asarray(one))


def test_one_key_may_be_used_twice():
    key = spmd.random.key(0)
    np.testing.assert_array_equal(spmd.random.bits(key), spmd.random.bits(key))


def test_python_numbers_adapt_to_what_a_loop_returns():
    total, sums = lax.scan(lambda c, x: (c + x, c), 0, jnp.ones(3))
    assert total.dtype == sums.dtype == np.float32 and float(total) == 3
    assert float(lax.fori_loop(0, 10, lambda i, total: total + i / 2, 0)) == 22.5
    i, _ = lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 0.5, c[1]), (0, jnp.ones(3)))
    assert i.dtype == np.float32


def test_a_mistake_leaves_no_state_behind():
    """After an error inside nested transformations, the next program starts afresh."""
    for topic, name in PROGRAMS:
        if topic in ("axes", "tracing", "control"):
            make(topic, name)
    x = jnp.arange(4.0)
    np.testing.assert_array_equal(x + 1, np.arange(4.0) + 1)
    np.testing.assert_allclose(pmap(lambda x: x / lax.psum(x, "i"), "i")(x), np.arange(4) / 6)


def test_a_loop_s_index_is_a_python_number():
    """Beside a small dtype it makes no larger one, so that the carry keeps its dtype."""
    for bounds in [(0, 5), (np.int32(0), np.int32(5))]:
        total = lax.fori_loop(*bounds, lambda i, x: x + i, jnp.int8(0))
        assert (int(total), total.dtype) == (10, np.int8)
    up_to = spmd.jit(lambda n: lax.fori_loop(0, n, lambda i, x: x + i, jnp.int8(0)))
    assert (int(up_to(5)), up_to(5).dtype) == (10, np.int8)
