"""The grammar of random programs: each function draws one expression, as Python source.

An expression may make no sense (a float as an index); JAX says so when it is traced, and another
is drawn. `STATEMENTS` says how often each kind is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.jax.vocabulary import (
    BINARY,
    COLLECTIVES,
    CONSTANTS,
    DTYPES,
    ELEMENTWISE,
    INFIX,
    INSIDE_BODIES,
    INSIDE_THEIR_DOMAIN,
    LITERALS,
    REDUCTIONS,
    ROUGH,
    RUNNING,
    SAMPLERS,
    SMOOTH,
    WIDE_CONSTANTS,
    WIDE_DTYPES,
)


class Unusable(Exception):
    """No value of the program so far is of the kind that a statement needs."""


class Scope:
    """What a statement is drawn from: random choices, and the values that the program has."""

    def __init__(self, rng: np.random.Generator, wide: bool = False, order: int = 0):
        self.rng = rng
        self.wide = wide
        self.order = order
        self.avals: dict[str, Any] = {}

    def pick(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def value(self, accepts: Callable[[Any], bool] = lambda a: True) -> str:
        """The name of a value, more likely a late one."""
        names = [name for name, a in self.avals.items() if accepts(a)]
        if not names:
            raise Unusable
        k = max(self.rng.integers(len(names)), self.rng.integers(len(names)))
        return names[int(k)]

    def array(self) -> str:
        return self.value(lambda a: a.ndim > 0)

    def real(self, ndim: int = 0) -> str:
        """The name of a floating value."""
        return self.value(lambda a: is_float(a) and a.ndim >= ndim)

    def dtype(self) -> str:
        return self.pick(WIDE_DTYPES if self.wide and self.chance(0.5) else DTYPES)

    def dim(self, name: str) -> int:
        return int(self.rng.integers(-1, max(1, self.avals[name].ndim)))

    def constant(self) -> str:
        if self.wide and self.chance(0.2):
            return self.pick(WIDE_CONSTANTS)
        return self.pick(LITERALS if self.chance(0.6) else CONSTANTS)


def is_float(aval: Any) -> bool:
    return aval.dtype.kind == "f" or aval.dtype.name == "bfloat16"


def infix(s: Scope, a: str, b: str, operators: Sequence[str] = INFIX) -> str:
    """Two values and an operator; a remainder of 0 has the divisor's sign, JAX's the dividend's."""
    operator = s.pick(operators)
    return f"({a} {operator} {b}{' + 0' * (operator == '%')})"


def formula(s: Scope, names: Sequence[str], depth: int = 2) -> str:
    """An elementwise expression of some names."""
    if not depth or s.chance(0.15):
        return s.pick(names) if s.chance(0.75) else s.constant()
    a, b = formula(s, names, depth - 1), formula(s, names, depth - 1)
    choice = s.rng.random()
    if choice < 0.45:
        return f"{s.pick(SMOOTH)}({a})"
    if choice < 0.85:
        # A quotient of equals has derivatives whose digits all cancel.
        return infix(s, a, b, INFIX[:1] if a == b else INSIDE_BODIES)
    if choice < 0.93:
        return f"np.where({a} > {b}, {a}, {s.pick(names)})"
    return f"{s.pick(BINARY[:16])}({a}, {b})"


# ---- one operation -----------------------------------------------------------------------------


def function(s: Scope, x: str, order: int) -> str:
    """A function of a value; where it is derived, far from the points that `ROUGH` speaks of."""
    name = s.pick(ELEMENTWISE)
    if (order and name in ROUGH) or name in ("special.exp1", "special.expi"):
        x = f"np.tanh(np.nan_to_num({x})) * 0.4 + 0.5"
    if name == "np.spacing":
        x = f"np.abs({x}) + 1"  # JAX takes floats that are too small to be normal for 0
    return f"{name}({x})"


def elementwise(s: Scope) -> str:
    return function(s, s.value(), s.order)


