"""The grammar of the second family of random programs: transformations inside of one another.

Loops, branches, `checkpoint`, rules of the user's, mutable arrays and derivatives, each of a body
that is one of them again. The words and the rest of the grammar are those of the first family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.jax.statements import (
    Scope,
    Unusable,
    binary,
    cast,
    elementwise,
    formula,
    index,
    move,
    product,
    reduction,
)

# What programs of this family call beside the library and the first family's prelude.
PRELUDE = """\
def like(x, y):
    return np.broadcast_to(x, np.shape(y)).astype(np.asarray(y).dtype)

def written(f, x):
    r = j.new_ref(np.asarray(x))
    r[...] = like(f(r[...]), x)
    return r[...] + np.asarray(x)

def written_twice(f, x):
    r = j.new_ref(np.asarray(x))
    def step(k, total):
        r[...] = like(f(r[...]), x)
        return like(total + r[...], x)
    return lax.fori_loop(0, 2, step, np.asarray(x)) + r[...]

def written_in_rows(f, x):
    x = np.atleast_1d(x)
    r, sums = j.new_ref(x), j.new_ref(np.zeros_like(x[0]))
    def step(_, k):
        r[k] = like(f(r[k]), x[0])
        sums[...] += like(r[k], x[0])
        return _, r[k]
    rows = lax.scan(step, 0, np.arange(x.shape[0]))[1]
    return np.concatenate([rows, r[...], sums[...][None]])

def written_in_a_branch(f, x):
    r = j.new_ref(np.asarray(x))
    def change(y):
        r[...] = like(f(y), x)
        return like(y + r[...], x)
    return lax.cond(np.sum(x) > 0, change, lambda y: y, np.asarray(x)) + r[...]

def written_by_a_call(f, x):
    @j.jit
    def change(r, y):
        r[...] = like(f(y), x)
        return like(r[...] + y, x)
    r = j.new_ref(np.asarray(x))
    return change(r, np.asarray(x)) * r[...]
