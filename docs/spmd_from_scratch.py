"""spmd from scratch: the whole idea in one file that you can read over a cup of coffee.

The real system has more than a hundred primitives and a compiler. Its idea fits on a few pages:
`jvp`, `grad`, `vmap`, `jit` (to machine code) and `pmap` (on threads, with `psum`), which all
compose, for arrays of float64. Most chapters end with an `example_...` that asserts what they made
possible; `python docs/spmd_from_scratch.py` runs them. ARCHITECTURE.md has the real system: this,
with dtypes, pytrees, control flow, messages for mistakes, a kernel IR, and other processes.

The plot, in one sentence: *a function is run once on stand-ins for its arguments; the stand-ins
note what happens to them; and every transformation is one way of noting.*
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, make_dataclass
from typing import Any

import llvmlite.binding as llvm
import numpy as np


# Laid out by hand, as the pages of a book are.
# fmt: off
# ==== 1. Primitives and the current trace =========================================================
# An operation that the system knows is a `Primitive`. To use it is to `bind` it: to ask the
# *current trace* what should be done about it. The bottom trace computes with NumPy. All others are
# interpretations that a transformation installs while it runs the user's function, and each knows
# its `parent`, the trace below it that it passes work down to. A transformation never names an
# operation: it asks the primitive for its rule. (The real thing: core/primitive.py, core/trace.py.)
@dataclass(eq=False)
class Primitive:  # one operation and everything that anyone may ask about it
    name: str
    impl: Callable  # what it means, in NumPy
    shape: Callable  # shapes of operands -> shape of the result
    jvp: Any  # per operand: (its tangent, *operands) -> its part of the result's tangent
    transpose: tuple  # per operand: (cotangent, *operands) -> the operand's cotangent
    batch: Callable  # params -> params that do the same to operands with one more dim in front
    native: str = ""  # a line of LLVM IR, for elementwise primitives

    def bind(self, *operands, **params):
        return current_trace().process(self, operands, params)

class Eval:  # the bottom trace: here the stand-ins have run out, and it computes
    def process(self, prim, operands, params):
        return prim.impl(*operands, **params)

_EVAL, _state = Eval(), threading.local()  # each thread runs its own program

def current_trace(): return getattr(_state, "trace", _EVAL)

@contextlib.contextmanager
def running(trace):  # makes `trace` the current one for a while
    before, _state.trace = current_trace(), trace
    try:
        yield trace
    finally:
        _state.trace = before

# A stand-in is a `Tracer`. It points to the trace that made it, and that pointer settles who deals
# with an operation on values of several nested transformations: every trace looks for *its own*
# tracers among the operands and takes the rest for constants.
class Tracer:
    __array_ufunc__ = None  # NumPy: don't try, ask us
    def __init__(self, trace, shape, held):
        # `held` is what its trace knows about it, and nobody else looks at.
        self.trace, self.shape, self.held = trace, shape, held

    def __bool__(self):
        raise TypeError("a tracer has a shape but no value, so Python can't branch on it")

    def __neg__(self): return neg(self)
    def __add__(self, y): return add(self, y)
    def __mul__(self, y): return mul(self, y)
    def __sub__(self, y): return add(self, neg(y))
    def __rsub__(self, y): return add(y, neg(self))
    def __matmul__(self, y): return matmul(self, y)
    def __rmatmul__(self, y): return matmul(y, self)
    __radd__, __rmul__ = __add__, __mul__

def shape_of(x): return x.shape if isinstance(x, Tracer) else np.shape(x)
def belongs(x, trace): return isinstance(x, Tracer) and x.trace is trace

# ==== 2. The operations ===========================================================================
# Most operations that change shapes are *multilinear*: linear in each operand, the others fixed.
# Such a primitive is its own derivative: the part that an operand's tangent plays is the primitive
# itself with the tangent in the operand's place. One definition serves them all.
# `transpose` answers: the operation is a matrix (you never see it); what does its transpose do to a
# cotangent? A sum brings elements together, so its transpose spreads one out again; broadcasting
# spreads, so its transpose sums. `batch` answers: what if every operand had one more dim in front?
# Dims get counted one further, and that's all there is to vectorising.
def multilinear(name, impl, shape, *transpose, batch=lambda size: {}):
    def part(k, tangent, *operands, **params):
        return prim.bind(*operands[:k], tangent, *operands[k + 1 :], **params)
    parts = [functools.partial(part, k) for k, _ in enumerate(transpose)]
    prim = Primitive(name, impl, shape, parts, transpose, batch)
    return prim

def one_further(dims): return tuple(d + 1 for d in dims)

reduce_sum_p = multilinear("reduce_sum",
    lambda x, *, dims: np.sum(x, axis=dims),
    lambda x, *, dims: tuple(n for d, n in enumerate(x) if d not in dims),
    lambda ct, x, *, dims: broadcast_p.bind(ct, shape=shape_of(x), dims=dims),
    batch=lambda size, *, dims: {"dims": one_further(dims)})
broadcast_p = multilinear("broadcast",  # `dims` are the new ones; the others keep their order
    lambda x, *, shape, dims: np.broadcast_to(np.expand_dims(x, dims), shape),
    lambda x, *, shape, dims: shape,
    lambda ct, x, *, shape, dims: reduce_sum_p.bind(ct, dims=dims),
    batch=lambda size, *, shape, dims: {"shape": (size, *shape), "dims": one_further(dims)})
permute_dims_p = multilinear("permute_dims",
    lambda x, *, perm: np.transpose(x, perm),
    lambda x, *, perm: tuple(x[d] for d in perm),
    lambda ct, x, *, perm: permute_dims_p.bind(ct, perm=tuple(np.argsort(perm))),
    batch=lambda size, *, perm: {"perm": (0, *one_further(perm))})
matmul_p = multilinear("matmul",  # of stacks of matrices: to batch it is to add a dim to the stack
    np.matmul,
    lambda x, y: (*x[:-1], y[-1]),
    lambda ct, x, y: matmul_p.bind(ct, _swap_last(y)),
    lambda ct, x, y: matmul_p.bind(_swap_last(x), ct))

# The other family works element by element. Such an operation has a line of LLVM IR, for chapter 7,
# and its derivative is one line of calculus per operand.
def elementwise(name, impl, native, *jvp, transpose=()):
    return Primitive(name, impl, lambda x, *_: x, jvp, transpose, lambda size: {}, native)

def from_libm(name, jvp):
    return elementwise(name, getattr(np, name), f"{{o}} = call double @{name}(double {{0}})", jvp)

neg_p = elementwise("neg", np.negative, "{o} = fneg double {0}",
                    lambda t, x: neg(t), transpose=(lambda ct, x: neg(ct),))
add_p = elementwise("add", np.add, "{o} = fadd double {0}, {1}",
                    lambda t, x, y: t, lambda t, x, y: t,
                    transpose=(lambda ct, x, y: ct, lambda ct, x, y: ct))
mul_p = elementwise("mul", np.multiply, "{o} = fmul double {0}, {1}",
                    lambda t, x, y: mul(t, y), lambda t, x, y: mul(x, t),
                    transpose=(lambda ct, x, y: mul(ct, y), lambda ct, x, y: mul(x, ct)))
sin_p = from_libm("sin", lambda t, x: t * cos(x))
cos_p = from_libm("cos", lambda t, x: -t * sin(x))
exp_p = from_libm("exp", lambda t, x: t * exp(x))
log_p = from_libm("log", lambda t, x: t * exp(-log(x)))
tanh_p = from_libm("tanh", lambda t, x: t * (1 - tanh(x) * tanh(x)))

# Primitives are strict: elementwise operands have equal shapes. The functions that users call bring
# the operands to the longest shape first. The transformations see it happen, which is why nobody
# has to write that the gradient of a bias is a sum.
def broadcast_to(x, shape):
    new = len(shape) - len(shape_of(x))
    return broadcast_p.bind(x, shape=shape, dims=tuple(range(new))) if new else x

def _function(prim):
    def call(*operands):
        shape = max(map(shape_of, operands), key=len)
        return prim.bind(*(broadcast_to(x, shape) for x in operands))
    return call

neg, add, mul = map(_function, (neg_p, add_p, mul_p))
sin, cos, exp, log, tanh = map(_function, (sin_p, cos_p, exp_p, log_p, tanh_p))

def reduce_sum(x, dims=None):
    return reduce_sum_p.bind(x, dims=tuple(range(len(shape_of(x)))) if dims is None else dims)
def matmul(x, y): return matmul_p.bind(x, y)  # of (i, j) and (j, k)

def _swap_last(x):
    n = len(shape_of(x))
    return permute_dims_p.bind(x, perm=(*range(n - 2), n - 1, n - 2))

# User functions return one array or a tuple of them: a list for us, and the way back to their form.
# (Nested containers are base/tree.py; it is careful, long, and changes nothing in this story.)
def unpack(out) -> tuple[list, Callable]:
    return (list(out), tuple) if isinstance(out, tuple) else ([out], lambda outs: next(iter(outs)))

# ==== 3. Forward mode =============================================================================
# A value travels together with its tangent: its change, if the arguments change in a given
# direction. The rule is asked with the *parent* trace current, so what it computes is not
# differentiated again by this trace (but maybe by another one: that is how derivatives nest).
class JVP:
    def __init__(self, parent):
        self.parent = parent
    def split(self, x):
        return x.held if belongs(x, self) else (x, None)  # None: a constant
    def process(self, prim, operands, params):
        pairs = [self.split(x) for x in operands]
        primals = [x for x, _ in pairs]
        moving = [(k, t) for k, (_, t) in enumerate(pairs) if t is not None]
        with running(self.parent):
            out = prim.bind(*primals, **params)
            if not moving:
                return out
            parts = [prim.jvp[k](t, *primals, **params) for k, t in moving]
            return Tracer(self, shape_of(out), (out, functools.reduce(add, parts)))

def jvp(f, primals: Sequence, tangents: Sequence):
    """`f(*primals)`, and how it changes when the arguments change by `tangents`."""
    with running(JVP(current_trace())) as trace:
        pairs = zip(primals, tangents, strict=True)
        out = f(*(Tracer(trace, shape_of(x), (x, t)) for x, t in pairs))
    outs, pack = unpack(out)
    pairs = [trace.split(y) for y in outs]
    with running(trace.parent):
        moved = [broadcast_to(0.0, shape_of(y)) if t is None else t for y, t in pairs]
    return pack(y for y, _ in pairs), pack(moved)

def example_jvp():
    y, t = jvp(lambda x: sin(x) * x, (2.0,), (1.0,))
    assert np.isclose(y, np.sin(2) * 2) and np.isclose(t, np.cos(2) * 2 + np.sin(2))
    derivative = lambda f: lambda x: jvp(f, (x,), (1.0,))[1]  # noqa: E731
    assert derivative(lambda x: x * derivative(lambda y: x + y)(1.0))(2.0) == 1.0
    assert np.isclose(derivative(derivative(derivative(sin)))(1.0), -np.cos(1.0))

# ==== 4. Writing it down: jaxprs ==================================================================
# The second way of noting is to write: operations on our stand-ins become the lines of a program, a
# jaxpr. The parent computes at once what doesn't depend on them: a constant of the program.
Var = make_dataclass("Var", ["shape"], eq=False)
Eqn = make_dataclass("Eqn", ["prim", "operands", "params", "out"], eq=False)  # Vars and constants

class Jaxpr(make_dataclass("Program", ["invars", "eqns", "outs"], eq=False)):
    def __str__(self):
        variables = [*self.invars, *(e.out for e in self.eqns)]
        names = {v: chr(ord("a") + k) for k, v in enumerate(variables)}
        lines = [f"lambda {' '.join(names[v] for v in self.invars)}:"]
        for e in self.eqns:
            operands = [names[x] if isinstance(x, Var) else str(x) for x in e.operands]
            lines.append(f"  {names[e.out]}{[*e.out.shape]} = {e.prim.name} {' '.join(operands)}")
        return "\n".join([*lines, f"  return {' '.join(names[v] for v in self.outs)}"])

class Record:  # writes down what depends on its inputs, and what asks for its named axis
    def __init__(self, parent, axis=None):
        self.parent, self.axis, self.eqns, self.invars = parent, axis, [], []
    def input(self, shape):
        self.invars.append(Var(shape))
        return Tracer(self, shape, self.invars[-1])
    def atom(self, x):
        return x.held if belongs(x, self) else x
    def process(self, prim, operands, params):
        mine = any(belongs(x, self) for x in operands)
        if not mine and params.get("axis", "") != self.axis:
            with running(self.parent):
                return prim.bind(*operands, **params)
        var = Var(prim.shape(*map(shape_of, operands), **params))
        self.eqns.append(Eqn(prim, tuple(map(self.atom, operands)), params, var))
        return Tracer(self, var.shape, var)

    def jaxpr(self, outs):
        return Jaxpr(self.invars, self.eqns, [self.atom(y) for y in outs])

def make_jaxpr(f, *args, axis=None):  # the program of `f`, and the form of its results
    with running(Record(current_trace(), axis)) as trace:
        outs, pack = unpack(f(*(trace.input(shape_of(x)) for x in args)))
    return trace.jaxpr(outs), pack

def example_jaxpr():
    jaxpr, _ = make_jaxpr(lambda x, w: reduce_sum(tanh(x @ w)), np.ones((4, 3)), np.ones((3, 2)))
    wanted = ["lambda a b:", "  c[4, 2] = matmul a b", "  d[4, 2] = tanh c"]
    assert str(jaxpr).splitlines() == [*wanted, "  e[] = reduce_sum d", "  return e"], jaxpr

# ==== 5. Reverse mode, without a tape =============================================================
# Now a small miracle. Run `jvp` on ordinary numbers, but let the *tangents* be `Record`'s
# stand-ins. All primal work depends on no stand-in and happens at once. Only work on
# tangents is written down, and that is a linear program: the derivative at this point, as data.
def linearize(f, *primals):
    with running(Record(current_trace())) as trace:
        out, moved = jvp(f, primals, [trace.input(shape_of(x)) for x in primals])
    outs, pack = unpack(out)
    return outs, trace.jaxpr(unpack(moved)[0]), pack

# A linear program is a matrix, factored into primitives. Its transpose is the product of the
# factors' transposes in reverse order: walk the program backwards, asking each primitive for its
# transpose. Where a variable was used twice, its cotangents add up. This is all of backpropagation.
def transpose(linear: Jaxpr, cotangents: Sequence):
    found: dict[Var, Any] = {}
    def give(x, ct):
        if isinstance(x, Var):
            found[x] = add(found[x], ct) if x in found else ct
    for x, ct in zip(linear.outs, cotangents, strict=True):
        give(x, ct)
    for e in reversed(linear.eqns):
        for k, x in enumerate(e.operands):
            if isinstance(x, Var) and e.out in found:
                give(x, e.prim.transpose[k](found[e.out], *e.operands, **e.params))
    return tuple(found[v] if v in found else broadcast_to(0.0, v.shape) for v in linear.invars)

def vjp(f, *primals):
    """`f(*primals)`, and the function from the results' cotangents to the arguments'."""
    outs, linear, pack = linearize(f, *primals)
    return pack(outs), lambda *cts: transpose(linear, cts)

def grad(f):
    """The gradient of a scalar function, in its first argument."""
    def run(x, *rest):
        _, pullback = vjp(lambda x: f(x, *rest), x)
        return pullback(1.0)[0]
    return run

def example_grad():
    w, x = np.array([[0.3, -0.2]]), np.array([[1.0], [2.0]])
    found = grad(lambda w: reduce_sum(tanh(x @ w)))(w)
    assert np.allclose(found, x.T @ (1 - np.tanh(x @ w) ** 2))
    # The backward pass is made of the same primitives, so it can be differentiated, and recorded.
    assert np.isclose(grad(grad(grad(sin)))(1.0), -np.cos(1.0))
    hessian_vector = lambda v: jvp(grad(lambda x: reduce_sum(exp(x))), (x,), (v,))[1]  # noqa: E731
    assert np.allclose(hessian_vector(np.ones_like(x)), np.exp(x))

# ==== 6. vmap, and axes with names ================================================================
# The third way of noting: a stand-in for *one* example hides an array of all of them, in dim 0. The
# rule says how the params change when every operand has that dim. Operands without it get one
# first, which costs nothing: NumPy broadcasts with a stride of 0.
# A vmap may name its axis. Then the function can look across the examples, which gives collectives
# their meaning before there is any device: `psum` over the name is a sum over dim 0.
class Batch:
    def __init__(self, parent, size, axis):
        self.parent, self.size, self.axis = parent, size, axis
    def whole(self, x):
        if belongs(x, self):
            return x.held
        return broadcast_p.bind(x, shape=(self.size, *shape_of(x)), dims=(0,))
    def process(self, prim, operands, params):
        with running(self.parent):
            if params.get("axis", "") == self.axis:
                return reduce_sum_p.bind(self.whole(operands[0]), dims=(0,))  # psum: equal for all
            if not any(belongs(x, self) for x in operands):
                return prim.bind(*operands, **params)
            out = prim.bind(*map(self.whole, operands), **prim.batch(self.size, **params))
        return Tracer(self, shape_of(out)[1:], out)

def vmap(f, axis_name=None):
    """`f` for each index of the leading dim of its arguments."""
    def run(*args):
        sizes = {shape_of(x)[0] for x in args}
        if len(sizes) != 1:
            raise ValueError(f"vmap: the leading dims have different sizes, {sorted(sizes)}")
        with running(Batch(current_trace(), sizes.pop(), axis_name)) as trace:
            out = f(*(Tracer(trace, shape_of(x)[1:], x) for x in args))
        outs, pack = unpack(out)
        with running(trace.parent):
            return pack(map(trace.whole, outs))
    return run

# `psum` is linear. Its transpose is `psum` too: each member's result depends on all values, so each
# member's cotangent hears from every result. (collectives/ has a dozen more.) Its `impl` is never
# reached: a trace or a device of that axis serves it.
psum_p = multilinear("psum",
    lambda x, *, axis: x, lambda x, *, axis: x,
    lambda ct, x, *, axis: psum(ct, axis),
    batch=lambda size, *, axis: {"axis": axis})

def psum(x, axis):
    """The sum of `x` over all members of a named axis."""
    trace = current_trace()
    while trace is not _EVAL and getattr(trace, "axis", None) != axis:
        trace = trace.parent
    if trace is _EVAL:
        raise NameError(f"psum: no vmap or pmap around it has an axis {axis!r}")
    return psum_p.bind(x, axis=axis)

def example_vmap():
    x = np.arange(6.0).reshape(3, 2)
    slope = grad(lambda row: reduce_sum(tanh(row * row)))
    assert np.allclose(vmap(slope)(x), np.stack([slope(row) for row in x]))
    softmax = vmap(lambda a: exp(a) * exp(-log(psum(exp(a), "i"))), axis_name="i")
    assert np.isclose(softmax(np.arange(4.0)).sum(), 1)

# ==== 7. jit: from a jaxpr to machine code ========================================================
# A compiled function runs in Python once for each combination of shapes; the jaxpr of that run is
# turned into a list of steps, and the steps are all that later calls execute. Dead code goes, and
# elementwise equations that follow each other become one *kernel*: one loop in machine code that
# reads each input once and writes only what is needed outside.
def live(eqns, outs) -> list[Eqn]:
    needed, kept = set(outs), []
    for e in reversed(eqns):
        if e.out in needed:
            kept.append(e)
            needed.update(e.operands)
    return kept[::-1]

def fuse(eqns) -> list[list[Eqn]]:
    # One group of elementwise equations is open; what doesn't read from it goes before it.
    done, group = [], []
    for e in eqns:
        reads = any(x is member.out for member in group for x in e.operands)
        joins = e.prim.native and group and group[0].out.shape == e.out.shape
        if group and not joins and (e.prim.native or reads):
            done, group = [*done, group], []
        if e.prim.native:
            group.append(e)
        else:
            done.append([e])
    return [*done, group] if group else done

# The kernel is written as text, which is what LLVM IR is for. It is given pointers and a count.
def kernel_text(group, inputs, outputs) -> str:
    names = {v: f"%in{k}" for k, v in enumerate(inputs)}
    names |= {e.out: f"%v{k}" for k, e in enumerate(group)}
    body = []
    for k, _ in enumerate(inputs):
        body += [f"%p{k} = getelementptr double, ptr %x{k}, i64 %i"]
        body += [f"%in{k} = load double, ptr %p{k}"]
    for e in group:
        body += [e.prim.native.format(*(names[x] for x in e.operands), o=names[e.out])]
    for k, v in enumerate(outputs):
        body += [f"%q{k} = getelementptr double, ptr %y{k}, i64 %i"]
        body += [f"store double {names[v]}, ptr %q{k}"]
    given = [f"ptr %{x}{k}" for x, vs in (("x", inputs), ("y", outputs)) for k, _ in enumerate(vs)]
    lines = "\n  ".join(body)
    libm = "".join(f"declare double @{f}(double)\n" for f in ("sin", "cos", "exp", "log", "tanh"))
    return f"""{libm}
