"""Entry points: a program as a built-in function of its operands, the cheapest call there is.

An entry point is made once for a program and a kind of call: which words of the frames are
constant, how each operand is given (an address, a buffer, a number, an array), and how the results
are made.

Its call returns the results, or raises; or it returns `MISS` if an operand was not what it should
be, and nothing ran. Only Pythons whose objects are known (`object_layout`) have entry points.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from spmd.base.tree import LEAF, TreeDef
from spmd.base.util import MISS
from spmd.compile.lazy import entry_point_ir
from spmd.compile.native.cpython.builtin_function import keep_for_ever, make_builtin, make_method
from spmd.compile.native.cpython.entry_layout import (
    BOOL,
    BUFFER,
    F32,
    F64,
    I32,
    I64,
    OPERANDS,
    tree_words,
)
from spmd.compile.native.cpython.object_layout import object_layout
from spmd.compile.native.cpython.tree_walks import expect_walks
from spmd.compile.native.llvm.compiler import Written, compile_written
from spmd.compile.native.runtime.allocator import Block, SizeClass, alloc_of, give_back
from spmd.compile.native.runtime.run import NativeProgram
from spmd.sharding.array import Array

# The kind of an operand that is a Python number, by the dtype of the element it becomes.
NUMBERS = {"float32": F32, "float64": F64, "int32": I32, "int64": I64, "bool": BOOL}


class Operand(NamedTuple):
    """How an operand is given, and the word of the frames that gets its address.

    `expected` is the aval of an array, or the type of a number if it matters.
    """

    kind: int
    word: int
    expected: Any = None


class Result(NamedTuple):
    """One result: the word with its address, whose memory it is, its aval and its sharding."""

    word: int
    owner: int
    aval: Any
    sharding: Any = None


class Results(NamedTuple):
    """The results of an entry point; `slab` bytes hold small ones, word `slab_word` their address.

    `out`: the tree of the results, a leaf each. `given`: the tree of the positional arguments and
    that of the keyword arguments, for an entry point that is called with a tuple and a dict of
    them; None for one that is called with the operands one by one. `blocks`: the size classes of
    blocks that it makes, which may own results (`of_block`), and the words that get their
    addresses.
    """

    made: Sequence[Result]
    out: TreeDef = LEAF
    given: tuple[TreeDef, TreeDef] | None = None
    slab: int = 0
    slab_word: int = 0
    blocks: Sequence[tuple[SizeClass, int]] = ()


@cache
def entry_point_code() -> int:
    """The code that all entry points share."""
    expect_walks()
    layout = object_layout()
    assert layout is not None
    found = compile_written(
        Written(f"entry point {layout}", lambda: entry_point_ir.entry_point_source(layout))
    )
    words = [keep_for_ever(x) for x in (alloc_of, give_back, Block, None)]
    setup = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(found["spmd_block_setup"])
    setup((ctypes.c_int64 * len(words))(*words))
    Block.__del__ = make_method(Block, "__del__", found["spmd_block_del"])
    return found["spmd_entry_point"]


def make_entry_point(
    program: NativeProgram,
    template: Sequence[int],
    operands: Sequence[tuple[int, int] | Operand],
    offsets: Sequence[tuple[int, int, int]],
    results: Results,
    kept: Sequence[Any] = (),
) -> Callable[..., Any]:
    """The function that runs a program for one kind of call.

    `template` has all words of the frames (device after device, one per base); `operands` says
    for each positional argument how it is given. Then for each `(word, origin, nbytes)` of
    `offsets` a word becomes `nbytes` more than another. The function keeps alive what it is given,
    and `kept`.
    """
    given = [Operand(*operand) for operand in operands]
    made = results.made
    words = [o.word for o in given] + [w for word, origin, _ in offsets for w in (word, origin)]
    words += [r.word for r in made] + [word for _, word in results.blocks]
    if len(template) != program.frame_words:
        raise ValueError(f"{len(template)} words for frames of {program.frame_words}")
    if any(not 0 <= word < len(template) for word in words):
        raise ValueError(f"frames of {len(template)} words do not have all of {words}")
    if results.out.num_leaves != len(made):
        raise ValueError(f"{len(made)} results are no {results.out}")
    if results.given and sum(t.num_leaves for t in results.given) != len(given):
        raise ValueError(f"{len(given)} operands are not the leaves of {results.given}")
    if object_layout() is None:
        raise ValueError("the layout of arrays is not known, so an entry point cannot read them")
    fixed = np.array(template, np.int64)
    fail = program.fail  # one bound method, kept
    kept_trees: list[Any] = []
    into = [word for tree in results.given or () for word in tree_words(tree, kept_trees)]
    out = tree_words(results.out, kept_trees)
    sizes = 3 * (len(given) + len(offsets)) + 4 * len(made) + 2 * len(results.blocks)
    behind = 8 * (OPERANDS + sizes)
    numbers = [
        program.header_address,
        len(given),
        program.frame_words,
        int(not program.keeps_gil),
        fixed.__array_interface__["data"][0],
        sum(o.kind == BUFFER for o in given),
        len(offsets),
        behind if into else 0,
        behind + 8 * len(into),
        len(made),
        results.slab,
        results.slab_word,
        len(results.blocks),
        *map(id, (MISS, fail, Array, Block, None)),
    ]
    for operand in given:
        numbers += [operand.kind, operand.word, _identity(operand.expected)]
    for entry in offsets:
        numbers += entry
    for result in made:
        numbers += [result.word, result.owner, id(result.aval), id(result.sharding)]
    for home, word in results.blocks:
        numbers += [id(home), word]
    # Objects that native code knows by address only; the function holds them by its `__self__`.
    words_of_entry_point = np.array([*numbers, *into, *out], np.int64).tobytes()
    me = (words_of_entry_point, program, fixed, fail, given, results, kept_trees, kept)
    return make_builtin("spmd_entry_point", entry_point_code(), me)


def _identity(expected: Any) -> int:
    """The address of an object that operands are compared with; 0 if they are not."""
    return 0 if expected is None else id(expected)
