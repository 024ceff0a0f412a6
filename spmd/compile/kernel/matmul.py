"""Products of matrices with an epilogue: the one kernel of the IR that is more than a loop nest.

    out = epilogue(C, ...)      C[b, i, j] = sum over k of A[b, i, k] B[b, k, j]

A loop nest could say this too, but then every backend would have to find the product in it again.
So it is a node of its own: sizes and strides of both operands, the dtype in which products are
summed, and an ordinary elementwise kernel, the *epilogue*, whose argument 0 is C. Storing a plain
result, adding a bias, rounding to bf16, permuting dims and applying an activation are the same
thing: an epilogue. C itself need never be in memory: a backend computes a block of it and runs the
epilogue on that block (`block_epilogue`) while it is in a cache, or in registers.

`check_product` is the law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.base.record import kept_hash, record, replace
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.check import KernelError, affine_range, check_kernel
from spmd.compile.kernel.dtypes import DTYPES, itemsize, kind
from spmd.compile.kernel.ir import ROW, Arg, Const, Instr, Kernel, Load, Map, Op, Store

Array = np.ndarray[Any, Any]


@record
class Operand:
    """The layout of A or B: strides in elements, any sign, 0 for a broadcast dim.

    With `panel` the columns come in panels of that many, in each of which a row lies side by side:
    the element (k, j) lies at k * row + (j - j % panel) * column + j % panel.
    """

    dtype: str
    row: int
    column: int
    batch: tuple[int, ...] = ()
    panel: int = 0

    @property
    def transposed(self) -> Operand:
        """The layout with rows and columns exchanged."""
        if self.panel:
            raise ValueError("panels of columns have no transpose")
        return replace(self, row=self.column, column=self.row)


@record
class Product:
    """A of m x k times B of k x n for each index of the batch dims, then the epilogue.

    The arguments of the step are A, B, and the epilogue's arguments without its first. Operands of
    another dtype than `carried` are converted to it before they are multiplied. With `tf32` factors
    of float32 may be rounded to TF32, to 11 significant bits.
    """

    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    carried: str  # the dtype in which products are computed and summed
    epilogue: Kernel  # outer (*batch, m), inner (n,); argument 0 is C, contiguous
    batch: tuple[int, ...] = ()
    tf32: bool = False
    # As those of kernels: steps that multiply alike have one product, which many tables have.
    _hash: int = kept_hash()

    @property
    def multiply_adds(self) -> int:
        """The work of one product of the batch."""
        return self.m * self.n * self.k

    @property
    def transposed(self) -> Product:
        """The same product read as C^T = B^T A^T."""
        flipped = replace(
            self, m=self.n, n=self.m, a=self.b.transposed, b=self.a.transposed, epilogue=NO_EPILOGUE
        )
        return replace(flipped, epilogue=_transposed_epilogue(self))


# The placeholder for the epilogue of a product that is still being put together.
NO_EPILOGUE = Kernel((), (), (), ())


def product_dtype(source: str, result: str, tiles_integers: bool = False) -> str | None:
    """The dtype in which products of `source` elements are summed; None: not as a `Product`.

    Complex numbers are loop nests like any other reduction, and so are integers, whose sums wrap,
    where there are no tiles for them.
    """
    if tiles_integers and kind(source) in "iu" and kind(result) in "iu":
        return f"{kind(result)}{max(8 * itemsize(result), 32)}"
    if kind(source) != "f" or kind(result) != "f":
        return None
    return "f64" if "f64" in (source, result) else "f32"


# ---- epilogues -------------------------------------------------------------------------------


def c_strides(batch: Sequence[int], m: int, n: int) -> tuple[int, ...]:
    """The strides of C along (*batch, m, n): it is contiguous."""
    sizes = (*batch, m, n)
    return tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))


def store_epilogue(
    batch: Sequence[int],
    m: int,
    n: int,
    carried: str,
    dtype: str,
    strides: Sequence[int],
) -> Kernel:
    """The epilogue that only stores C, as `dtype`, at strides along (*batch, m, n)."""
    b = Builder((*batch, m), (n,))
    source = b.arg(carried, math.prod((*batch, m, n)))
    size = affine_range(Map(tuple(strides)), (*batch, m, n))[1] + 1
    target = b.arg(dtype, max(size, 0), "out")
    with b.row():
        value = b.load(source, c_strides(batch, m, n))
        b.store(target, strides, b.convert(value, dtype))
    return b.build()


def plain_store(epilogue: Kernel) -> Map | None:
    """The address map of C if the epilogue only stores it as it is, else None."""
    step = epilogue.passes[0]
    if len(epilogue.args) != 2 or len(step.instrs) != 1 or len(step.stores) != 1:
        return None
    store = step.stores[0]
    return store.map if isinstance(store, Store) and store.combine is None else None


def argument_maps(epilogue: Kernel) -> tuple[Map, ...]:
    """The one map through which each argument is read and written."""
    found: dict[int, Map] = {}
    for item in (*epilogue.passes[0].instrs, *epilogue.passes[0].stores):
        if isinstance(item, Load | Store):
            found.setdefault(item.arg, item.map)
    none = Map((0,) * len(epilogue.sizes))
    return tuple(found.get(number, none) for number in range(len(epilogue.args)))


def block_epilogue(epilogue: Kernel, rows: int, columns: int, c_row: int) -> Kernel:
    """The epilogue on a block of C whose rows are `c_row` elements apart: outer (rows,).

    Its pointers are those of the block's first element, so all offsets are zero; lanes run along
    the columns, and each row is a unit of work.
    """
    maps = argument_maps(epilogue)

    def of(number: int) -> Map:
        if number == 0:
            return Map((c_row, 1))
        return Map(maps[number].strides[-2:])

    def size(number: int) -> int:
        return affine_range(of(number), (rows, columns))[1] + 1

    step = epilogue.passes[0]
    args = tuple(replace(arg, size=size(k)) for k, arg in enumerate(epilogue.args))
    instrs = tuple(replace(i, map=of(i.arg)) if isinstance(i, Load) else i for i in step.instrs)
    stores = tuple(replace(s, map=of(s.arg)) if isinstance(s, Store) else s for s in step.stores)
    passes = (replace(step, instrs=instrs, stores=stores),)
    return Kernel(args, (rows,), (columns,), passes, vector_dim=1)


def _transposed_epilogue(p: Product) -> Kernel:
    def turned(where: Map) -> Map:
        *batch, row, column = where.strides
        return replace(where, strides=(*batch, column, row))

    def moved(item: Any) -> Any:
        if not isinstance(item, Load | Store):
            return item
        if item.arg == 0:
            return replace(item, map=Map(c_strides(p.batch, p.n, p.m)))
        return replace(item, map=turned(item.map))

    step = p.epilogue.passes[0]
    instrs, stores = tuple(map(moved, step.instrs)), tuple(map(moved, step.stores))
    passes = (replace(step, instrs=instrs, stores=stores),)
    return Kernel(p.epilogue.args, (*p.batch, p.n), (p.m,), passes)


# ---- the law ---------------------------------------------------------------------------------


def check_product(p: Product) -> None:
    """Raise `KernelError` if a product is not well formed."""

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise KernelError(f"product {p.m}x{p.n}x{p.k}: {message}")

    need(min(p.m, p.n, p.k, *p.batch) >= 0, f"negative size in {(*p.batch, p.m, p.n, p.k)}")
    for name, operand in (("a", p.a), ("b", p.b)):
        need(operand.dtype in DTYPES, f"{name} has unknown dtype {operand.dtype!r}")
        need(len(operand.batch) == len(p.batch), f"{name} needs {len(p.batch)} batch strides")
    need(p.a.panel == 0 <= p.b.panel, f"panels of {p.a.panel} and {p.b.panel}: only B has any")
    need(kind(p.carried) in "iufc", f"nothing is summed in {p.carried}")
    check_epilogue(p.epilogue, p.batch, p.m, p.n, p.carried)


def check_epilogue(kernel: Kernel, batch: Sequence[int], m: int, n: int, carried: str) -> None:
    """Raise `KernelError` unless a kernel can follow a product: elementwise, affine, C first."""

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise KernelError(f"epilogue: {message}")

    check_kernel(kernel)
    need((kernel.outer, kernel.inner) == ((*batch, m), (n,)), "its space is not that of C")
    need(len(kernel.passes) == 1 and kernel.passes[0].level == ROW, "it needs one ROW pass")
    need(not kernel.buffers and not kernel.passes[0].reductions, "it must be elementwise")
    need(bool(kernel.args) and kernel.args[0].role == "in", "argument 0 is C, and is only read")
    need(kernel.args[0].dtype == carried, f"C is {carried}, not {kernel.args[0].dtype}")
    maps = argument_maps(kernel)
    for item in (*kernel.passes[0].instrs, *kernel.passes[0].stores):
        need(isinstance(item, Const | Op | Load | Store), f"{type(item).__name__} depends on place")
        if isinstance(item, Load | Store):
            need(not item.map.gathered and item.guard is None, "maps must be affine, without guard")
            need(item.map == maps[item.arg], f"argument {item.arg} is used at two maps")
            need(min(item.map.strides[-2:]) >= 0, f"argument {item.arg} runs backwards")
    need(maps[0] == Map(c_strides(batch, m, n)), "C is contiguous")


# ---- joining a kernel to a product -------------------------------------------------------------


@record
class Result:
    """The user's C in memory: the sizes of (*batch, m, n), its strides along them, its dtype."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@lru_cache(maxsize=1024)