def binary(s: Scope) -> str:
    a = s.value()
    b = s.constant() if s.chance(0.45) else s.value()
    a, b = (b, a) if s.chance(0.3) else (a, b)
    if s.chance(0.5):
        return infix(s, a, b)
    name = s.pick(BINARY)
    if name in INSIDE_THEIR_DOMAIN:
        # JAX's are computed in few bits, where their operands have few.
        a, b = (f"np.float32(np.abs(np.nan_to_num({x})) % 30 + 1.25)" for x in (a, b))
    if name == "np.ldexp" and s.order:
        a = f"np.nan_to_num({a})"  # JAX's derivative at infinity is 1, whatever the exponent
    return f"{name}({a}, {b})" + " + 0" * (name in ("np.remainder", "np.mod"))


def constants(s: Scope) -> str:
    a, b = s.constant(), s.constant()
    like = s.array()
    a = s.pick([a, f"np.ones_like({like}[0])", f"np.full_like({like}[0], {s.pick(LITERALS)})"])
    return f"np.asarray({a} {s.pick(INFIX)} {b}) * {s.value()}"


def ternary(s: Scope) -> str:
    a, b, c = s.value(), s.value(), s.pick([s.value(), s.constant()])
    return s.pick(
        [
            f"np.where({a} > {s.constant()}, {b}, {c})",
            f"np.where({a}, {b}, {c})",
            f"np.clip({a}, {s.constant()}, {c})",
            f"np.divmod({a}, {c})[{s.pick([0, 1])}] + 0",
            f"np.modf({a})[{s.pick([0, 1])}]",
            f"np.frexp({a})[{s.pick([0, 1])}]",
            f"special.betainc({a}, {b}, {c})",
            # JAX's is 1 for a first parameter of 0, also of NaN; and narrow floats overflow inside.
            f"special.hyp1f1({s.pick(['1', '.25'])}, {s.pick(['1', '2.5'])}, np.tanh({a}) * 3)",
            # JAX's is NaN at its poles and at infinity.
            f"special.polygamma({s.pick([0, 1, 2])}, np.abs(np.nan_to_num({a})) + 0.5)",
            f"lax.clamp({a}, {b}, {c})",
            f"np.select([{a} > 0, {b} > 0], [{a}, {b}], {s.pick(LITERALS)})",
            f"np.interp({s.real()}, np.array([0.0, 0.5, 1.0, 2.0]), np.array([1.0, -1.0, 3.0, 0.5])"
            f"{s.pick(['', ', period=2.0', ', period=0.5'])})",
        ]
    )


def cast(s: Scope) -> str:
    a, dtype = s.value(), s.dtype()
    # All bits of a float that was computed are nowhere promised.
    exact = s.value(lambda v: not is_float(v)) if s.chance(0.5) else "x0"
    # JAX takes floats that are too small to be normal for 0.
    bits = s.pick([d for d in DTYPES if "float" not in d])
    # One rounding takes a float that is nearly whole to the next integer.
    whole = is_float(s.avals[a]) and "int" in dtype
    source = f"({a} + 0.01)" if whole else a
    return s.pick(
        [
            f"{source}.astype('{dtype}')",
            f"lax.convert_element_type({source}, '{dtype}')",
            f"lax.bitcast_convert_type({exact}, '{bits}')",
            f"lax.reduce_precision({a}, 5, 7)",
            f"np.full_like({a}, {s.pick(LITERALS)})",
            f"np.full_like({a}, {s.pick(LITERALS)}, dtype='{dtype}')",
        ]
    )


