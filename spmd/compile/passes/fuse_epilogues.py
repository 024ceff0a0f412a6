"""Epilogue fusion: an elementwise group behind a product or convolution becomes its epilogue.

After `fuse`, a `dot_general` or a convolution whose first reader is an elementwise `fused` group,
which reads each element of the result where the group's own results have theirs, becomes one
`product` equation with that group. The result itself then need not be in memory: bias, activation,
residual and casts are applied to blocks of it while these are in a cache. Whether a group fits is
asked of its kernel (`kernel/matmul.py`); nothing here knows what the operations are.
"""

from __future__ import annotations

from typing import Any

from spmd.compile.kernel.matmul import attach
from spmd.compile.lower import convolution
from spmd.compile.lower import matmul as product
from spmd.compile.lower.in_place import group_kernel
from spmd.compile.lower.lowering import ALIASES
from spmd.compile.passes.inline_calls import with_bodies
from spmd.core.call import impl_jaxpr
from spmd.core.ir import ClosedJaxpr, Eqn, Literal, Var
from spmd.core.primitive import internal_primitive
from spmd.core.rewriting.equations import finish, map_subjaxprs, start

# Primitives that can have an epilogue, and the function for the layout of their result.
HEADS = {"dot_general": product.result_of, "conv_general_dilated": convolution.result_of}

# ---- the equation ------------------------------------------------------------------------------


def _abstract(*avals: Any, jaxpr: Any, result: Any, keep: bool, **params: Any) -> Any:
    return [*jaxpr.out_avals, *([result] if keep else [])]


def _impl(
    xp: Any, lhs: Any, rhs: Any, *rest: Any, head: Any, jaxpr: Any, position: int, **params: Any
) -> Any:
    prim, given = head
    c = prim.rule("impl")(xp, lhs, rhs, **dict(given))
    seen = c.reshape(jaxpr.jaxpr.invars[position].aval.shape)
    found = impl_jaxpr(xp, jaxpr, *rest[:position], seen, *rest[position:])
    return [*found, *([c] if params["keep"] else [])]


# `head` holds the primitive of the product and its parameters, `position` says which input of the
# group is its result, `result` is its type. With `keep` others read it too: it is the last result.
product_p = internal_primitive(
    "product",
    abstract=_abstract,
    impl=_impl,
)


# ---- the pass ----------------------------------------------------------------------------------


def fuse_epilogues(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Join products with the groups that follow them, in control flow bodies too."""
    return _Attacher(closed).run()


class _Attacher:
    """Finds the pairs of one jaxpr and writes it anew."""

    def __init__(self, closed: ClosedJaxpr):
        self.closed = closed
        self.eqns = closed.eqns
        # Variables of the same bytes as the result of a product, and the equation that made it.
        self.product_of: dict[Var, int] = {}
        self.renames: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = {}
        for k, eqn in enumerate(self.eqns):
            self.note(k, eqn)
        self.wanted = {
            self.product_of[v]
            for v in closed.jaxpr.outvars
            if isinstance(v, Var) and v in self.product_of
        }

    def note(self, k: int, eqn: Eqn) -> None:
        """Note the products that an equation makes and reads."""
        if eqn.prim.name in HEADS:
            self.product_of[eqn.outvars[0]] = k
            self.renames[k], self.readers[k] = [], []
        read = {self.product_of[v] for v in eqn.invars if v in self.product_of}
        if eqn.prim.name in ALIASES and len(eqn.invars) == 1:
            for product in read:
                self.product_of[eqn.outvars[0]] = product
                self.renames[product].append(k)
            return
        for product in sorted(read):
            self.readers[product].append(k)

    def run(self) -> ClosedJaxpr:
        chosen: dict[int, tuple[int, int]] = {}
        # Of several products that one group reads the last is taken: it is made just before.
        for k in sorted(self.readers, reverse=True):
            readers = self.readers[k]
            group = readers[0] if readers else -1
            position = self.fits(k, group) if readers and group not in chosen else None
            if position is not None:
                chosen[group] = (k, position)
        outer = with_bodies(self.closed)
        if not chosen and not outer:
            return self.closed
        moved = {j for k, _ in chosen.values() for j in (k, *self.renames[k])}
        writer = start(self.closed)
        for k, eqn in enumerate(self.eqns):
            if k in chosen:
                product, position = chosen[k]
                kept = len(self.readers[product]) > 1 or product in self.wanted
                writer.keep(self.joined(self.eqns[product], eqn, position, kept))
                for rename in self.renames[product] if kept else ():
                    writer.keep(self.eqns[rename])
            elif k not in moved:
                params = map_subjaxprs(eqn, fuse_epilogues) if eqn in outer else None
                writer.keep(eqn, params)
        return finish(writer, self.closed)

    def fits(self, k: int, group: int) -> int | None:
        """The input of a group that is the product, if the group can be its epilogue."""
        eqn = self.eqns[group]
        if eqn.prim.name != "fused" or eqn.params["space"].inner:
            return None
        positions = [
            i
            for i, v in enumerate(eqn.invars)
            if not isinstance(v, Literal) and self.product_of.get(v) == k
        ]
        kernel = group_kernel(eqn)
        if kernel is None or len(positions) != 1:
            return None
        head = self.eqns[k]
        found = HEADS[head.prim.name](head)
        if found is None or attach(kernel, positions[0], *found) is None:
            return None
        return positions[0]

    def joined(self, head: Eqn, group: Eqn, position: int, kept: bool) -> Eqn:
        """The equation of a product and its group."""
        c = head.outvars[0]
        rest = (*group.invars[:position], *group.invars[position + 1 :])
        params = group.params | {
            "head": (head.prim, tuple(head.params.items())),
            "position": position,
            "result": c.aval,
            "keep": kept,
        }
        outs = (*group.outvars, *((c,) if kept else ()))
        return group.replace(
            prim=product_p, invars=(*head.invars, *rest), outvars=outs, params=params
        )
