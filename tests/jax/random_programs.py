"""Random programs of both libraries: drawn from a seed, printed as source, run, compared, shrunk.

    python -m tests.jax 17          # prints the program of seed 17 and what differs from JAX
    python -m tests.jax 0 2000      # runs programs 0 to 1999, prints those that differ, shrunk
    python -m tests.jax deeper 17   # the same for the second family, `statements_deeper`

A program is a few statements over special points in narrow and common dtypes. It is run as it is,
under `jit`, and under `disable_jit`; values, shapes, dtypes and weak types must be JAX's. Some
programs are differentiated first, once or twice. JAX is compared with itself where it and spmd
disagree: a number that its own `jit` and its own evaluation see differently says nothing.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.scipy.sparse.linalg
import spmd.scipy.special
from tests.jax import statements_deeper
from tests.jax.statements import STATEMENTS, Scope, Unusable
from tests.jax.vocabulary import DTYPES, EXTREMES, POINTS, WIDE_DTYPES

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")
pytest.importorskip("jax.scipy.sparse.linalg")
pytest.importorskip("jax.scipy.special")

SHAPES = ((), (4,), (4,), (3,), (2,), (4, 4), (4, 3), (2, 4), (4, 4, 4), (4, 2, 4), (1,), (0,))
ORDERS = (0, 0, 0, 0, 1, 1, 2)
DEEPER_ORDERS = (0, 0, 0, 1, 1, 2, 3)
MODES = ("eager", "jit", "disable_jit")


def is_real(argument: str) -> bool:
    """Whether an argument's source makes a floating array, of a weak type or not."""
    return "float" in argument or ("asarray" in argument and "." in argument)


HEADER = """\
import {library} as j, {library}.numpy as np
from {library} import lax, nn
import {library}.scipy.special as special, {library}.scipy.sparse.linalg as sparse
from numpy import inf, nan
"""

# What programs may call beside the library; part of what is printed.
PRELUDE = """\
def with_jvp(f, rule):
    g = j.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (g(*primals), rule(*primals, *tangents)))
    return g

def with_vjp(f, rule):
    g = j.custom_vjp(f)
    g.defvjp(lambda y: (g(y), y), lambda y, t: (rule(y, t),))
    return g

def gradient(f, argnums):
    def weighted(x):
        weights = np.cos(np.arange(x.size)).reshape(x.shape).astype(x.dtype)
        return np.sum(weights * x, dtype=np.promote_types(x.dtype, "float32"))

    def loss(*args):
        leaves = j.tree_util.tree_leaves(f(*args))
        return sum(weighted(x) for x in leaves if np.issubdtype(x.dtype, np.floating))

    return j.grad(loss, argnums)
"""
PRELUDE += "\n" + statements_deeper.PRELUDE


# ---- programs as source ------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """Arguments and statements `(name, expression)`, what is returned, how often derived."""

    arguments: tuple[tuple[str, str], ...]
    statements: tuple[tuple[str, str], ...]
    returned: tuple[str, ...]
    order: int = 0
    wide: bool = False
    donates: tuple[int, ...] = ()
    called_with: tuple[str, ...] = ()

    def source(self) -> str:
        """The function, without its arguments."""
        lines = [f"def program({', '.join(name for name, _ in self.arguments)}):"]
        lines += [f"    {name} = {expression}" for name, expression in self.statements]
        lines += [f"    return {''.join(f'{name}, ' for name in self.returned).strip()}"]
        return "\n".join(lines)

    def function(self) -> str:
        """The function that is run, as an expression: the program, or a derivative of it."""
        made = "program"
        floats = tuple(k for k, (_, x) in enumerate(self.arguments) if is_real(x))
        for _ in range(self.order):
            made = f"gradient({made}, {floats})"
        return made

    def __str__(self) -> str:
        arguments = "\n".join(f"{name} = {expression}" for name, expression in self.arguments)
        called = ", ".join(self.called_with)
        donates = f", donate_argnums={self.donates}" * bool(self.donates)
        jitted = f"j.jit({self.function()}{donates})"
        parts = [HEADER.format(library="spmd").strip(), PRELUDE.strip(), arguments, self.source()]
        if self.wide:
            parts.insert(1, "# with SPMD_ENABLE_X64=1 in the environment; JAX_ENABLE_X64=1 for JAX")
        parts += [f"print({self.function()}({called}))\nprint({jitted}({called}))"]
        return "\n\n".join(parts)