def move(s: Scope) -> str:
    a, b = s.array(), s.value()
    x, k = s.dim(a), s.pick([-1, 1, 2])
    return s.pick(
        [
            f"np.stack([{a}, {s.pick(LITERALS)} * {a}], {s.pick([0, 1, -1])})",
            f"np.stack([{a}, {s.pick(SMOOTH)}({a})], 1)",
            f"np.stack([{b}, {b}, {b}, {b}])",
            f"{a}.T",
            f"np.swapaxes({a}, 0, {x})",
            f"np.moveaxis({a}, {x}, 0)",
            f"{a}[::-1]",
            f"{a}[..., ::-1]",
            f"{a}[::2]",
            f"{a}[1:]",
            f"{a}[..., 1:]",
            f"{a}[..., 0]",
            f"{a}[{s.pick([0, 1, -1])}]",
            f"{a}[:, None]",
            f"{a}.reshape(-1)",
            f"{a}.reshape({a}.shape[0], -1)",
            f"{a}.reshape(4, -1)",
            f"np.flip({a}, {x})",
            f"np.roll({a}, {k}, {x})",
            f"np.concatenate([{a}, {a}[::-1]], {x})",
            f"np.repeat({a}, 2, {x})",
            f"np.tile({b}, {s.pick(['2', '(2, 1)', '(4, 1)'])})",
            f"np.broadcast_to({b}, (4,) + {b}.shape)",
            f"np.pad({a}, 1, mode='{s.pick('constant edge reflect symmetric wrap'.split())}')",
            f"np.take({a}, np.array([1, 0, 1]), axis={x})",
            f"np.tril({a})",
            f"np.diag({a})",
            f"np.split({a}, 2, {x})[1]",
            f"np.rot90({a})",
            f"lax.rev({a}, (0,))",
        ]
    )


def reduction(s: Scope) -> str:
    a = s.array()
    where = s.pick([f"axis={s.dim(a)}", f"axis={s.dim(a)}, keepdims=True", "", f"axis={s.dim(a)}"])
    return f"{s.pick(REDUCTIONS)}({a}{', ' * bool(where)}{where})"


def running(s: Scope) -> str:
    # Which values are tied is a matter of rounding, once they are computed.
    a = s.pick([n for n in s.avals if n[0] == "x" and s.avals[n].ndim] or [s.array()])
    a = a if s.order else s.array()
    # JAX's derivatives of cumlogsumexp are numbers where infinities make NaN; of integers it is
    # none.
    names = [n for n in RUNNING if "logsumexp" not in n] if s.order else RUNNING
    names = names if is_float(s.avals[a]) else [n for n in names if "logsumexp" not in n]
    return f"{s.pick(names)}({a}, axis={max(0, s.dim(a))})"


def product(s: Scope) -> str:
    a, b = s.array(), s.array()
    return s.pick(
        [
            f"{a} @ {b}",
            f"{a} @ {b}.T",
            # XLA drops products with zeros, also where the other factor is an infinity.
            f"np.dot(np.nan_to_num({a}), np.nan_to_num({b}))",
            f"np.outer({a}, {b})",
            f"np.einsum('i...,i...->...', {a}, {b})",
            f"np.einsum('ij,kj->ik', {a}, {b})",
            f"np.tensordot({a}, {b}, 1)",
            f"np.vdot({a}, {a})",
            # The zeros around an array meet what is NaN in a kernel.
            f"np.convolve({a}, np.nan_to_num({b})[:2])",
            f"np.kron({a}, {b})",
        ]
    )


def index(s: Scope) -> str:
    a = s.array()
    # JAX takes the largest uint32 and uint64 for -1, and cuts 64 bits to 32.
    dtype = s.dtype()
    last = "1" if dtype in ("uint32", "uint64") else "-1"
    made = f"np.array({s.pick(['1', '[0, 1, 1]', last])}).astype('{dtype}')"
    i_bits = lambda v: v.dtype.itemsize < (4 if v.dtype.kind == "u" else 8)  # noqa: E731
    # JAX updates nothing with values of any shape; an error is ours.
    integers = lambda v: v.dtype.kind in "iu" and v.ndim <= 1 and v.size and i_bits(v)  # noqa: E731
    i = s.value(integers) if any(map(integers, s.avals.values())) and s.chance(0.6) else made
    other = s.pick([s.value(), s.constant()])
    mode = s.pick(["", ", mode='drop'", ", mode='clip'"])
    return s.pick(
        [
            f"{a}[{i}]",
            f"{a}[{i}]",
            f"{a}[..., {i}]",
            f"{a}.at[{i}].{s.pick('add set multiply min max'.split())}({other}{mode})",
            f"{a}.at[{i}].add({a}[{i}]{mode})",
            f"{a}.at[{i}].get(mode='fill')",
            f"lax.dynamic_index_in_dim({a}, {i}, 0)",
            f"lax.dynamic_slice_in_dim({a}, {i}, 1)",
            f"lax.dynamic_update_index_in_dim({a}, {a}[0], {i}, 0)",
            # JAX cuts wide indices to 32 bits.
            f"np.take_along_axis({a}, np.clip({s.array()}, -9, 9), 0)",
            f"np.searchsorted(np.sort({a}.reshape(-1)), {s.value()}).astype('int32')",
            f"np.digitize({s.value()}, np.array([-1.0, 0.0, 0.5]))",
            f"nn.one_hot(np.asarray({i}, int), 4)",
            f"lax.top_k(np.nan_to_num({a}), 2)[{s.pick([0, 1])}]",
        ]
    )


