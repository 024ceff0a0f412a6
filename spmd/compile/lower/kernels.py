"""Rules for equations that become kernels: fused groups."""

from __future__ import annotations

from spmd.compile.lower.elementwise import NoKernelError
from spmd.compile.lower.lowering import Lowering, host, rule
from spmd.compile.lower.region import build_kernel
from spmd.compile.lower.schedule import Launch
from spmd.core.ir import ClosedJaxpr, Eqn


@rule("fused")
def fused(lowering: Lowering, eqn: Eqn) -> None:
    """A fused group is one kernel, or a host step if some operation in it has no native code."""
    group = eqn.params["jaxpr"]
    try:
        kernel = build_kernel(group, eqn.params["space"])
    except NoKernelError:
        host(lowering, eqn)
        return
    reads = [lowering.ref(v) for v in eqn.invars]
    writes = [lowering.place(v) for v in eqn.outvars]
    lowering.steps.append(Launch(kernel, (*reads, *writes), group_name(group), eqn.source))


def group_name(group: ClosedJaxpr) -> str:
    """A short name that says what a group does: `exp+reduce_sum+div`."""
    dull = ("broadcast_in_dim", "reshape", "convert_element_type", "copy", "squeeze")
    names = [e.prim.name for e in group.eqns if e.prim.name not in dull] or ["move"]
    return "+".join(names if len(names) <= 4 else [*names[:2], f"{len(names) - 3}more", names[-1]])