def attach(
    kernel: Kernel, position: int, result: Result, carried: str, keep: bool = False
) -> tuple[Kernel, tuple[int, ...]] | None:
    """Make `kernel`, which reads C as its argument `position`, the epilogue of a product.

    Gives the epilogue, and for each of its arguments but the first the number of the argument of
    `kernel` that it is; None if the kernel cannot be one. With `keep` C itself is stored too, as
    an argument that comes last and has the number `position`.
    """
    step = kernel.passes[0] if len(kernel.passes) == 1 else None
    if step is None or step.level != ROW or kernel.buffers or step.reductions:
        return None
    accesses = [i for i in (*step.instrs, *step.stores) if isinstance(i, Load | Store)]
    if any(i.map.gathered or i.guard is not None for i in accesses):
        return None
    if any(not isinstance(i, Const | Op | Load) for i in step.instrs):
        return None
    if any(not isinstance(s, Store) or s.combine is not None for s in step.stores):
        return None
    seen = {i.map for i in accesses if i.arg == position}
    sizes = kernel.sizes
    if len(seen) != 1 or 0 in sizes or kernel.args[position].role != "in":
        return None
    groups = _match(sizes, seen.pop(), result)
    if groups is None:
        return None
    return _Attachment(kernel, position, groups, result, carried).build(keep)


