"""Programs of single operations for eager calls, whose code does not depend on the sizes.

The one idea: no call waits for a compiler because an array has a new shape, and no value changes
because a call came again. An operation whose rounding is ours (a float function, a sum, a
product) runs, from its first call on, the code that serves all sizes: a kernel of one block of
elements (the same code that `jit` renders, so the same bits), reductions and matrix products with
run-time sizes. Such a program takes no compiling once its code is loaded, about 0.1 ms of encoding.

Operations without such code run their primitive's `impl`: complex numbers, 16-bit sums, sums over
dims that do not lie side by side, products that must be repacked or converted, running sums.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from spmd.base.record import replace
from spmd.compile.cpu.assemble.assemble import cpu_target
from spmd.compile.cpu.assemble.generic_kernels_ir import (
    BLOCK,
    ELEMENTS,
    blocks_text,
    columns_text,
    rows_text,
)
from spmd.compile.cpu.codegen.kernel import render
from spmd.compile.cpu.matmul.plan import plan_product, product_step
from spmd.compile.executable.backend import constant
from spmd.compile.executable.executable import Executable
from spmd.compile.expressions.scalar_ops import ENTRIES, can_lower, storage_dtype
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.matmul import store_epilogue
from spmd.compile.lower.lowering import ALIASES
from spmd.compile.lower.matmul import view_product
from spmd.compile.native.cpython import entry_layout, entry_point
from spmd.compile.native.cpython.object_layout import object_layout
from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.program.frames import Frames
from spmd.compile.native.program.steps import KernelStep, Program, Slot
from spmd.compile.native.runtime.allocator import SMALL_BYTES, alloc
from spmd.compile.native.runtime.run import build_program
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Literal, Var

# The place of each variable's elements.
Place = Callable[[Atom], Slot]

_REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
}
# The estimated time to process one vector of elements.
_NS_PER_VECTOR = 1.0


# ---- one operation -----------------------------------------------------------------------------


def step_of(eqn: Eqn, place: Place) -> KernelStep | None:
    """The step of an equation, or None if there is no code for it that serves all sizes."""
    if not all(a.aval.size for a in (*eqn.invars, *eqn.outvars)):
        return None
    name = eqn.prim.name
    if name in ENTRIES:
        return _elementwise(eqn, place)
    if name in _REDUCTIONS:
        return _reduction(eqn, place)
    return _product(eqn, place) if name == "dot_general" else None


def _elementwise(eqn: Eqn, place: Place) -> KernelStep | None:
    if not can_lower(eqn):
        return None
    (out,) = eqn.outvars
    given = tuple((storage_dtype(a.aval.dtype) or "", not a.aval.shape) for a in eqn.invars)
    if not out.aval.shape:
        given = tuple((dtype, False) for dtype, _ in given)
    params = tuple(sorted((k, v) for k, v in eqn.params.items() if not k.startswith("_")))
    address, cost = _block_kernel(eqn.prim.name, given, params, storage_dtype(out.aval.dtype) or "")
    atoms = (*eqn.invars, out)
    single = [*(is_single for _, is_single in given), False]
    widths = [0 if s else a.aval.dtype.itemsize for a, s in zip(atoms, single, strict=True)]
    return KernelStep(
        blocks_code(),
        tuple(map(place, atoms)),
        -(-out.aval.size // BLOCK),
        cost,
        sizes=(address, out.aval.size, len(atoms), *widths),
        name=eqn.prim.name,
    )


@cache
def _block_kernel(
    name: str, given: tuple[tuple[str, bool], ...], params: tuple[Any, ...], out: str
) -> tuple[int, float]:
    """The kernel of one block of elements, and its time in nanoseconds.

    `given` has the dtype of each operand, and whether it is one element for all.
    """
    b = Builder((), (BLOCK,))
    args = [b.arg(dtype, 1 if is_single else BLOCK) for dtype, is_single in given]
    target = b.arg(out, BLOCK, "out")
    with b.row():
        values = [
            b.load(arg, (0,) if is_single else (1,))
            for arg, (_, is_single) in zip(args, given, strict=True)
        ]
        b.store(target, (1,), ENTRIES[name](b, values, dict(params), out))
    rendered = render(b.build(), cpu_target())
    assert rendered.units == 1
    return compile_texts([rendered.text])[rendered.symbol], rendered.cost_ns


@cache
def blocks_code() -> int:
    """The address of the walk over blocks of elements."""
    return compile_texts([blocks_text()], optimize=True)["spmd_blocks"]


def _reduction(eqn: Eqn, place: Place) -> KernelStep | None:
    (x,), (out,) = eqn.invars, eqn.outvars
    dtype = storage_dtype(x.aval.dtype) or ""
    cut = matrices(x.aval.shape, eqn.params["axes"])
    if dtype not in ELEMENTS or out.aval.dtype != x.aval.dtype or cut is None:
        return None
    count, rows, columns = cut
    vectors = -(-rows * columns // ELEMENTS[dtype][2])
    return KernelStep(
        reducer_code(_REDUCTIONS[eqn.prim.name], dtype, columns == 1),
        (place(x), place(out)),
        count,
        5.0 + _NS_PER_VECTOR * vectors,
        sizes=(rows, columns),
        name=eqn.prim.name,
    )


def matrices(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, int, int] | None:
    """A shape as (matrices, rows, columns) of which the rows are combined, if it is that."""
    kept = [d for d in range(len(shape)) if shape[d] > 1]
    inside = [k for k, d in enumerate(kept) if d in axes]
    if not inside:
        return math.prod(shape), 1, 1
    first, last = inside[0], inside[-1] + 1
    if last - first != len(inside):
        return None
    sizes = [shape[d] for d in kept]
    return math.prod(sizes[:first]), math.prod(sizes[first:last]), math.prod(sizes[last:])


@cache
def reducer_code(op: str, dtype: str, along_rows: bool) -> int:
    """The address of a reduction of matrices to rows, or to columns, in `ELEMENTS`' dtypes."""
    name = f"spmd_{'rows' if along_rows else 'columns'}_{op}_{dtype}"
    text = (rows_text if along_rows else columns_text)(name, op, dtype)
    return compile_texts([text], optimize=True)[name]


