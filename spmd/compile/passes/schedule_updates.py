"""Early updates: equations that only make results move forward, to free their operands.

A training step's update stands at its end, and takes the product that makes its gradient along
(`fuse_epilogues.py`). Until then the product's operands would wait: a layer's input, kept since
the forward pass, and the cotangent of its result. Right behind the equation that made the last of
its operands these are in the caches, and free their memory afterwards.

A result may take the place of a donated argument only if nothing reads that later, so an equation
waits for the other readers of the arguments that it reads.
"""

from __future__ import annotations

from spmd.compile.lower.lowering import ALIASES
from spmd.compile.passes.inline_calls import with_bodies
from spmd.core.ir import Atom, ClosedJaxpr, Eqn
from spmd.core.rewriting.equations import finish, map_subjaxprs, start

# An update that frees less may stay where it is, beside others that run at the same time.
LEAST_FREED = 1 << 14
# The memory of a result that is not written yet is shared with other values
# (`schedule/memory_plan.py`): it is given up for an update that frees so many times as much.
TIMES_WRITTEN = 2
_MAKERS = frozenset(("fused", "product", "dot_general"))


def schedule_updates(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr in which equations that only make results have moved forward."""
    eqns = closed.eqns
    outer = with_bodies(closed)
    moved = _Mover(closed).moved()
    if not moved and not outer:
        return closed
    writer = start(closed)
    for k in sorted(range(len(eqns)), key=lambda k: (moved.get(k, k), k in moved, k)):
        eqn = eqns[k]
        writer.keep(eqn, map_subjaxprs(eqn, schedule_updates) if eqn in outer else None)
    return finish(writer, closed)


class _Mover:
    """The makers and readers of the values of one jaxpr."""

    def __init__(self, closed: ClosedJaxpr):
        self.eqns = closed.eqns
        self.results = set(closed.jaxpr.outvars)
        # A value that is another one's bytes stands for that.
        self.roots: dict[Atom, Atom] = {}
        self.makers: dict[Atom, int] = {}
        self.readers: dict[Atom, list[int]] = {}
        for k, eqn in enumerate(self.eqns):
            for v in eqn.outvars:
                self.makers[v] = k
            if eqn.prim.name in ALIASES and len(eqn.invars) == 1:
                (whole,), (alias,) = eqn.invars, eqn.outvars
                self.roots[alias] = root = self.roots.get(whole, whole)
                if alias in self.results:
                    self.results.add(root)
                continue
            for v in dict.fromkeys(self.roots.get(a, a) for a in eqn.invars):
                self.readers.setdefault(v, []).append(k)
        self.last = [self.is_last(eqn) for eqn in self.eqns]

    def is_last(self, eqn: Eqn) -> bool:
        """Whether an equation makes nothing but results, which nothing reads."""
        if eqn.prim.name not in _MAKERS or eqn.effects:
            return False
        return not any(v in self.readers for v in eqn.outvars)

    def moved(self) -> dict[int, int]:
        """For each equation that moves, the one behind which it goes."""
        found = {}
        for k, eqn in enumerate(self.eqns):
            if self.last[k] and (after := self.after(k, eqn)) + 1 < k:
                found[k] = after
        return found

    def after(self, k: int, eqn: Eqn) -> int:
        """The equation behind which number `k` may go; its own number if that frees nothing."""
        read = dict.fromkeys(self.roots.get(a, a) for a in eqn.invars)
        own = [v for v in read if v in self.makers]
        after = max((self.makers[a] for a in eqn.invars if a in self.makers), default=k)
        sizes = [v.aval.nbytes for v in eqn.outvars]
        for v in read:
            if v not in self.makers and v.aval.nbytes in sizes:
                others = [r for r in self.readers[v] if not self.last[r] and r < k]
                after = max(after, *others) if others else after
        freed = sum(
            v.aval.nbytes
            for v in own
            if v not in self.results and all(r <= after or self.last[r] for r in self.readers[v])
        )
        return after if freed >= max(LEAST_FREED, TIMES_WRITTEN * sum(sizes)) else k