def sample(s: Scope) -> str:
    name = s.pick(SAMPLERS)
    dtype = s.pick("float32 bfloat16 float16".split())
    return f"j.random.{name}(j.random.PRNGKey({s.pick(range(5))}), (4,), '{dtype}')"


# ---- maps and loops ----------------------------------------------------------------------------


def body(s: Scope, *names: str, depth: int = 2) -> str:
    """An expression of the parameters of a function, sometimes with a loop or a branch of them."""
    e = formula(s, names, depth)
    if s.chance(0.75):
        return e
    y, f, g = s.pick(names), formula(s, ["u"], 1), formula(s, ["u"], 1)
    return s.pick(
        [
            f"lax.cond(np.any({e} > 0), lambda u: {f}, lambda u: {g}, {y})",
            f"lax.switch(np.int32(np.sum({y})), [lambda u: {f}, lambda u: {g}], {y})",
            f"lax.fori_loop(0, 2, lambda k, u: {f}, {y})",
            f"lax.while_loop(lambda t: t[0] < np.sum({y}) * 0 + 2, "
            f"lambda t: (t[0] + 1, {s.pick(SMOOTH)}(t[1])), (0, {y}))[{s.pick([0, 1])}]",
            f"lax.while_loop(lambda t: t[2] < np.sum({y}), "
            f"lambda t: (t[0] + {s.constant()}, ~t[1], t[2] + 2.0), (0, True, {y}))"
            f"[{s.pick([0, 1])}]",
            f"lax.scan(lambda t, u: ({f}, t * u), {s.constant()}, {y})[1]",
            f"j.checkpoint(lambda u: {f})({y})",
            f"j.jit(lambda u: {f})({y})",
            f"j.grad(lambda u: np.sum({f}))({y})",
        ]
    )


def mapped_body(s: Scope, name: str) -> str:
    """What one device computes."""
    e = body(s, name)
    if s.chance(0.3):
        return e
    collective = s.pick(COLLECTIVES).replace("E", formula(s, [name], 1)).replace(",", ", ")
    return s.pick([f"{e} * {collective}", f"{e} + {collective}", collective])


def parallel(s: Scope) -> str:
    """A map over devices, over a value or over one that is made for it."""
    a = s.array()
    x = f"({move(s)})" if s.chance(0.5) else a
    e = mapped_body(s, "y")
    devices = s.pick([2, 4, 4, 4])
    check = s.pick(["", ", check_vma=False"])
    out = s.pick(["'i'", "'i'", "None"])
    shard = (
        f"j.shard_map(lambda y: {e}, mesh=j.make_mesh(({devices},), ('i',)), in_specs=j.P('i'), "
        f"out_specs=j.P({out}){check})"
    )
    pmap = f"j.pmap(lambda y: {e}, axis_name='i')"
    axes = s.pick(["", "", ", in_axes=1", ", out_axes=1"])
    return s.pick(
        [
            f"{pmap}({x})",
            f"{pmap}({x})",
            f"j.pmap(lambda y: {e}, axis_name='i'{axes})({x})",
            f"{shard}({x})",
            f"{shard}({x})",
            f"j.vmap(lambda y: {e}, axis_name='i'{axes})({x})",
            f"j.vmap({shard})({x})",
            f"j.vmap({pmap}{axes})({x})",
            f"j.pmap(j.vmap(lambda y: {e}){axes}, axis_name='i')({x})",
            f"j.pmap(j.grad(lambda y: np.sum({e})), axis_name='i')({x})",
        ]
    )