# For each dim of C the (kernel dim, size, factor of the kernel dim's stride) it consists of,
# fastest first.
_Groups = list[list[tuple[int, int, int]]]


def _match(sizes: Sequence[int], c_map: Map, result: Result) -> _Groups | None:
    """Cut and join the kernel's dims into those of C."""
    dims = sorted((c_map.strides[d], d, size) for d, size in enumerate(sizes) if size != 1)
    expected = 1
    for stride, _, size in dims:
        if stride != expected:
            return None
        expected *= size
    if expected != math.prod(result.sizes) or c_map.offset:
        return None
    rest = [(d, size, 1) for _, d, size in dims]
    groups: _Groups = [[] for _ in result.sizes]
    for _, place in sorted((stride, k) for k, stride in enumerate(result.strides)):
        size = result.sizes[place]
        while size > 1:
            d, have, factor = rest.pop(0)
            taken = math.gcd(have, size)
            if taken != min(have, size):
                return None
            groups[place].append((d, taken, factor))
            if have > taken:
                rest.insert(0, (d, have // taken, factor * taken))
            size //= taken
    return groups


class _Attachment:
    """Rewrites the maps of a kernel to the dims of C."""

    def __init__(
        self, kernel: Kernel, position: int, groups: _Groups, result: Result, carried: str
    ):
        self.kernel = kernel
        self.position = position
        self.groups = groups
        self.result = result
        self.carried = carried
        self.args = [Arg(carried, math.prod(result.sizes))]
        self.origins: list[int] = []
        self.numbers: dict[tuple[int, Map], int] = {}

    def build(self, keep: bool) -> tuple[Kernel, tuple[int, ...]] | None:
        """The rewritten kernel, and its arguments."""
        step = self.kernel.passes[0]
        instrs: list[Instr] = []
        for instr in step.instrs:
            if isinstance(instr, Load) and instr.arg == self.position:
                instrs += self.load_c(instr)
                continue
            moved = self.moved(instr) if isinstance(instr, Load) else instr
            if moved is None:
                return None
            instrs.append(moved)
        stores = [self.moved(store) for store in step.stores if isinstance(store, Store)]
        if None in stores:
            return None
        if keep:
            value = next(
                i.out for i in step.instrs if isinstance(i, Load) and i.arg == self.position
            )
            place = Map(self.result.strides)
            stores.append(Store(len(self.args), place, value))
            self.args.append(Arg(self.result.dtype, math.prod(self.result.sizes), "out"))
            self.origins.append(self.position)
        made = Kernel(
            tuple(self.args),
            self.result.sizes[:-1],
            self.result.sizes[-1:],
            (replace(step, instrs=tuple(instrs), stores=tuple(stores)),),
        )
        check_kernel(made)
        return made, tuple(self.origins)

    def load_c(self, load: Load) -> list[Instr]:
        """C as the kernel sees it: in its own dtype, which may be narrower than the sums."""
        sizes = self.result.sizes
        where = Map(c_strides(sizes[:-2], *sizes[-2:]))
        if load.dtype == self.carried:
            return [replace(load, arg=0, map=where)]
        highest = max(i.out for i in self.kernel.passes[0].instrs)
        wide = highest + 1 + load.out
        return [
            Load(wide, self.carried, 0, where),
            Op(load.out, load.dtype, "convert", (wide,)),
        ]

    def moved(self, item: Any) -> Any:
        """A load or store of another argument than C; None if its strides do not join."""
        strides = []
        for group in self.groups:
            first, span = 0, None
            for d, size, factor in group:
                stride = item.map.strides[d] * factor
                if span is None:
                    first = stride
                elif stride != span:
                    return None
                span = stride * size
            strides.append(first)
        if min(strides[-2:]) < 0:
            return None
        where = Map(tuple(strides), item.map.offset)
        key = (item.arg, where)
        if key not in self.numbers:
            self.numbers[key] = len(self.args)
            self.args.append(self.kernel.args[item.arg])
            self.origins.append(item.arg)
        return replace(item, arg=self.numbers[key], map=where)
