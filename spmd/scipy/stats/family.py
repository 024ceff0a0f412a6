"""Construction of distributions: few formulas of a standard variable become all public functions.

The one idea: a continuous distribution is given in its standard form, with location 0 and scale 1.
`continuous` adds the two, the support, and what follows: `pdf` from `logpdf`, `sf` from `cdf`, and
so on. Where the derived one would lose digits, the table gives a formula of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd import numpy as snp
from spmd.core.aval import typeof
from spmd.numpy.promotion import as_array, check_real, constant_like, promote_args_inexact

if TYPE_CHECKING:
    from spmd.sharding.array import Array

Formula = Callable[..., Any]
Support = Callable[..., tuple[Any, Any]]

_SUMMARIES = {
    "logpdf": "Compute the logarithm of the probability density at `x`.",
    "pdf": "Compute the probability density at `x`.",
    "logpmf": "Compute the logarithm of the probability of `k`.",
    "pmf": "Compute the probability of `k`.",
    "cdf": "Compute the probability of values up to this one.",
    "logcdf": "Compute the logarithm of `cdf`.",
    "sf": "Compute the probability of values above this one.",
    "logsf": "Compute the logarithm of `sf`.",
    "ppf": "Compute the quantile of the probability `q`: the inverse of `cdf`.",
    "isf": "Compute the inverse of `sf` at the probability `q`.",
    "entropy": "Compute the entropy, in nats; it does not depend on `loc`.",
}
_RULES = """{names} broadcast and are promoted to one float dtype.
{meanings}
Raises `ArgumentError` if an argument is no array, `ShapeError` if they do not broadcast, and
`DtypeError` for complex numbers."""
_MEANINGS = {
    "loc": "`loc` moves the distribution.",
    "scale": "`loc` moves the distribution, and `scale` stretches it.",
    "q": "The result is NaN where `{}` is no probability.",
    "shapes": "The result is NaN where {} not valid.",
}
# For each operation its arguments, and the result that they give.
Examples = Mapping[str, tuple[str, str]]


class Distribution:
    """A probability distribution: a namespace of functions, as SciPy's are.

    The functions differ; `dir` lists them. They are elementwise, promote and broadcast their
    arguments, and are differentiable in all that the special functions they use are.

    >>> spmd.scipy.stats.norm
    <distribution norm>
    """

    def __init__(
        self, name: str, doc: str, functions: dict[str, Formula], examples: Examples | None = None
    ):
        self.__name__ = name
        self.__doc__ = doc
        for operation, function in functions.items():
            function.__name__ = operation
            function.__qualname__ = f"{name}.{operation}"
            function.__doc__ = _documentation(name, function, (examples or {}).get(operation))
            setattr(self, operation, function)

    def __repr__(self) -> str:
        return f"<distribution {self.__name__}>"

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Array]: ...


def _documentation(name: str, function: Formula, example: tuple[str, str] | None) -> str | None:
    """The docstring of a distribution's function: meaning, arguments, and maybe an example."""
    operation = function.__name__
    if function.__doc__ or operation not in _SUMMARIES:
        return function.__doc__
    signature = getattr(function, "__signature__", None)
    if signature is None:
        return _SUMMARIES[operation]
    *first, last = signature.parameters
    names = f"{', '.join(f'`{x}`' for x in first)} and `{last}`"
    shapes = [f"`{x}`" for x in first[1:] if x != "loc"]
    meanings = [_MEANINGS[last]]
    if operation in ("ppf", "isf"):
        meanings.append(_MEANINGS["q"].format(first[0]))
    if shapes and last == "scale":
        verb = "is" if len(shapes) == 1 else "are"
        meanings.append(_MEANINGS["shapes"].format(f"{' and '.join(shapes)} {verb}"))
    rules = _RULES.format(names=names, meanings="\n".join(meanings))
    parts = [_SUMMARIES[operation].replace("`q`", f"`{first[0]}`"), rules]
    if example is not None:
        arguments, result = example
        parts.append(f">>> spmd.scipy.stats.{name}.{operation}({arguments})\n{result}\n")
    return "\n\n".join(parts)


# Functions of which weakly typed arrays give such, as in JAX; of the others only scalars do.
_STAY_WEAK = {
    "binom", "expon", "gennorm", "gumbel_l", "gumbel_r", "vonmises", "wrapcauchy",
    "gamma.sf", "gamma.logsf", "logistic.cdf", "logistic.sf", "pareto.logcdf", "poisson.logpmf",
    "poisson.pmf", "uniform.logpdf", "uniform.pdf", "uniform.ppf",
}  # fmt: skip