def vmapped(s: Scope) -> str:
    a, e = s.array(), body(s, "y")
    two = body(s, "y", "z")
    axes = s.pick(["", ", in_axes=-1", ", out_axes=-1"])
    return s.pick(
        [
            f"j.vmap(lambda y: {e}{axes})({a})",
            f"j.vmap(j.grad(lambda y: np.sum({e})){axes})({a})",
            f"j.vmap(lambda y, z: {two}, in_axes=(0, None))({a}, {s.value()})",
            f"j.vmap(j.vmap(lambda y: {e}), in_axes=1)({a})",
            f"j.vmap(lambda y: lax.scan(lambda c, u: ({body(s, 'c', 'u')}, c), "
            f"{s.constant()}, y)[{s.pick([0, 1])}])({a})",
        ]
    )


def loop(s: Scope) -> str:
    a, x = s.value(), s.array()
    first = s.pick([s.constant(), a, f"({s.constant()}, {a})"])
    if first.startswith("(") and ", " in first:
        k = s.pick([0, 1])
        step = f"({formula(s, ['c[0]', 'u'])}, {formula(s, ['c[1]', 'c[0]'])})"
        part = s.pick(["[0][0]", "[0][1]", "[1]"])
        return f"lax.scan(lambda c, u: ({step}, c[{k}]), {first}, {x}){part}"
    f, p = body(s, "c"), s.pick(["k < 3", f"k < np.sum({a})*0 + 2"])
    return s.pick(
        [
            f"lax.scan(lambda c, u: ({body(s, 'c', 'u')}, {formula(s, ['c', 'u'])}), {first}, {x}"
            f"{s.pick(['', ', reverse=True', ', unroll=2'])})[{s.pick([0, 1])}]",
            f"lax.fori_loop(0, {s.pick([1, 3])}, lambda k, c: {body(s, 'c', 'k')}, {first})",
            f"lax.while_loop(lambda t: (lambda k, c: {p})(*t), "
            f"lambda t: (lambda k, c: (k + 1, {f}))(*t), (0, {first}))[{s.pick([0, 1])}]",
            f"lax.while_loop(lambda t: t[0] < 3, lambda t: (t[0] + 1, ~t[1]), "
            f"(0, {s.pick(['True', 'False', '1'])}))[1] * {a}",
            f"lax.map(lambda c: {f}, {x})",
            f"lax.associative_scan(lambda c, u: {formula(s, ['c', 'u'])}, {x})",
            # JAX's derivative forgets a start that is not the identity.
            f"lax.reduce({x}, {s.pick(['0, lax.add', '1, lax.mul'])}, (0,))",
        ]
    )


def branch(s: Scope) -> str:
    a = s.pick([s.value(), s.constant()])
    pred = s.pick([f"np.any({s.value()} > 0)", "True", f"np.sum({s.value()}) > 0"])
    one, two = body(s, "c"), body(s, "c")
    weak = s.pick(LITERALS)
    return s.pick(
        [
            f"lax.cond({pred}, lambda c: {one}, lambda c: {two}, {a})",
            f"lax.cond({pred}, lambda: {weak}, lambda: {s.pick(LITERALS)})",
            f"lax.cond({pred}, lambda: {s.constant()}, lambda: {s.constant()}) * {a}",
            f"lax.switch({s.value(lambda v: not v.ndim)}, [lambda c: {one}, lambda c: {two}], {a})",
            f"lax.select({s.value()} > 0, {s.value()}, {s.value()})",
        ]
    )


# ---- derivatives and solvers -------------------------------------------------------------------


