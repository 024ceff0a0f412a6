"""Rules for steps that an elementwise group follows: the group becomes the epilogue of its step.

The pass `fuse_epilogues` makes one `product` equation of a `dot_general` or a convolution, the
*head*, and the group behind it. Each kind of head says in `WITH_EPILOGUE` how both become one step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TypeAlias

from spmd.compile.expressions.group_kernel import group_name
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import Result, attach
from spmd.compile.lower.in_place import group_kernel
from spmd.compile.lower.kernels import fused
from spmd.compile.lower.lowering import RULES, Lowering, declares, rule
from spmd.compile.lower.steps import Ref
from spmd.core.ir import ClosedJaxpr, Eqn, Var

# Writes a head and its follower as one step; False, and nothing is written, if they must be two.
Way: TypeAlias = Callable[["Follower"], bool]

WITH_EPILOGUE: dict[str, Way] = {}


# `@with_epilogue("dot_general")`: how the primitive of a name and its follower become one step.
with_epilogue = partial(declares, WITH_EPILOGUE)


@rule("product")
def product(lowering: Lowering, eqn: Eqn) -> None:
    """A head and the group that follows it: one step, or two."""
    follower = Follower(lowering, eqn)
    head = follower.head
    if not WITH_EPILOGUE[head.prim.name](follower):
        RULES[head.prim.name](lowering, head)
        fused(lowering, follower.group)


class Follower:
    """The group of a `product` equation, on its way to being an epilogue."""

    def __init__(self, lowering: Lowering, eqn: Eqn):
        self.lowering = lowering
        self.head, self.group = parts_of(eqn)
        self.position: int = eqn.params["position"]
        self.source = eqn.source
        # Whether others read the head's result too: it must be stored.
        self.keeps = len(eqn.outvars) > len(self.group.outvars)

    @property
    def result(self) -> Var:
        """The head's result."""
        return self.head.outvars[0]

    @cached_property
    def places(self) -> list[Ref | None]:
        """The places of the group's operands and results, but for the head's."""
        found: list[Ref | None] = [
            None if v is self.result else self.lowering.ref(v) for v in self.group.invars
        ]
        found += [self.lowering.place(v) for v in self.group.outvars]
        return found

    def attach(
        self, result: Result, carried: str, keep: bool
    ) -> tuple[Kernel, tuple[Ref, ...]] | None:
        """The epilogue of a step with this result, and its arguments but the first.

        With `keep` one of them is the head's result itself.
        """
        kernel = group_kernel(self.group)
        assert kernel is not None, "the pass attaches only what has kernels"
        attached = attach(kernel, self.position, result, carried, keep)
        if attached is None:
            return None
        epilogue, origins = attached
        places = list(self.places)
        if keep:
            places[self.position] = self.lowering.place(self.result)
        refs = [places[origin] for origin in origins]
        return epilogue, tuple(ref for ref in refs if ref is not None)

    def name(self, head: str) -> str:
        """The name of the step."""
        return f"{head}+{group_name(self.group.params['jaxpr'])}"


def parts_of(eqn: Eqn) -> tuple[Eqn, Eqn]:
    """The head that a `product` equation stands for, and the group as an equation."""
    params = eqn.params
    group: ClosedJaxpr = params["jaxpr"]
    count = len(group.jaxpr.outvars)
    lhs, rhs, *rest = eqn.invars
    prim, given = params["head"]
    # A result without other readers is one of the group's inputs, and the group may see it with
    # another shape; the bytes are the same.
    made = eqn.outvars[count] if len(eqn.outvars) > count else Var(params["result"])
    head = Eqn(prim, (lhs, rhs), (made,), dict(given), frozenset(), eqn.source)
    rest.insert(params["position"], made)
    space = {"jaxpr": group, "space": params["space"]}
    follows = eqn.replace(invars=tuple(rest), outvars=eqn.outvars[:count], params=space)
    return head, follows
