"""The readable form of a kernel: one line per instruction, values by number.

kernel(a0: f32[1000] in, a1: f32[10] out) outer (10) inner (100) lanes dim 1
row:
  %0 = f32 load a0[100*d0 + d1]
  %1 = f32 reduce add %0
point:
  store a1[d0] <- %1
"""

from __future__ import annotations

from spmd.compile.kernel.dtypes import from_bits
from spmd.compile.kernel.ir import (
    Const,
    Instr,
    Iota,
    Kernel,
    Load,
    LoadRow,
    Map,
    Op,
    Scan,
    Store,
    StoreRow,
)


def format_kernel(kernel: Kernel) -> str:
    """Return the text of a kernel."""
    args = ", ".join(
        f"a{number}: {arg.dtype}[{arg.size}] {arg.role}" for number, arg in enumerate(kernel.args)
    )
    head = f"kernel({args}) outer {_sizes(kernel.outer)} inner {_sizes(kernel.inner)}"
    if kernel.vector_dim is not None:
        head += f" lanes dim {kernel.vector_dim}"
    if kernel.buffers:
        head += f" row buffers {', '.join(kernel.buffers)}"
    lines = [head]
    for step in kernel.passes:
        lines.append(f"{step.level}:")
        lines += [f"  %{item.out} = {item.dtype} {_instr(item)}" for item in step.instrs]
        lines += [f"  {_store(store)}" for store in step.stores]
        lines += [f"  %{r.out} = {r.dtype} reduce {r.op} %{r.operand}" for r in step.reductions]
    return "\n".join(lines)


def _sizes(sizes: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, sizes)) + ")"


def _instr(item: Instr) -> str:
    match item:
        case Const(dtype=dtype, bits=bits):
            return f"const {from_bits(bits, dtype)}"
        case Iota(dim=dim):
            return f"iota d{dim}"
        case Op(op=op, operands=operands, attr=attr):
            words = [op, *(f"%{value}" for value in operands)]
            return " ".join(words if attr is None else [*words, str(attr)])
        case Load(arg=arg, map=where, guard=guard, fill=fill):
            text = f"load a{arg}[{_map(where)}]"
            text += "" if guard is None else f" where %{guard}"
            return text + ("" if fill is None else f" else %{fill}")
        case LoadRow(buffer=buffer):
            return f"load row {buffer}"
        case Scan(op=op, operand=operand, reverse=reverse):
            return f"scan {op} %{operand}" + (" reverse" if reverse else "")


def _store(store: Store | StoreRow) -> str:
    if isinstance(store, StoreRow):
        return f"store row {store.buffer} <- %{store.value}"
    arrow = "<-" if store.combine is None else f"<-{store.combine}-"
    text = f"store a{store.arg}[{_map(store.map)}] {arrow} %{store.value}"
    text += "" if store.guard is None else f" where %{store.guard}"
    return text + (" unique" if store.unique else "") + (" apart" if store.apart else "")


def _map(where: Map) -> str:
    terms = [_term(stride, f"d{dim}") for dim, stride in enumerate(where.strides) if stride]
    terms += [_term(stride, f"%{value}") for value, stride in where.gathered if stride]
    if where.offset or not terms:
        terms.insert(0, str(where.offset))
    return " + ".join(terms)


def _term(stride: int, name: str) -> str:
    return name if stride == 1 else f"{stride}*{name}"