def derivative(s: Scope) -> str:
    x = s.real()
    # Third derivatives cancel more than the bits of narrow dtypes.
    wide = s.value(lambda v: v.dtype.kind == "f" and v.dtype.itemsize >= 4)
    f = s.pick([body(s, "y"), function(s, "y", 1), f"y % {s.constant()}"])
    if s.chance(0.3):
        # JAX's derivatives of cumlogsumexp are numbers where infinities make NaN.
        name = s.pick([n for n in RUNNING if n != "np.argsort"])
        f = f"{name}(np.atleast_1d({'np.tanh(y)' if 'logsumexp' in name else 'y'}))"
    return s.pick(
        [
            f"j.grad(lambda y: np.sum({f}))({x})",
            f"j.grad(lambda y: np.sum({f}))({x})",
            f"j.grad(lambda y: np.sum(j.grad(lambda y: np.sum({f}))(y)))({x})",
            f"j.vmap(j.grad(j.grad(j.grad(lambda y: np.sum({f})))))({wide}.reshape(-1))",
            f"j.jvp(lambda y: {f}, ({x},), ({x},))[{s.pick([0, 1])}]",
            f"j.vjp(lambda y: {f}, {x})[0]",
            f"j.jacfwd(lambda y: {f})({x})",
            f"j.jacrev(lambda y: {f})({x})",
            f"j.hessian(lambda y: np.sum({f}))({x})",
            f"j.linearize(lambda y: {f}, {x})[1]({x})",
            f"j.grad(j.checkpoint(lambda y: np.sum({f})))({x})",
            f"j.value_and_grad(lambda y: np.sum({f}))({x})[0]",
        ]
    )


def own_rule(s: Scope) -> str:
    """A function with a rule that is not its derivative, with and without checkpoint."""
    x, f, slope = s.real(), s.pick(SMOOTH), formula(s, ["y"], 1)
    rule = s.pick(
        [
            f"with_jvp(lambda y: {f}(y), lambda y, t: t * ({slope}))",
            f"with_vjp(lambda y: {f}(y), lambda y, t: t * ({slope}))",
        ]
    )
    twice = s.pick([f"(lambda g: lambda y: g(g(y)))({rule})", rule])
    # The second derivative of a rule in JAX's scan is not that of the rule applied twice.
    inside = rule if s.order < 2 else f
    wrapped = s.pick(
        [
            f"j.checkpoint({twice})",
            f"j.checkpoint({twice}, policy=j.checkpoint_policies.dots_saveable)",
            f"j.jit({twice})",
            f"j.vmap({twice})",
            f"(lambda y: lax.scan(lambda c, u: ({inside}(c), c), y, None, length=2)[0])",
            f"(lambda y: lax.cond(np.any(y > 0), {rule}, lambda y: y * 2, y))",
            twice,
        ]
    )
    return f"{wrapped}({x})"


def solve(s: Scope) -> str:
    b, factor = s.real(), s.pick(["2.0", "(2.0 + np.sum({b}) * 0)"]).replace("{b}", s.real())
    matvec = f"lambda y: {factor} * y"
    method = s.pick(["cg", "gmres", "bicgstab"])
    call = s.pick(
        [
            f"lax.custom_linear_solve({matvec}, {b}, lambda f, y: y / 2.0, symmetric=True)",
            f"lax.custom_linear_solve({matvec}, {b}, lambda f, y: y / 2.0, lambda f, y: y / 2.0)",
            f"sparse.{method}({matvec}, np.asarray({b}, 'float32'))[0]",
        ]
    )
    return s.pick(
        [
            call,
            call,
            f"lax.scan(lambda c, u: ({call} * 1, c), {b}, None, length=2)[0]",
            f"lax.switch(1, [lambda: {b}, lambda: {call}])",
            f"lax.custom_root(lambda y: y - {b}, {b} * 0, lambda f, y: y - f(y), lambda g, y: y)",
        ]
    )


STATEMENTS = (
    *[elementwise] * 12,
    *[binary] * 12,
    *[constants] * 3,
    *[ternary] * 5,
    *[cast] * 5,
    *[move] * 9,
    *[reduction] * 5,
    *[running] * 3,
    *[product] * 2,
    *[index] * 8,
    *[sample] * 1,
    *[parallel] * 12,
    *[vmapped] * 7,
    *[loop] * 7,
    *[branch] * 5,
    *[derivative] * 8,
    *[own_rule] * 3,
    *[solve] * 2,
)