"""

REFS = "written written_twice written_in_rows written_in_a_branch written_by_a_call".split()
POLICIES = (
    "",
    "",
    ", policy=j.checkpoint_policies.dots_saveable",
    ", policy=j.checkpoint_policies.everything_saveable",
    ", policy=j.checkpoint_policies.nothing_saveable",
    ", prevent_cse=False",
)


def nested(s: Scope, names: Sequence[str], depth: int, looped: bool = False) -> str:
    """An expression of some names: what is in `KINDS`, of bodies of lower depth, to the depth."""
    if not depth:
        return formula(s, names, 1)
    return s.pick(KINDS)(s, names, depth - 1, looped)


def inner(s: Scope, own: Sequence[str], names: Sequence[str]) -> list[str]:
    """What a body sees: its own parameters, and now and then what is around it."""
    return [*own, *own, *(names if s.chance(0.35) else ())]


def scan(s: Scope, names: Sequence[str], depth: int, looped: bool) -> str:
    c, u, y = f"c{depth}", f"u{depth}", s.pick(names)
    step = nested(s, inner(s, [c], names), depth, True)
    out = formula(s, inner(s, [c, u], names), 1)
    part = s.pick(["[0]", "[1]"])
    if s.chance(0.5):
        how = s.pick(["", ", unroll=2", ", reverse=True"])
        return (
            f"lax.scan(lambda {c}, {u}: (like({step} * {u}, {c}), {out}), "
            f"np.sum({y}), np.atleast_1d({y}){how}){part}"
        )
    out = out.replace(u, c)
    return f"lax.scan(lambda {c}, _: (like({step}, {c}), {out}), {y}, None, length=2){part}"


def count(s: Scope, names: Sequence[str], depth: int, looped: bool) -> str:
    c, k = f"c{depth}", f"k{depth}"
    step = nested(s, inner(s, [c], names), depth, True)
    n = s.pick([1, 2, 3])
    return f"lax.fori_loop(0, {n}, lambda {k}, {c}: like({step}, {c}), {s.pick(names)})"


def ask(s: Scope, names: Sequence[str], depth: int, looped: bool) -> str:
    """A loop whose length is not known; it has no derivative in reverse mode."""
    if s.order:
        return count(s, names, depth, looped)
    c, y = f"c{depth}", s.pick(names)
    step = nested(s, inner(s, [c], names), depth, True)
    return (
        f"lax.while_loop(lambda t: t[0] < np.sum({y}) * 0 + 2, "
        f"lambda t: (lambda k, {c}: (k + 1, like({step}, {c})))(*t), (0, {y}))[1]"
    )


def choose(s: Scope, names: Sequence[str], depth: int, looped: bool) -> str:
    u, y = f"u{depth}", s.pick(names)
    one = nested(s, inner(s, [u], names), depth, looped)
    two = formula(s, inner(s, [u], names), 1)
    branches = [f"lambda {u}: like({one}, {u})", f"lambda {u}: like({two}, {u})"]
    if s.chance(0.5):
        branches = branches[::-1]
    if s.chance(0.4):
        k = s.pick([f"np.int32(np.any({y} > 0))", "1", f"np.argmax(np.atleast_1d({y}).ravel())"])
        return f"lax.switch({k}, [{', '.join(branches)}, lambda {u}: {u}], {y})"
    return f"lax.cond({s.pick(['np.any', 'np.all'])}({y} > 0), {', '.join(branches)}, {y})"


def wrapped(make: Callable[[Scope], str]) -> Callable[[Scope, Sequence[str], int, bool], str]:
    """A function that is transformed and called; `make` draws how, with `{f}` for the function."""

    def draw(s: Scope, names: Sequence[str], depth: int, looped: bool) -> str:
        u = f"u{depth}"
        f = f"lambda {u}: {nested(s, inner(s, [u], names), depth, looped)}"
        return make(s).format(f=f, y=s.pick(names))

    return draw


def rule(s: Scope, names: Sequence[str], depth: int, looped: bool) -> str:
    """A function with a rule that is not its derivative."""
    u = f"u{depth}"
    if s.order > 1 and looped:
        # The second derivative of a rule in JAX's scan is not that of the rule applied twice.
        return nested(s, names, depth, looped)
    # JAX's vmap sums the cotangents of a result that is the same for all, and a rule that is no
    # derivative need not be linear in them: results depend on the argument.
    f = f"lambda {u}: like(({nested(s, [u], depth, looped)}) + {u} * 0, {u})"
    slope = nested(s, [u], depth - 1, looped) if depth and s.chance(0.3) else formula(s, [u], 1)
    how = s.pick(["with_jvp", "with_vjp"])
    return f"{how}({f}, lambda {u}, t: like(t * ({slope}), {u}))({s.pick(names)})"


def mutable(s: Scope, names: Sequence[str], depth: int, looped: bool) -> str:
    u = f"u{depth}"
    f = f"lambda {u}: {nested(s, [u], depth, looped)}"
    return f"{s.pick(REFS)}({f}, {s.pick(names)})"


def gradient(s: Scope, names: Sequence[str], depth: int, looped: bool) -> str:
    u, order = f"u{depth}", s.order
    s.order += 1
    f = nested(s, [u], depth, looped)
    s.order = order
    return f"like(j.grad(lambda {u}: np.sum({f}).astype({u}.dtype))({s.pick(names)}), {names[0]})"


KINDS = (
    *[scan] * 3,
    *[count] * 2,
    ask,
    *[choose] * 3,
    *[wrapped(lambda s: f"j.checkpoint({{f}}{s.pick(POLICIES)})({{y}})")] * 3,
    wrapped(lambda s: "j.jit({f})({y})"),
    wrapped(lambda s: "j.vmap({f})(np.stack([{y}, {y} * 2]))" + s.pick(["[1]", ".sum(0)"])),
    wrapped(lambda s: "j.jvp({f}, ({y},), ({y},))" + s.pick(["[0]", "[1]"])),
    *[rule] * 3,
    *[mutable] * 3,
    gradient,
)


def deep(s: Scope) -> str:
    """What is nested, of one value."""
    x = s.real() if s.order or s.chance(0.75) else s.value()
    e = nested(s, ["y"], s.pick([1, 2, 2, 3]))
    call = f"(lambda y: {e})"
    return s.pick([f"{call}({x})", f"{call}({x})", f"j.vmap{call}({x})", f"j.jit{call}({x})"])


def third(s: Scope) -> str:
    """A third derivative of one number, of each element, or of a direction."""
    if s.order:
        raise Unusable
    x = s.value(lambda v: v.dtype.kind == "f" and v.dtype.itemsize >= 4)
    order, s.order = s.order, s.order + 3
    f = f"lambda y: np.sum({nested(s, ['y'], s.pick([0, 1, 1, 2]))}).astype(y.dtype)"
    s.order = order
    return s.pick(
        [
            f"j.vmap(j.grad(j.grad(j.grad({f}))))({x}.reshape(-1))",
            f"j.jacfwd(j.hessian({f}))({x}.reshape(-1)[:2])",
            f"j.jvp(lambda z: j.jvp(j.grad({f}), (z,), ({x},))[1], ({x},), ({x},))[1]",
            f"j.grad(lambda z: np.sum(j.jvp(j.grad({f}), (z,), ({x},))[1]))({x})",
        ]
    )


STATEMENTS = (
    *[deep] * 24,
    *[third] * 4,
    *[elementwise] * 3,
    *[binary] * 3,
    *[cast] * 4,
    *[move] * 3,
    *[reduction] * 2,
    *[product] * 2,
    *[index] * 3,
)
