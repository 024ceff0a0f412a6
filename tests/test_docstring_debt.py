"""What docstrings of public functions lack, counted: the debt may fall, and never grows.

A docstring has six parts: a first line that is a sentence, the parameters, what happens to shapes,
what happens to dtypes, an example, and the errors that the function raises. `lacks` finds the parts
that are missing. `DEBT` is their number in each namespace. The functions of `MOST_CALLED` have
complete docstrings, except those in `OWED`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

# How many parts are missing in each namespace. A change that lowers a number writes the lower one.
DEBT = {
    "spmd": 0,
    "spmd.numpy": 0,
    "spmd.numpy.fft": 0,
    "spmd.numpy.linalg": 0,
    "spmd.lax": 0,
    "spmd.lax.linalg": 0,
    "spmd.nn": 0,
    "spmd.nn.initializers": 0,
    "spmd.random": 0,
    "spmd.scipy.cluster.vq": 0,
    "spmd.scipy.fft": 0,
    "spmd.scipy.integrate": 0,
    "spmd.scipy.linalg": 0,
    "spmd.scipy.ndimage": 0,
    "spmd.scipy.optimize": 0,
    "spmd.scipy.signal": 0,
    "spmd.scipy.sparse.linalg": 0,
    "spmd.scipy.special": 0,
    "spmd.scipy.stats": 0,
}

# What tutorials and overview pages use.
MOST_CALLED = {
    "spmd": """
        block_until_ready checkpoint device_get device_put devices eval_shape grad hessian jacfwd
        jacrev jit jvp linearize local_devices make_jaxpr make_mesh pmap shard_map value_and_grad
        vjp vmap
    """,
    "spmd.numpy": """
        abs add all allclose any append arange arccos arcsin arctan arctan2 argmax argmin argsort
        array array_equal asarray astype atleast_1d atleast_2d average bincount bitwise_and
        broadcast_arrays broadcast_to ceil clip column_stack concatenate conj corrcoef cos cosh
        count_nonzero cov cross cumprod cumsum deg2rad diag diagonal diff digitize divide dot
        einsum empty empty_like equal exp exp2 expand_dims expm1 eye flip floor floor_divide full
        full_like greater greater_equal histogram hstack hypot identity imag inner interp isclose
        isfinite isinf isnan kron less less_equal linspace log log10 log1p log2 logaddexp
        logical_and logical_not logical_or logspace matmul max maximum mean median meshgrid min
        minimum mod moveaxis multiply nan_to_num nanmean nansum negative nonzero not_equal ones
        ones_like outer pad percentile polyfit polyval power prod quantile ravel real reciprocal
        remainder repeat reshape result_type roll round searchsorted select sign sin sinh sort
        split sqrt square squeeze stack std subtract sum swapaxes take take_along_axis tan tanh
        tensordot tile trace transpose trapezoid tri tril triu true_divide unique vander var vdot
        vectorize vstack where zeros zeros_like
    """,
    "spmd.numpy.fft": "fft fft2 fftfreq fftn fftshift ifft irfft rfft",
    "spmd.numpy.linalg": "cholesky det eigh eigvalsh inv lstsq norm pinv qr slogdet solve svd",
    "spmd.lax": """
        add all_gather all_to_all argmax argmin associative_scan axis_index batch_matmul
        broadcast_in_dim concatenate cond conv conv_general_dilated convert_element_type cumsum dot
        dot_general dynamic_index_in_dim dynamic_slice dynamic_update_slice erf exp expand_dims
        fori_loop full gather iota log map mul pad pmax pmean ppermute psum psum_scatter
        reduce_window reshape rsqrt scan scatter select slice sort stop_gradient switch top_k
        transpose while_loop
    """,
    "spmd.nn": """
        celu dot_product_attention elu gelu glu hard_sigmoid hard_swish hard_tanh leaky_relu
        log_sigmoid log_softmax logsumexp mish one_hot relu relu6 selu sigmoid silu soft_sign
        softmax softplus sparse_plus squareplus standardize swish tanh
    """,
    "spmd.random": """
        PRNGKey bernoulli beta bits categorical choice cauchy dirichlet exponential fold_in gamma
        gumbel key key_data laplace multivariate_normal normal permutation poisson randint split
        truncated_normal uniform wrap_key_data
    """,
    "spmd.scipy.linalg": "cho_factor cho_solve cholesky expm lu solve solve_triangular",
    "spmd.scipy.special": """
        betaln digamma entr erf erfc erfinv expit gammainc gammaln logit logsumexp ndtr ndtri xlogy
    """,
}

# The functions of MOST_CALLED whose docstrings lack something. Names are only ever removed.
OWED: dict[str, str] = {}

# Parameters whose names say what they are, as in NumPy.
OBVIOUS = frozenset("x a x1 x2 y axis dtype shape keepdims out key self".split())

SHAPE_WORDS = re.compile(
    r"\b(shapes?|elementwise|element|elements|broadcasts?|broadcasting|scalars?|sizes?|dims?)\b",
    re.IGNORECASE,
)
DTYPE_WORDS = re.compile(
    r"\b(dtypes?|promoted?|promotion|floats?|floating|bools?|ints?|integers?|complex|float\d\d|"
    r"u?int\d\d?|bfloat16)\b",
    re.IGNORECASE,
)
ERROR_WORDS = re.compile(r"\bRaises\b|\b\w+Error\b")

# Its functions transform functions or describe devices: they have no rule on shapes and dtypes.
WITHOUT_ARRAYS = "spmd"

NAMESPACES = (
    "spmd",
    "spmd.numpy",
    "spmd.numpy.fft",
    "spmd.numpy.linalg",
    "spmd.lax",
    "spmd.lax.linalg",
    "spmd.nn",
    "spmd.nn.initializers",
    "spmd.random",
    "spmd.scipy.cluster.vq",
    "spmd.scipy.fft",
    "spmd.scipy.integrate",
    "spmd.scipy.linalg",
    "spmd.scipy.ndimage",
    "spmd.scipy.optimize",
    "spmd.scipy.signal",
    "spmd.scipy.sparse.linalg",
    "spmd.scipy.special",
    "spmd.scipy.stats",
)


def functions(namespace: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions of a namespace that are ours, with their names."""
    module = importlib.import_module(namespace)
    for name in sorted(getattr(module, "__all__", None) or dir(module)):
        value = getattr(module, name)
        ours = str(getattr(value, "__module__", "")).partition(".")[0] == "spmd"
        if ours and not name.startswith("_") and callable(value) and not inspect.isclass(value):
            yield name, value