def names_of(library: Any) -> dict[str, Any]:
    """What `HEADER` and `PRELUDE` define, for one of the libraries."""
    namespace = {
        "j": library,
        "np": library.numpy,
        "lax": library.lax,
        "nn": library.nn,
        "special": library.scipy.special,
        "sparse": library.scipy.sparse.linalg,
        "inf": np.inf,
        "nan": np.nan,
    }
    exec(PRELUDE, namespace)
    return namespace


OURS, THEIRS = names_of(spmd), names_of(jax)


def made(program: Program, names: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The function to run and its arguments, in one of the libraries."""
    namespace = dict(names)
    exec(program.source(), namespace)
    arguments = {name: eval(x, namespace) for name, x in program.arguments}
    return eval(program.function(), namespace), [arguments[name] for name in program.called_with]


# ---- programs from a seed ----------------------------------------------------------------------


def argument(rng: np.random.Generator, wide: bool, usual: int = 8) -> str:
    """An array as source: special points, ties, now and then an infinity or a NaN."""
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    dtypes = [*DTYPES, *["float32"] * usual, *[*WIDE_DTYPES * 3] * wide]
    dtype = dtypes[int(rng.integers(len(dtypes)))]
    if rng.random() < 0.04:
        # Large enough for threads, for blocks, and for what is not worth keeping.
        return f"(np.arange(4096).reshape(64, 64) % 13 - 6).astype('{dtype}')"
    if dtype == "bool":
        values = rng.integers(0, 2, shape).astype(bool)
    elif "int" in dtype:
        low, high = (0, 5) if dtype[0] == "u" or rng.random() < 0.3 else (-4, 5)
        values = rng.integers(low, high, shape)
        if rng.random() < 0.2:
            info = np.iinfo(dtype)
            values = rng.choice(np.array([info.min, info.max, 1, 0], dtype), shape)
    else:
        values = np.round(rng.normal(size=shape), 3)
        special = rng.random(shape) < rng.choice([0, 0.3, 1])
        values = np.where(special, rng.choice(POINTS, shape), values)
        if rng.random() < 0.12:
            values = np.where(rng.random(shape) < 0.3, rng.choice(EXTREMES, shape), values)
    weak = shape == () and dtype in ("float32", "int32") and rng.random() < 0.4
    return f"np.asarray({values.tolist()})" if weak else f"np.array({values.tolist()}, '{dtype}')"


def shapes_in_jax(program: Program) -> list[Any]:
    """What JAX says a program gives: shapes, dtypes, weak types; raises what tracing raises."""
    function, arguments = made(program, THEIRS)
    return jax.tree_util.tree_leaves(jax.eval_shape(function, *arguments))


def accepted(program: Program) -> list[Any] | None:
    """The avals of a program's results, if JAX takes it."""
    try:
        return shapes_in_jax(program)
    except Exception:
        return None


MOST_ELEMENTS = 5000


def draw(seed: int, deeper: bool = False) -> Program:
    """The program of a seed; of the second family, `statements_deeper`, if asked for."""
    rng = np.random.default_rng([seed, 5 + deeper])
    wide = bool(rng.random() < 0.1)
    orders = DEEPER_ORDERS if deeper else ORDERS
    order = orders[int(rng.integers(len(orders)))]
    grammar = statements_deeper.STATEMENTS if deeper else STATEMENTS
    # Third derivatives cancel more than the bits of narrow dtypes.
    wide = wide or order > 2
    with settings(wide):
        scope = Scope(rng, wide, order)
        usual = 2 if deeper else 8
        arguments = [(f"x{k}", argument(rng, wide, usual)) for k in range(int(rng.integers(1, 4)))]
        names = tuple(name for name, _ in arguments)
        program = Program(tuple(arguments), (), names, wide=wide, called_with=names)
        for name, aval in zip(names, shapes_in_jax(program), strict=True):
            scope.avals[name] = aval
        wanted = int(rng.integers(1, 3 if deeper else 5))
        for _ in range(wanted * 6):
            if len(program.statements) == wanted:
                break
            program = extended(program, scope, grammar)
        return finished(program, scope)


def extended(program: Program, scope: Scope, grammar: Sequence[Any]) -> Program:
    """With one statement more, if the one that is drawn makes sense to JAX."""
    try:
        expression = scope.pick(grammar)(scope)
    except Unusable:
        return program
    aval = aval_of(expression, scope.avals)
    if aval is None or aval.size > MOST_ELEMENTS:
        return program
    name = f"v{len(program.statements)}"
    scope.avals[name] = aval
    return replace(program, statements=(*program.statements, (name, expression)))


def aval_of(expression: str, avals: dict[str, Any]) -> Any:
    """The type that JAX gives an expression, if it is one real array."""
    function = eval(f"lambda {', '.join(avals)}: {expression}", dict(THEIRS))
    try:
        aval = jax.eval_shape(function, *avals.values())
    except Exception:
        return None
    is_real = hasattr(aval, "dtype") and aval.dtype.name in (*DTYPES, *WIDE_DTYPES)
    return aval if is_real else None


def finished(program: Program, scope: Scope) -> Program:
    """With results, an order of differentiation that JAX takes, and perhaps donated arguments."""
    names = [name for name, _ in program.statements] or [program.arguments[0][0]]
    returned = dict.fromkeys([names[-1], *([scope.pick(names)] if scope.chance(0.4) else [])])
    program = without_dead(replace(program, returned=tuple(returned)))
    for order in range(scope.order, 0, -1):
        higher = replace(program, order=order)
        if any(is_real(x) for _, x in program.arguments) and accepted(higher):
            return higher
    if scope.chance(0.02):
        called = tuple(program.arguments[0][0] for _ in program.arguments)
        aliased = replace(program, donates=(0,), called_with=called)
        # JAX drops the donation of what no result can take the place of.
        given, results = accepted(replace(aliased, returned=called[:1])), accepted(aliased)
        fits = given and results and typed(given[0]) in map(typed, results)
        return aliased if fits else program
    return program


def without_dead(program: Program) -> Program:
    """Without the statements that no result depends on."""
    alive, kept = " ".join(program.returned), []
    for name, expression in reversed(program.statements):
        if name in alive:
            kept.append((name, expression))
            alive += expression
    return replace(program, statements=tuple(reversed(kept)))


# ---- running -----------------------------------------------------------------------------------


@contextlib.contextmanager
def settings(wide: bool, evaluated: bool = False) -> Iterator[None]:
    """The settings of a program in both libraries: 64-bit dtypes, and evaluation without jit."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(np.errstate(all="ignore"))
        stack.enter_context(jax.enable_x64(wide))
        stack.enter_context(spmd.config.override("enable_x64", wide))
        if evaluated:
            stack.enter_context(jax.disable_jit())
            stack.enter_context(spmd.disable_jit())
        yield


@dataclass(frozen=True)
class Failed:
    """An exception instead of results."""

    error: Exception

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {str(self.error).splitlines()[0][:300]}"


def run(program: Program, names: dict[str, Any], mode: str) -> list[Any] | Failed:
    """The results of a program in one library and mode, or what it raises."""
    library = names["j"]
    try:
        with settings(program.wide, mode == "disable_jit"):
            function, arguments = made(program, names)
            if mode == "jit":
                function = library.jit(function, donate_argnums=program.donates)
            leaves = library.tree_util.tree_leaves(function(*arguments))
            return [library.block_until_ready(x) for x in leaves]
    except Exception as error:
        return Failed(error)


# The results of functions of few bits differ by some units of their last place.
TOLERANCES = {"float64": 1e-8, "float32": 2e-4, "bfloat16": 4e-2, "float16": 8e-3}


# A weak carry becomes strong where the body makes it so, JAX's stays weak; and JAX takes what a
# while loop does not change out of it, computes with derivatives of truth values, broadcasts dims
# of size 1 in lax, leaves a cotangent in another dtype than its argument's, and takes an array that
# is given twice if no result can use the donated one.
REFUSED = (
    *("must return a carry", "float0", "lax does not broadcast", "returned a cotangent"),
    "is donated (donate_argnums)",
    *("matvec must return", "igamma_grad_a"),
    "reverse-mode differentiation does not work for lax.while_loop",
)
TYPED_BY_THEIR_BODY = (
    *("fori_loop", "while_loop", "scan", "lax.cond", "lax.switch", "special.", "np.heaviside"),
    *("j.grad", "j.vjp", "j.jvp", "j.jac", "j.hessian", "j.linearize", "j.value_and_grad"),
)
ROUNDING = (
    *("//", "%", "floor", "ceil", "round", "rint", "trunc", "fix", "mod", "remainder"),
    "period",
)


def difference(found: Any, wanted: Any, order: int, text: str) -> str | None:
    """How one result of a program of some text differs from JAX's, in words."""
    if not hasattr(wanted, "weak_type") and type(found) is type(wanted):
        # Without jit, a branch hands back the Python number that it gave.
        return None if found == wanted else f"values:\n{found}, must be\n{wanted}"
    if not hasattr(found, "weak_type"):
        return f"a {type(found).__name__} instead of an Array"
    # A constant exponent leaves a weak base its type. Which function made it decides in JAX.
    raised = "**" in text and bool(found.weak_type)
    # JAX's reduction of a weak constant over devices is weak under vmap and strong under pmap.
    raised = raised or re.search(r"lax\.p(sum|max|min|mean)\(\(?-?\d", text) is not None
    for name in ("shape",) if raised else ("shape", "dtype"):
        x, y = getattr(found, name), getattr(wanted, name)
        if x != y and "float0" not in str(x):
            return f"{name}: {x}, must be {y}"
    if "float0" in str(found.dtype):
        return None  # JAX gives integers a derivative of zeros
    # Weak truth values promote as others do, and ours are never weak. JAX's loops are weak where
    # their body is, whatever they start with, and its cond where its last branch is; ours have the
    # type that they start with, or that of all branches. In JAX a derivative, or a function of
    # special.*, is weak or not by the operations inside.
    loose = order > 0 or found.dtype == bool or raised
    loose = loose or any(word in text for word in TYPED_BY_THEIR_BODY)
    if not loose and bool(found.weak_type) != bool(wanted.weak_type):
        return f"weak_type: {found.weak_type}, must be {wanted.weak_type}"
    # The larger of 0 and -0 is either, and its inverse either infinity.
    # The sign of -0 is 0, as NumPy and the array API say.
    signless = any(word in text for word in ("relu", "max", "min", "clip", "np.sign("))
    if signless and "signbit" in text:
        return None
    # A sample of a narrow float may be a unit of its last place away, and rounded down beside it.
    # The result of a solver is rounded, and may fall on either side of a whole number.
    rounded = ("random." in text and "float16" in text) or "sparse." in text
    if rounded and any(word in text for word in ROUNDING):
        return None
    # A function of few bits may be a unit away from 1, and counted on the other side of it.
    if "special." in text and any(word in text for word in ("searchsorted", "digitize")):
        return None
    if same_values(np.asarray(found), np.asarray(wanted), order, "float16" in text, signless):
        return None
    return f"values:\n{np.asarray(found)}, must be\n{np.asarray(wanted)}"


def same_values(
    x: np.ndarray, y: np.ndarray, order: int, narrow: bool, signless: bool = False
) -> bool:
    """Whether values agree as far as their dtype, and those of the program, promise."""
    tolerance = TOLERANCES.get(y.dtype.name)
    if tolerance is not None and narrow:
        tolerance = max(tolerance, TOLERANCES["float16"])
    if tolerance is None and not (narrow and y.dtype.kind in "iu"):
        return bool((x == y).all())
    if tolerance is None:
        # Compiled code may keep more bits of a narrow float, and cut it to another integer.
        return bool((np.abs(x.astype(float) - y.astype(float)) <= 1).all())
    # JAX's own formulas multiply 0 by infinity at some poles, where ours find the infinity.
    both = ~(np.isinf(x.astype(np.float64)) & np.isnan(y.astype(np.float64)))
    x, y = x[both].astype(np.float64), y[both].astype(np.float64)
    if signless:
        x, y = (np.where(np.isinf(v), np.inf, v) for v in (x, y))
    tolerance *= 4**order
    # A number that is tiny beside the others came from their difference.
    scale = np.clip(np.abs(y[np.isfinite(y)]).max(initial=0.0), 0.01, 1.0)
    return np.allclose(x, y, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def typed(x: Any) -> tuple[Any, ...]:
    """Shape and dtype of a result; without jit some are Python numbers."""
    return (type(x),) if isinstance(x, (bool, int, float)) else (x.shape, x.dtype)


def with_64_bits(program: Program) -> Program:
    """The program with every float of 64 bits: what results would be without rounding.

    Means of 32-bit integers are floats of 32 bits, so where there are some they get 64 bits, too.
    """
    means = re.search(r"\b(average|mean|nanmean|median|std|var)\(", program.source())

    def widened(text: str) -> str:
        text = re.sub(r"\bint32\b", "int64", text) if means else text
        return re.sub(r"\bb?float(16|32)\b", "float64", text)

    arguments = tuple((name, widened(x)) for name, x in program.arguments)
    statements = tuple((name, widened(x)) for name, x in program.statements)
    return replace(program, arguments=arguments, statements=statements, wide=True)


def has_nan(program: Program) -> bool:
    """Whether a value of the program is NaN somewhere in JAX."""
    everything = tuple(name for name, _ in (*program.arguments, *program.statements))
    values = run(replace(program, returned=everything, order=0), THEIRS, "jit")
    if isinstance(values, Failed):
        return False
    arrays = [np.asarray(x) for x in values]
    return any(np.isnan(x.astype(np.float64)).any() for x in arrays if x.dtype.kind in "fV")


def no_worse(program: Program, found: Any, wanted: Any) -> bool:
    """Whether ours are as near to the results of 64 bits as JAX's are.

    A program may cancel all its digits, and compiled code may keep more bits of a narrow float than
    it shows: two right answers differ then.
    """
    if re.search("signbit|copysign", program.source()) and has_nan(program):
        return True  # a NaN may have either sign
    exact = run(with_64_bits(program), THEIRS, "jit")
    if any(isinstance(x, Failed) for x in (found, wanted, exact)) or "random." in program.source():
        return False
    if [typed(x) for x in found] != [typed(x) for x in wanted]:
        return False
    for x, y, z in zip(found, wanted, exact, strict=True):
        dtype = np.asarray(y).dtype
        with np.errstate(all="ignore"):
            x, y, z = (np.asarray(a).astype(dtype).astype(np.float64) for a in (x, y, z))
        tolerance = TOLERANCES.get(wanted[0].dtype.name, 0.0)
        with np.errstate(all="ignore"):
            # An element of a product is a sum of terms as large as other elements.
            largest = np.abs(z[np.isfinite(z)]).max(initial=1.0)
            near = np.isclose(x, z, tolerance, tolerance * largest, equal_nan=True)
            nearer = np.abs(x - z) <= 2 * np.abs(y - z)
        if not (near | nearer | (x == y) | (np.isnan(x) & np.isnan(y))).all():
            return False
    return True


def compared(program: Program, found: Any, wanted: Any) -> str | None:
    """How the results of one mode differ from JAX's, in words."""
    if isinstance(wanted, Failed):
        # JAX has errors of its own where only results are asked for.
        fails = isinstance(found, Failed) or not program.donates
        return None if fails else f"no error; JAX raises {wanted}"
    if isinstance(found, Failed):
        return None if any(text in str(found) for text in REFUSED) else str(found)
    if len(found) != len(wanted):
        return f"{len(found)} results, must be {len(wanted)}"
    pairs = zip(found, wanted, strict=True)
    text = str((program.arguments, program.statements))
    return next(filter(None, (difference(x, y, program.order, text) for x, y in pairs)), None)


# Seeds of programs whose JAX results are no oracle, each looked into.
NO_ORACLE = {
    46990: "divides a rounding error by 0 where the exact difference is 0, which it is here",
    47010: "cosines that differ by an ulp in JAX, amplified",
    47153: "XLA makes a product with truth values a select, which hides a NaN",
    48326: "the second derivative of betaln: 0.017 in JAX, 0.176 by trigamma",
    49490: "an ulp of 70000.0 ** 3 in JAX, under a sine",
    55381: "an ulp of tanh in JAX, amplified",
    57955: "XLA makes a division by truth values a select, which hides a NaN",
    58349: "a sigmoid in 32 bits under x64 in JAX",
    58947: "gmres with an infinite right side: NaN backwards in JAX, where both give 0 forwards",
    59180: "XLA keeps more bits of bfloat16 than it shows",
    60008: "gammaln(1) is 4.8e-7 in JAX, and 0",
}


def fault(program: Program) -> tuple[str, str] | None:
    """The first mode whose results are not JAX's, and how they differ."""
    evaluate = functools.cache(lambda mode: run(program, THEIRS, mode))
    for mode in MODES:
        found = run(program, OURS, mode)
        # Compilation says nothing of what evaluation does with an array that is given twice.
        references = [mode] if program.donates else ["jit", "eager", "disable_jit"]
        said = None
        for reference in dict.fromkeys(references):
            differs = compared(program, found, evaluate(reference))
            if differs is None:
                break
            said = said or differs
        else:
            if not no_worse(program, found, evaluate("jit")):
                return mode, said or ""
    return None


# ---- shrinking and reporting -------------------------------------------------------------------


def kind(fault: tuple[str, str]) -> tuple[str, str]:
    """The mode and the first word of what is said: what shrinking must keep."""
    return fault[0], fault[1].split(":")[0]


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a result less, a lower order, a statement less, another value for one."""
    for k in range(len(program.returned) * (len(program.returned) > 1)):
        yield replace(program, returned=program.returned[:k] + program.returned[k + 1 :])
    if program.order:
        yield replace(program, order=program.order - 1)
    if program.donates:
        yield replace(program, donates=(), called_with=tuple(n for n, _ in program.arguments))
    for k in range(len(program.statements)):
        known = [n for n, _ in (*program.arguments, *program.statements[:k])]
        for name in known[::-1]:
            yield replaced(program, k, name)
    if len(program.statements) > 1:
        last, _ = program.statements[-2]
        yield replace(program, statements=program.statements[:-1], returned=(last,))


def replaced(program: Program, k: int, name: str) -> Program:
    """With a value known before instead of what a statement makes."""
    gone = program.statements[k][0]
    after = [(n, re.sub(rf"\b{gone}\b", name, x)) for n, x in program.statements[k + 1 :]]
    returned = tuple(name if n == gone else n for n in program.returned)
    return replace(program, statements=(*program.statements[:k], *after), returned=returned)


def shrunk(program: Program, tries: int = 40) -> Program:
    """A smaller program that fails alike, greedily, after at most so many runs."""
    first = fault(program)
    assert first is not None
    candidates = smaller(program)
    while tries and (candidate := next(candidates, None)) is not None:
        candidate = without_dead(candidate)
        with settings(candidate.wide):
            if candidate == program or accepted(candidate) is None:
                continue
        tries -= 1
        now = fault(candidate)
        if now is not None and kind(now) == kind(first):
            program, candidates = candidate, smaller(candidate)
    return program


def report(seed: int | str, program: Program) -> str:
    """What a failing test shows: what differs, and the program to paste."""
    small = shrunk(program)
    mode, said = fault(small) or fault(program) or ("", "it does not fail again")
    return f"seed {seed}, {mode}: {said}\n\n{small}\n"