def _product(eqn: Eqn, place: Place) -> KernelStep | None:
    view = view_product(eqn)
    if view is None or any(side.layout.order is not None for side in view.sides):
        return None
    made, result = view.product, view.result
    epilogue = store_epilogue(
        made.batch, made.m, made.n, made.carried, result.dtype, result.strides
    )
    plan = plan_product(replace(made, epilogue=epilogue))
    if plan.epilogues:
        return None
    addresses = compile_texts(plan.texts, optimize=True)
    return product_step(plan, addresses, [*map(place, eqn.invars), place(eqn.outvars[0])])


# ---- programs ----------------------------------------------------------------------------------


class SizeGenericExecutable(Executable):
    """A program of such steps; `entry_point` is the function that runs it, where there is one.

    `entry_point(*arrays)` gives the result, a tuple of results, or `MISS` for other arguments.
    """

    def __init__(self, closed: ClosedJaxpr, steps: _Steps):
        self._closed = weakref.ref(closed)
        self.in_avals = tuple(closed.in_avals)
        self.out_avals = tuple(closed.out_avals)
        self.donated = (False,) * len(self.in_avals)
        self.frames = Frames((steps.arena,), ((0,),) * len(self.out_avals))
        self.takes = {}
        self.results = (None,) * len(self.out_avals)
        self._consts = steps.consts
        self.native = build_program(steps.program())
        self.prepare(closed.jaxpr.name)
        self.entry_point = self._open()

    def _open(self) -> Callable[..., Any] | None:
        (aval,) = self.out_avals
        if object_layout() is None or aval.nbytes > SMALL_BYTES or not self.native.is_alone:
            return None
        arena = alloc(self.frames.arenas[0])
        given = [
            entry_point.Operand(entry_layout.ARRAY, 1 + k, a) for k, a in enumerate(self.in_avals)
        ]
        last = 1 + len(given)
        results = entry_point.Results(
            [entry_point.Result(last, entry_layout.OF_SLAB, aval)], slab=aval.nbytes, slab_word=last
        )
        template = [arena.address, *[0] * last, *self.const_pointers[0]]
        return entry_point.make_entry_point(
            self.native, template, given, (), results, (arena, self._consts)
        )


class _Steps:
    """Collects the steps of a jaxpr. Frames hold the arena, inputs, the output, constants."""

    def __init__(self, closed: ClosedJaxpr):
        self.closed = closed
        self.steps: list[KernelStep] = []
        self.arena = 0
        self.consts: list[Any] = []
        self.slots: dict[Var, Slot] = {}
        jaxpr = closed.jaxpr
        for k, v in enumerate(jaxpr.invars):
            self.slots[v] = Slot(1 + k)
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            self.slots[var] = self.const(value, var)

    def const(self, value: Any, atom: Atom) -> Slot:
        self.consts.append([constant(value, atom.aval)])
        return Slot(len(self.closed.in_avals) + len(self.closed.out_avals) + len(self.consts))

    def place(self, atom: Atom) -> Slot:
        """The place of a value; a new one if it is not there yet."""
        if isinstance(atom, Literal):
            return self.const(atom.val, atom)
        slot = self.slots.get(atom)
        if slot is None:
            slot = self.slots[atom] = Slot(0, self.arena)
            self.arena += (atom.aval.nbytes + 63) // 64 * 64
        return slot

    def program(self) -> Program:
        avals = (*self.closed.in_avals, *self.closed.out_avals)
        sizes = [a.nbytes for a in avals] + [c.nbytes for (c,) in self.consts]
        return Program((self.arena, *sizes), tuple(self.steps))


def program_of(closed: ClosedJaxpr) -> SizeGenericExecutable | None:
    """The program of a jaxpr with one result, if all its equations have such code."""
    jaxpr = closed.jaxpr
    steps = _Steps(closed)
    if len(jaxpr.outvars) != 1 or not isinstance(jaxpr.outvars[0], Var):
        return None
    # The result, under all names that it has, is written where it is wanted.
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    wanted = jaxpr.outvars[0]
    names = [wanted]
    while wanted in made_by and _is_alias(made_by[wanted]):
        wanted = made_by[wanted].invars[0]
        if not isinstance(wanted, Var):
            return None
        names.append(wanted)
    if wanted not in made_by:
        return None
    steps.slots.update(dict.fromkeys(names, Slot(1 + len(jaxpr.invars))))
    for eqn in jaxpr.eqns:
        if _is_alias(eqn):
            steps.slots[eqn.outvars[0]] = steps.place(eqn.invars[0])
            continue
        step = step_of(eqn, steps.place)
        if step is None:
            return None
        steps.steps.append(step)
    return SizeGenericExecutable(closed, steps)


def _is_alias(eqn: Eqn) -> bool:
    """Whether a result is an operand's bytes under another shape."""
    (x, *rest), (out, *_) = eqn.invars, eqn.outvars
    if rest or x.aval.dtype != out.aval.dtype or x.aval.size != out.aval.size:
        return False
    name = eqn.prim.name
    return name in ALIASES or name in ("broadcast_in_dim", "convert_element_type")