define void @kernel({", ".join(["i64 %n", *given])}) {{
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  {lines}
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %end
end:
  ret void
}}"""

def compile_kernel(group, inputs, outputs) -> Callable:  # from input arrays to output arrays
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=3)
    module = llvm.parse_assembly(kernel_text(group, inputs, outputs))
    engine = llvm.create_mcjit_compiler(module, machine)
    kinds = [ctypes.c_int64] + [ctypes.c_void_p] * (len(inputs) + len(outputs))
    native = ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address("kernel"))
    shape = group[0].out.shape

    def call(*arrays, _engine=engine):  # the machine code lives as long as its engine
        given, results = [*map(np.ascontiguousarray, arrays)], [np.empty(shape) for _ in outputs]
        if math.prod(shape) > 0:
            native(math.prod(shape), *(x.ctypes.data for x in [*given, *results]))
        return results
    return call

# A program is the steps in order, each reading and writing named values. The function that meets
# the other devices at a `psum` is a parameter: `jit` has none, the next chapter has one.
class Program:
    def __init__(self, jaxpr):
        self.constants: dict[Var, Any] = {}
        eqns = [Eqn(e.prim, [*map(self.name, e.operands)], e.params, e.out) for e in jaxpr.eqns]
        self.invars, self.outs = jaxpr.invars, [*map(self.name, jaxpr.outs)]
        eqns = live(eqns, self.outs)
        self.steps = [self.step(group, eqns) for group in fuse(eqns)]

    def name(self, x) -> Var:  # a constant gets one too
        if isinstance(x, Var):
            return x
        var = Var(shape_of(x))
        self.constants[var] = np.asarray(x, float)
        return var

    def step(self, group, eqns):  # (its equation if not a kernel, function, inputs, outputs)
        if not group[0].prim.native:
            (e,) = group
            return e, e.prim.impl, e.operands, [e.out]
        made = {e.out for e in group}
        read = dict.fromkeys(x for e in group for x in e.operands)  # in order; a set has none
        inputs = [x for x in read if x not in made]
        outside = {x for e in eqns if e not in group for x in e.operands}.union(self.outs)
        outputs = [e.out for e in group if e.out in outside]
        return None, compile_kernel(group, inputs, outputs), inputs, outputs

    def __call__(self, args, meet=None):
        values = self.constants | dict(zip(self.invars, args, strict=True))
        for eqn, function, inputs, outputs in self.steps:
            operands = [values[x] for x in inputs]
            if eqn is None:
                values.update(zip(outputs, function(*operands), strict=True))
            elif "axis" in eqn.params:
                values[eqn.out] = meet(*operands)
            else:
                values[eqn.out] = np.asarray(function(*operands, **eqn.params))
        return [values[x] for x in self.outs]

# Inside another transformation `jit` steps aside: the outermost one compiles everything. (The real
# `jit` is a primitive that holds a jaxpr, with rules like any other: core/call.py.)
def compiled(f, axis=None):
    @functools.cache
    def for_shapes(*shapes):
        jaxpr, pack = make_jaxpr(f, *map(np.empty, shapes), axis=axis)
        return Program(jaxpr), pack
    return lambda args: for_shapes(*map(np.shape, args))

def steps_aside(args):
    return current_trace() is not _EVAL or any(isinstance(x, Tracer) for x in args)

def jit(f):
    find = compiled(f)

    def run(*args):
        if steps_aside(args):
            return f(*args)
        arrays = [np.asarray(x, float) for x in args]
        program, pack = find(arrays)
        return pack(program(arrays))

    run.program = find
    return run

def example_jit():
    def gelu(x):
        return 0.5 * x * (1 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)))
    x = np.linspace(-3, 3, 1000)
    fast = jit(gelu)
    assert np.allclose(fast(x), gelu(x), rtol=1e-13)
    program, _ = fast.program([x])
    assert sum(eqn is None for eqn, *_ in program.steps) == 1  # all the arithmetic is one kernel
    slope = jit(vmap(grad(gelu)))
    assert np.allclose(slope(x), (gelu(x + 1e-6) - gelu(x - 1e-6)) / 2e-6, atol=1e-8)

# ==== 8. pmap: the same program on every device ===================================================
# Everything is in place. The per-device program is traced once, with the axis' name in scope, so
# that collectives become equations like any other. Each device executes the same steps on its own
# shard, and where a step is a collective the devices meet. SPMD: single program, multiple data.
# A device here is a thread, and meeting is a barrier: put your value down, wait for all, add them
# up, in the same order for the same bits. A second barrier keeps the quick from putting the next
# value down while the slow still read. The first device to fail says why; the others don't wait.
# With processes for threads and MPI for the table this is the real thing (transport/).
class Meeting:  # where the devices of an axis meet
    def __init__(self, size):
        self.table, self.barrier, self.error = [None] * size, threading.Barrier(size), None

    def psum(self, device, x):
        self.table[device] = x
        self.barrier.wait()
        total = functools.reduce(np.add, self.table)
        self.barrier.wait()
        return np.asarray(total)

    def run(self, device, program, args):
        try:
            return program(args, functools.partial(self.psum, device))
        except Exception as error:
            self.error = error if not self.barrier.broken else self.error
            self.barrier.abort()
            raise

def pmap(f, axis_name):  # on as many devices as the leading dims are long
    find = compiled(f, axis_name)

    def run(*args):
        if steps_aside(args):
            return vmap(f, axis_name)(*args)  # its meaning, from chapter 6
        arrays = [np.asarray(x, float) for x in args]
        size = len(arrays[0])
        program, pack = find([x[0] for x in arrays])
        meeting = Meeting(size)
        with ThreadPoolExecutor(size) as threads:
            shards = [[np.asarray(x[k]) for x in arrays] for k in range(size)]
            jobs = [threads.submit(meeting.run, k, program, shards[k]) for k in range(size)]
        if meeting.error is not None:
            raise meeting.error
        return pack(map(np.stack, zip(*(job.result() for job in jobs), strict=True)))
    return run

# ==== 9. All of it at once ========================================================================
# Data-parallel training of a small network: each device takes the gradient of its part of the
# batch, a psum makes them equal, everybody makes the same step: machine code in four threads, made
# by traces that know no operation and operations that know no trace.
def example_training():
    devices, rng = 4, np.random.default_rng(0)
    x = rng.normal(size=(devices, 16, 2))
    y = np.sin(2 * x[..., :1]) * x[..., 1:]
    weights = [rng.normal(size=s) * 0.5 for s in ((2, 16), (16,), (16, 1), (1,))]

    def loss(w1, b1, w2, b2, x, y):
        error = tanh(x @ w1 + b1) @ w2 + b2 - y
        return reduce_sum(error * error) * (1 / 64)
    def step(w1, b1, w2, b2, x, y):
        value, pullback = vjp(lambda *w: loss(*w, x, y), w1, b1, w2, b2)
        sums = [psum(g, "devices") for g in pullback(1.0)]
        moved = [w - 0.1 * g for w, g in zip((w1, b1, w2, b2), sums, strict=True)]
        return (*moved, psum(value, "devices"))
    parallel, meaning = pmap(step, "devices"), vmap(step, "devices")
    state = [np.stack([w] * devices) for w in weights]
    check, losses = state, []
    for _ in range(200):
        *state, value = parallel(*state, x, y)
        losses.append(value[0])
    for _ in range(3):
        *check, value = meaning(*check, x, y)
    assert np.isclose(value[0], losses[2], rtol=1e-12)  # devices compute what vmap means
    assert all(np.array_equal(w[0], w[k]) for w in state for k in range(devices))  # to the bit
    assert losses[-1] < 0.1 * losses[0], losses[-1]
    print(f"  loss {losses[0]:.3f} -> {losses[-1]:.3f} on {devices} devices")

if __name__ == "__main__":
    for _name, _example in list(globals().items()):
        if _name.startswith("example_"):
            print(_name)
            _example()
