"""Arrays over a mesh: what `jit` makes of them, and operations outside of it.

The devices are the virtual ones of a process, or one of each rank (`over_ranks`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy

from benchmarks.case import BOTH, Case, integers, normal
from benchmarks.sides import Side

LAYERS, WIDTH, HEADS, HIDDEN, TOKENS, BATCH, TIME = 2, 128, 8, 512, 256, 16, 64

Spec = tuple[Any, ...]
Body = Callable[..., Any]


def mesh_of(side: Side, **axes: int) -> Any:
    """A mesh over the first devices, whose axes the compiler decides about."""
    count = numpy.prod(list(axes.values()))
    devices = numpy.array(side.top.devices()[:count]).reshape(tuple(axes.values()))
    return side.top.sharding.Mesh(devices, tuple(axes))


def placed(side: Side, mesh: Any, x: Any, spec: Spec) -> Any:
    """An array over a mesh."""
    return side.top.device_put(x, side.top.NamedSharding(mesh, side.top.P(*spec)))


def call(
    side: Side,
    body: Body,
    axes: dict[str, int],
    operands: tuple[tuple[tuple[int, ...], Spec], ...],
    out: Spec | None = None,
    eager: bool = False,
) -> Callable[[], Any]:
    """A call of `body(side, *arrays)`, jitted unless it is eager; `out` lays the result out."""
    mesh = mesh_of(side, **axes)
    arrays = [placed(side, mesh, normal(*s, seed=k), spec) for k, (s, spec) in enumerate(operands)]
    function = partial(body, side)
    if not eager:
        wanted = None if out is None else side.top.NamedSharding(mesh, side.top.P(*out))
        options = {} if wanted is None else {"out_shardings": wanted}
        function = side.jit(function, **options)
    return lambda: function(*arrays)


# ---- a language model --------------------------------------------------------------------------


def lm_params() -> dict[str, numpy.ndarray]:
    """Weights of layers one behind the other, and the embedding that also makes the scores."""
    shapes = {
        "emb": (TOKENS, WIDTH),
        "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
    }
    shapes |= dict.fromkeys("qkvo", (LAYERS, WIDTH, WIDTH))
    return {k: normal(*s, seed=1) / numpy.float32(s[-2] ** 0.5) for k, s in shapes.items()}


def lm_loss(side: Side, p: Any, tokens: Any) -> Any:
    """Mean cross entropy of the next token."""
    np, nn = side.np, side.nn

    def norm(x: Any) -> Any:
        return x * side.lax.rsqrt(np.mean(x * x, -1, keepdims=True) + 1e-5)

    x = p["emb"][tokens[:, :-1]]
    b, t, d = x.shape
    for n in range(LAYERS):
        h = norm(x)
        q, k, v = ((h @ p[name][n]).reshape(b, t, HEADS, d // HEADS) for name in "qkv")
        seen = nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + seen.reshape(b, t, d) @ p["o"][n]
        x = x + nn.gelu(norm(x) @ p["up"][n]) @ p["down"][n]
    scores = nn.log_softmax(norm(x) @ p["emb"].T)
    return -np.mean(np.take_along_axis(scores, tokens[:, 1:, None], -1))


def lm_step(side: Side, p: Any, tokens: Any) -> Any:
    """One step of gradient descent."""
    value, slope = side.top.value_and_grad(partial(lm_loss, side))(p, tokens)
    return side.tree.map(lambda w, g: w - 0.01 * g, p, slope), value


COLUMNS, ROWS = (None, None, "model"), (None, "model")
TENSOR = dict.fromkeys(("q", "k", "v", "up"), COLUMNS) | dict.fromkeys(("o", "down"), ROWS)
SHARDED = {"emb": ("data",), **dict.fromkeys(("q", "k", "v", "o", "up", "down"), (None, "data"))}
PLANS: dict[str, tuple[tuple[str, ...], dict[str, Spec], Spec]] = {
    "data parallel": (("data",), {}, ("data",)),
    "fully sharded": (("data",), SHARDED, ("data",)),
    "tensor parallel": (("model",), TENSOR, ()),
    "data and tensor": (("data", "model"), TENSOR, ("data",)),
}


def train_lm(side: Side, plan: str, devices: int) -> Callable[[], Any]:
    """Steps that follow each other."""
    names, specs, split = PLANS[plan]
    axes = {names[0]: devices} if len(names) == 1 else {names[0]: devices // 2, names[1]: 2}
    mesh = mesh_of(side, **axes)
    state = {k: placed(side, mesh, w, specs.get(k, ())) for k, w in lm_params().items()}
    tokens = placed(side, mesh, integers(TOKENS, BATCH, TIME + 1), split)
    step = side.jit(partial(lm_step, side))

    def run() -> Any:
        nonlocal state
        state, loss = step(state, tokens)
        return loss

    return run


# ---- cases -------------------------------------------------------------------------------------


def sharding_cases(devices: int = 8) -> list[Case]:
    """Products, steps of a model, moves, operations along a split dim, operations outside jit."""
    ring, grid = {"x": devices}, {"x": devices // 2, "y": 2}
    square, small, large = (1024, 1024), (8, 8), (2048, 4096)

    def product(side: Side, a: Any, b: Any) -> Any:
        return a @ b

    jitted: dict[str, tuple[Body, dict[str, int], Any, Spec | None]] = {
        "product, rows": (product, ring, ((square, ("x",)), (square, ())), None),
        "product, contracted": (product, ring, ((square, (None, "x")), (square, ("x",))), None),
        "product, contracted, by rows": (
            product, ring, ((square, (None, "x")), (square, ("x",))), ("x",),
        ),
        "product, rows x columns": (product, ring, ((square, ("x",)), (square, (None, "x"))), None),
        "product, two dims": (product, grid, ((square, ("x", "y")), (square, ("x", "y"))), None),
        "lookup, table by rows": (
            lambda side, t: t[side.np.arange(2048) * 7 % 8192],
            ring, (((8192, 256), ("x",)),), None,
        ),
        "cumsum along the split dim": (
            lambda side, a: side.np.cumsum(a, 0), ring, (((256, 1024), ("x",)),), None,
        ),
        "sort along the split dim": (
            lambda side, a: side.np.sort(a, 0), ring, ((square, ("x",)),), None,
        ),
        "softmax of split classes": (
            lambda side, a: side.nn.softmax(a), ring, ((large, (None, "x")),), None,
        ),
        "three neighbours, summed": (
            lambda side, a: side.np.abs(a[1:-1] + a[2:] + a[:-2]).sum(0),
            ring, ((large, ("x",)),), None,
        ),
        "roll along the split dim": (
            lambda side, a: side.np.roll(a, 1, 0) + a, ring, ((large, ("x",)),), None,
        ),
        "convolution, split along the height": (
            lambda side, x, k: side.lax.conv_general_dilated(
                x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            ring, (((4, 128, 128, 16), (None, "x")), ((3, 3, 16, 16), ())), None,
        ),
        "top_k along the split dim": (
            lambda side, a: side.lax.top_k(a, 8)[0], ring, ((large, (None, "x")),), None,
        ),
        "32 MiB reversed": (lambda side, a: side.np.flip(a, 0), ring, ((large, ("x",)),), ("x",)),
        "32 MiB from rows to columns": (lambda side, a: a, ring, ((large, ("x",)),), (None, "x")),
        "call of x + 1, 8 x 8": (lambda side, a: a + 1, grid, ((small, ("x", "y")),), None),
    }  # fmt: skip
    eager: dict[str, Body] = {
        "x + 1": lambda side, a: a + 1,
        "x[0]": lambda side, a: a[0],
        "x.sum()": lambda side, a: a.sum(),
        "x @ x.T": lambda side, a: a @ a.T,
    }
    cases = [
        Case(f"sharding/{name}", partial(call, body=body, axes=axes, operands=given, out=out))
        for name, (body, axes, given, out) in jitted.items()
    ]
    cases += [
        Case(
            f"sharding/outside jit, {name}, 8 x 8",
            partial(call, body=body, axes=grid, operands=((small, ("x", "y")),), eager=True),
        )
        for name, body in eager.items()
    ]
    cases += [
        Case(
            f"sharding/language model, {plan}",
            partial(train_lm, plan=plan, devices=devices),
            tolerance=1e-3,
        )
        for plan in PLANS
    ]
    return [case.replace(sides=BOTH, devices=devices) for case in cases]


# ---- over ranks --------------------------------------------------------------------------------

# JAX gathers the array for it, element by element, which takes minutes over gloo.
_TOO_SLOW = ("cumsum along the split dim", "sort along the split dim", "top_k along the split dim")


def over_ranks(ranks: int) -> list[Case]:
    """The jitted cases that run over ranks of one device each, by the names of that setting."""
    cases = [c for c in sharding_cases(ranks) if "outside jit" not in c.name]
    cases = [c for c in cases if not c.name.endswith(_TOO_SLOW)]
    return [c.replace(name=f"{c.name}, {ranks} ranks") for c in cases]