def _stay_weak(name: str) -> bool:
    """Whether a function, as `stats.gamma.sf`, keeps the weak types of arrays."""
    _, distribution, operation = name.split(".")
    return not _STAY_WEAK.isdisjoint((distribution, f"{distribution}.{operation}"))


def operands(name: str, *xs: Any) -> list[Any]:
    """Real operands of one float dtype, all broadcast to one shape; scalars stay weak."""
    out = [as_array(x) for x in promote_args_inexact(name, *xs)]
    check_real(name, *out)
    shape = np.broadcast_shapes(*(typeof(x).shape for x in out))
    if shape and not _stay_weak(name):
        out = [lax.convert_element_type(x, typeof(x).dtype) for x in out]
    return [snp.broadcast_to(x, shape) for x in out]


def _public(
    name: str, first: str, shapes: str, moved: dict[str, Any], body: Formula
) -> Callable[..., Any]:
    """`body` under the signature (first, *shapes, and those of `moved`, which have defaults)."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(p, kind) for p in (first, *shapes.split())]
    parameters += [inspect.Parameter(p, kind, default=value) for p, value in moved.items()]
    signature = inspect.Signature(parameters)

    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}{signature}: {error}") from None
        bound.apply_defaults()
        return body(*operands(name, *bound.arguments.values()))

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _derive(given: dict[str, Formula]) -> dict[str, Formula]:
    """Standard formulas completed by those that follow from them."""
    out = dict(given)
    if "cdf" not in out and "logcdf" in out:
        out["cdf"] = lambda *xs: snp.exp(given["logcdf"](*xs))
    if "sf" not in out and "logsf" in out:
        out["sf"] = lambda *xs: snp.exp(given["logsf"](*xs))
    if "cdf" not in out and "sf" in out:
        out["cdf"] = lambda *xs: 1 - out["sf"](*xs)
    if "cdf" in out:
        out.setdefault("sf", lambda *xs: 1 - out["cdf"](*xs))
        # A probability near 1 has digits in its complement alone, if a formula gives that.
        both = given.keys() & {"cdf", "logcdf"} and given.keys() & {"sf", "logsf"}
        out.setdefault("logcdf", _logarithm(out["cdf"], out["sf"] if both else None))
        out.setdefault("logsf", _logarithm(out["sf"], out["cdf"] if both else None))
    if "ppf" in out:
        out.setdefault("isf", lambda q, *xs: out["ppf"](1 - q, *xs))
    return out


def _logarithm(probability: Formula, complement: Formula | None) -> Formula:
    """The logarithm of a probability, from its complement where that is the smaller."""

    def formula(*xs: Any) -> Any:
        p = probability(*xs)
        if complement is None:
            return snp.log(p)
        q = complement(*xs)
        near = q < 0.5
        return snp.where(
            near, snp.log1p(-snp.where(near, q, 0.0)), snp.log(snp.where(near, 1.0, p))
        )

    return formula


def _anywhere(*shapes: Any) -> tuple[Any, Any]:
    return -np.inf, np.inf


def _always(*shapes: Any) -> Any:
    return True


def _proper(value: Any, valid: Any) -> Any:
    """A value, and NaN where the shape parameters are not valid."""
    return value if valid is True else snp.where(valid, value, constant_like(value, np.nan))


def continuous(
    name: str,
    doc: str,
    shapes: str = "",
    support: Support = _anywhere,
    valid: Formula = _always,
    examples: Examples | None = None,
    probability: str = "q",
    log_scale: Formula = snp.log,
    **given: Formula,
) -> Distribution:
    """A distribution from formulas of the standard variable z and its shape parameters.

    `support(*shapes)` gives the ends; outside the density is zero. Formulas see z inside only.
    All is NaN where `valid(*shapes)` does not hold. `examples` are shown in docstrings.
    `probability` is JAX's name of the first parameter of `ppf` and `isf`. `log_scale` says what a
    scale takes from the logarithm of the density.
    """
    moved = {"loc": 0, "scale": 1}
    functions: dict[str, Formula] = {}

    def density(x: Any, *rest: Any) -> Any:
        *shape, loc, scale = rest
        z = (x - loc) / scale
        low, high = support(*shape)
        here = ((z >= low) & (z <= high)) | snp.isnan(z)
        # Values outside must be harmless to the formula's derivatives: the nearer end is not.
        middle = 0.0 if support is _anywhere else snp.minimum(low + 0.5, 0.5 * (low + high))
        value = given["logpdf"](snp.where(here, z, middle), *shape) - log_scale(scale)
        return _proper(snp.where(here, value, constant_like(value, -np.inf)), valid(*shape))

    def of_variable(formula: Formula) -> Formula:
        def body(x: Any, *rest: Any) -> Any:
            *shape, loc, scale = rest
            z = (x - loc) / scale
            low, high = support(*shape)
            z = z if support is _anywhere else snp.clip(z, low, high)
            return _proper(formula(z, *shape), valid(*shape))

        return body

    def of_probability(formula: Formula) -> Formula:
        def body(q: Any, *rest: Any) -> Any:
            *shape, loc, scale = rest
            proper = (q >= 0) & (q <= 1)
            value = loc + scale * formula(snp.where(proper, q, 0.5), *shape)
            return _proper(value, proper if valid is _always else proper & valid(*shape))

        return body

    for operation, formula in _derive(given).items():
        full = f"stats.{name}.{operation}"
        if operation == "logpdf":
            functions["logpdf"] = _public(full, "x", shapes, moved, density)
            exponential = _public(
                f"stats.{name}.pdf", "x", shapes, moved, lambda *xs: lax.exp(density(*xs))
            )
            functions["pdf"] = exponential
        elif operation in ("ppf", "isf"):
            functions[operation] = _public(
                full, probability, shapes, moved, of_probability(formula)
            )
        else:
            functions[operation] = _public(full, "x", shapes, moved, of_variable(formula))
    return Distribution(name, doc, functions, examples)


def discrete(
    name: str,
    doc: str,
    shapes: str,
    support: Support,
    logpmf: Formula,
    valid: Formula = _always,
    whole: bool = False,
    **given: Formula,
) -> Distribution:
    """A distribution of whole numbers from `logpmf(k, *shapes)` and maybe others, as `cdf`.

    Other numbers have the probability that the formula gives, as in JAX, or none if `whole`. All is
    NaN where `valid(*shapes)` does not hold.
    """
    moved = {"loc": 0}
    functions: dict[str, Formula] = {}

    def log_probability(k: Any, *rest: Any) -> Any:
        *shape, loc = rest
        k = k - loc
        low, high = support(*shape)
        here = ((k >= low) & (k <= high) & ((k == snp.floor(k)) | (not whole))) | snp.isnan(k)
        value = logpmf(snp.where(here, k, low), *shape)
        return _proper(snp.where(here, value, constant_like(value, -np.inf)), valid(*shape))

    functions["logpmf"] = _public(f"stats.{name}.logpmf", "k", shapes, moved, log_probability)
    functions["pmf"] = _public(
        f"stats.{name}.pmf", "k", shapes, moved, lambda *xs: lax.exp(log_probability(*xs))
    )
    if "entropy" in given:
        entropy, (first, _, rest) = given.pop("entropy"), shapes.partition(" ")
        functions["entropy"] = _public(
            f"stats.{name}.entropy", first, rest, moved, _unmoved(entropy, valid)
        )
    for operation, formula in given.items():
        first = "q" if operation == "ppf" else "k"
        body = _shifted_down if operation == "cdf" else _shifted_up
        functions[operation] = _public(
            f"stats.{name}.{operation}", first, shapes, moved, body(formula, valid)
        )
    return Distribution(name, doc, functions)


def _shifted_down(formula: Formula, valid: Formula) -> Formula:
    def body(k: Any, *rest: Any) -> Any:
        k = snp.floor(k - rest[-1])
        value = formula(snp.where(snp.isnan(k), 0.0, k), *rest[:-1])
        return _proper(value, ~snp.isnan(k) & valid(*rest[:-1]))

    return body


def _unmoved(formula: Formula, valid: Formula) -> Formula:
    """A formula in which `loc` takes part in the shape alone."""
    return lambda *xs: _proper(formula(*xs[:-1]), valid(*xs[:-1])) + 0 * xs[-1]


def _shifted_up(formula: Formula, valid: Formula) -> Formula:
    return lambda q, *rest: _proper(formula(q, *rest[:-1]), valid(*rest[:-1])) + rest[-1]