# ---- the parts of a docstring ------------------------------------------------------------------


def lacks(function: Callable[..., Any], arrays: bool = True) -> list[str]:
    """The parts that a function's docstring lacks, one name each.

    `arrays` says whether it computes with arrays, so that shapes and dtypes have a rule.
    """
    text = inspect.cleandoc(function.__doc__ or "")
    missing = [] if _is_sentence(text.partition("\n")[0]) else ["first line"]
    quoted = " ".join(re.findall(r"`[^`]+`", text))
    for name in _parameters(function):
        if name not in OBVIOUS and not re.search(rf"\b{re.escape(name)}\b", quoted):
            missing.append(f"parameter {name}")
    prose = "\n".join(line for line in text.splitlines() if not _is_example(line))
    missing += ["shapes"] if arrays and not SHAPE_WORDS.search(prose) else []
    missing += ["dtypes"] if arrays and not DTYPE_WORDS.search(prose) else []
    missing += [] if re.search(r"^\s*>>> ", text, re.MULTILINE) else ["example"]
    missing += ["errors"] if _raises(function) and not ERROR_WORDS.search(text) else []
    return missing


def _is_sentence(line: str) -> bool:
    """Whether a line begins as a sentence, has several words, and ends with a full stop."""
    starts = bool(line) and (line[0].isupper() or line[0] in "`0123456789-")
    return starts and line.endswith(".") and len(line.split()) >= 3


def _is_example(line: str) -> bool:
    return line.lstrip().startswith((">>>", "...", "Array("))


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return [name for name in inspect.signature(function).parameters if name[0] != "_"]
    except (TypeError, ValueError):
        return []


@cache
def _raises(function: Callable[..., Any]) -> bool:
    """Whether the function's own body has a `raise` with an error class, not only its callees'."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (TypeError, OSError):
        return False
    return any(
        isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for node in ast.walk(ast.parse(source))
    )


# ---- the tests ---------------------------------------------------------------------------------


@cache
def _missing(namespace: str) -> dict[str, list[str]]:
    """The functions of a namespace that lack something, with what they lack."""
    arrays = namespace != WITHOUT_ARRAYS
    found = {name: lacks(function, arrays) for name, function in functions(namespace)}
    return {name: parts for name, parts in found.items() if parts}


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_debt_is_what_the_table_says(namespace):
    missing = _missing(namespace)
    count = sum(len(parts) for parts in missing.values())
    shown = "\n".join(f"  {name}: {', '.join(parts)}" for name, parts in missing.items())
    assert count <= DEBT[namespace], f"docstrings of {namespace} lack more than before:\n{shown}"
    assert count == DEBT[namespace], f"the debt fell: write {namespace!r}: {count} in DEBT"


@pytest.mark.parametrize("namespace", MOST_CALLED)
def test_most_called_functions_have_complete_docstrings(namespace):
    names, owed = MOST_CALLED[namespace].split(), set(OWED.get(namespace, "").split())
    public = dict(functions(namespace))
    assert not [name for name in names if name not in public], "there is no such function"
    assert owed <= set(names), "OWED has names that are not in MOST_CALLED"
    missing = _missing(namespace)
    wrong = [f"{n}: {', '.join(missing[n])}" for n in names if n in missing and n not in owed]
    assert not wrong, "incomplete docstrings:\n" + "\n".join(wrong)
    done = [name for name in names if name in owed and name not in missing]
    assert not done, f"these are complete: take them out of OWED: {' '.join(done)}"


def test_every_namespace_has_a_number():
    assert set(DEBT) == set(NAMESPACES) and set(OWED) <= set(MOST_CALLED) <= set(NAMESPACES)


# ---- the rule is itself tested ------------------------------------------------------------------


def test_a_complete_docstring_lacks_nothing():
    def scale(x, factor, *, axis=None):
        """Multiply every element by a number.

        `factor` broadcasts against `x`; both are promoted to one dtype. Raises a `ValueError` if
        `factor` is zero.

        >>> scale(2.0, 3.0)
        6.0
        """
        if factor == 0:
            raise ValueError("zero")
        return x * factor

    assert lacks(scale) == []


def test_every_missing_part_is_found():
    def scale(x, factor):
        """multiply"""
        if factor == 0:
            raise ValueError("zero")
        return x * factor

    expected = ["first line", "parameter factor", "shapes", "dtypes", "example", "errors"]
    assert lacks(scale) == expected


def test_words_of_an_example_are_no_prose():
    def half(x):
        """The half of a number.

        >>> half(np.float32(1))
        Array(0.5, dtype=float32)
        """
        return x / 2

    assert lacks(half) == ["shapes", "dtypes"]
