"""Attention as one launch: tiles of queries and keys, and the scores of a tile in registers.

A block has the queries of one key head, those of all its query heads, so that keys and values are
read once for a tile of them. The gradient of queries is a launch of the same kind; in that of keys
and values a block has keys, and walks over the queries. `attention.cuh` has the loops, and
`tensor_attention.cuh` those of 16-bit floats and TF32, which tensor cores multiply; the text here
says how a product becomes a score, and which keys queries may see.
"""

from __future__ import annotations

import math

from spmd.base.record import record
from spmd.compile.cuda.kernel import as_function
from spmd.compile.cuda.launch import MOST_SHARED, Launch, Rendered
from spmd.compile.cuda.tensor_product import CHUNK, DTYPES, WARP
from spmd.compile.cuda.text import Text, linear
from spmd.compile.kernel.attention import (
    FORWARD,
    KEY_GRAD,
    QUERY_GRAD,
    BlockedAttention,
    Extra,
    check_attention,
)
from spmd.compile.kernel.dtypes import itemsize

SIDE = 16
# Rows of a block and of the tiles that it walks over, the best first.
TILES = ((64, 64), (64, 32), (64, 16), (32, 32), (32, 16), (16, 16))
# A thread has at most so many sums, of its rows times features, for the registers there are beside
# the scores: two products of them are there at once in gradients.
MOST_SUMS = {FORWARD: 64, QUERY_GRAD: 64, KEY_GRAD: 32}
_CALLS = {FORWARD: "attend", QUERY_GRAD: "attend_query_grad", KEY_GRAD: "attend_key_grad"}


# On tensor cores a thread has at most so many sums and scores, and a warp sums so many features.
MOST_TENSOR_SUMS = 160
MOST_FEATURES_OF_SUMS = {FORWARD: 256, QUERY_GRAD: 256, KEY_GRAD: 128}
WARP_ROWS = 16


@record
class Tiling:
    """Rows of a block and of the tiles that it walks over; shared bytes; threads.

    On tensor cores `parts` warps have the same rows, of all features each a part; else it is 0.
    """

    own: int
    other: int
    shared: int
    threads: tuple[int, int] = (SIDE, SIDE)
    parts: int = 0


def takes_tensor_cores(given: BlockedAttention) -> bool:
    """Say whether tensor cores compute both products."""
    return given.tf32 or given.dtype in DTYPES


def plan_attention(given: BlockedAttention) -> Tiling:
    """Choose the largest tiles that fit, no larger than there are rows."""
    keys_own = given.part == KEY_GRAD
    rows = given.keys if keys_own else given.rows
    others = given.rows if keys_own else given.keys
    plan = _tensor_tiling if takes_tensor_cores(given) else _tiling
    for own, other in TILES:
        tiling = plan(given, own, other)
        fits = tiling is not None and own < 2 * rows and other < 2 * others
        if tiling is not None and (fits or (own, other) == TILES[-1]):
            return tiling
    raise AssertionError("the last tiles fit everything")


def _tiling(given: BlockedAttention, own: int, other: int) -> Tiling | None:
    """The tiling of plain arithmetic, if it fits."""
    shared = _shared_bytes(given, own, other)
    sums = own // SIDE * -(-given.features // SIDE) * (2 if given.part == KEY_GRAD else 1)
    if shared > MOST_SHARED or sums > MOST_SUMS[given.part]:
        return None if (own, other) != TILES[-1] else Tiling(own, other, shared)
    return Tiling(own, other, shared)


def _tensor_tiling(given: BlockedAttention, own: int, other: int) -> Tiling | None:
    """The tiling of tensor cores, if it fits: `tensor_attention.cuh` has the arrays."""
    features = -(-given.features // WARP_ROWS) * WARP_ROWS
    parts = -(-features // MOST_FEATURES_OF_SUMS[given.part])
    chunks = features * itemsize(given.dtype) // CHUNK
    few = () if given.tf32 else (2, 4)
    chunks = next((n for n in few if chunks <= n), -(-chunks // 8) * 8)
    mine, tile = CHUNK * chunks * own, CHUNK * chunks * other
    summed = features // parts * WARP_ROWS // WARP
    scores = other * WARP_ROWS // WARP
    match given.part:
        case "forward":
            shared, sums = mine + 4 * tile + 2 * 4 * own, summed + scores
        case "query_grad":
            shared, sums = 2 * mine + 4 * tile, summed + 2 * scores
        case _:
            shared = 2 * mine + 2 * (2 * tile + 3 * 4 * other)
            sums = 2 * (summed + scores)
    if shared > MOST_SHARED or sums > MOST_TENSOR_SUMS:
        return None
    return Tiling(own, other, shared, (own // WARP_ROWS * parts * WARP, 1), parts)


def _shared_bytes(given: BlockedAttention, own: int, other: int) -> int:
    """Bytes that `attention.cuh` keeps of tiles: features of rows, scores, numbers of rows."""
    pitch = 4 * (-(-given.features // 4) | 1)
    apart = SIDE * SIDE // own
    scores = own * (other + (apart if other // apart % 2 == 0 else 0))
    match given.part:
        case "forward":
            words = (own + 2 * other) * pitch + scores + 3 * own
        case "query_grad":
            words = (2 * own + 2 * other) * pitch + scores + 3 * own
        case _:
            words = (2 * own + 2 * other) * pitch + 2 * scores + 3 * other
    return 4 * words


def render_attention(given: BlockedAttention) -> Rendered:
    """Render one part; its arguments are what it reads, then what it writes."""
    check_attention(given)
    tiling, text = plan_attention(given), Text()
    text.depth = 1
    rows = given.keys if given.part == KEY_GRAD else given.rows
    tiles = -(-rows // tiling.own)
    a = given
    text.add(f"// {tiling.own} rows a block, tiles of {tiling.other}")
    place = f"(int)blockIdx.x / {tiles * a.heads}, (int)blockIdx.x / {tiles} % {a.heads}"
    text.add(f"const Attended at = {{{place},")
    text.add(f"    {a.heads}, {a.groups}, {a.queries}, {a.keys}, {a.features}}};")
    text.add(f"const int first = (int)blockIdx.x % {tiles} * {tiling.own};")
    _write_score(given, text)
    _write_near(given, text)
    at_once = math.gcd(a.features, CHUNK // itemsize(a.dtype)) if a.aligned else 1
    flags = [] if tiling.parts else [at_once % 4 == 0]
    if a.part != QUERY_GRAD:
        flags.append(_may_see_none(given))
    if a.part == FORWARD:
        flags.append(a.numbers)
    known = [str(n) for n in (tiling.own, tiling.other, a.features)]
    known += [str(at_once), str(tiling.parts)] if tiling.parts else []
    known += ["true" if flag else "false" for flag in flags]
    arrays = [name for name in (*a.reads, *a.writes) if not name.startswith("extra")]
    arrays += [] if a.numbers else ["nullptr", "nullptr"]
    arrays = [f"(f32 *){name}" if name == "nullptr" else name for name in arrays]
    numbers = [] if a.part == FORWARD else [_literal(a.scale)]
    shared = "shared" if tiling.parts else "(f32 *)shared"
    call = _CALLS[a.part] + ("_tensor" if tiling.parts else "")
    given_to = [shared, *arrays, "at", "first", *numbers, "score", "near"]
    text.add(f"{call}<{', '.join(known)}>(")
    text.add(f"    {', '.join(given_to)});")
    function = as_function(
        f"{a.part} of attention",
        [*(f"const {_dtype(a, name)} *{name}" for name in a.reads),
         *(f"{_dtype(a, name)} *{name}" for name in a.writes)],
        text,
        Launch(a.batch * a.heads * tiles, tiling.threads, tiling.shared),
        tuple(range(len(a.reads) + len(a.writes))),
        True,
        # One block of a multiprocessor is enough: ptxas would rather spill than have one only.
        ", 1",
    )  # fmt: skip
    return Rendered((function,))


def _dtype(given: BlockedAttention, name: str) -> str:
    if name.startswith("extra"):
        return given.extras[int(name.removeprefix("extra"))].dtype
    return "f32" if name in ("top", "rest", "delta") else given.dtype


def _may_see_none(given: BlockedAttention) -> bool:
    """Whether a query may find no key, where some keys are too far away to be seen."""
    is_limited = (given.causal or given.window is not None) and not given.shifted
    return is_limited and (bool(given.extras) or given.window is not None)


def _write_score(given: BlockedAttention, text: Text) -> None:
    """Write how a product becomes a score, and whether the key is seen."""
    head = "const auto score = [&](f32 product, int row, int key, bool &seen) -> f32"
    with text.block(head):
        text.add(f"const int group = row / {given.queries}, query = row % {given.queries};")
        text.add(f"f32 value = product * {_literal(given.scale)};")
        extras = list(enumerate(given.extras))
        if given.bias:
            number, extra = extras.pop(0)
            text.add(f"value += (f32)load(&extra{number}[{_place(given, extra)}]);")
        position = "query"
        if given.shifted:
            number, extra = extras.pop()
            position = "position"
            text.add(f"const int position = query + extra{number}[{_place(given, extra)}];")
        conditions = [f"extra{number}[{_place(given, extra)}]" for number, extra in extras]
        if given.causal:
            conditions.append(f"{position} >= key")
        if given.window is not None:
            left, right = given.window
            conditions.append(f"{position} <= key + {left}")
            conditions.append(f"{position} >= key - {right}")
        if conditions:
            text.add(f"seen = {' && '.join(conditions)};")
            text.add("return seen ? value : HIDDEN;")
        else:
            text.add("return value;")
    text.lines[-1] += ";"


def _place(given: BlockedAttention, extra: Extra) -> str:
    """The place of an extra's element, in its own row-major order."""
    sizes = (given.batch, given.heads, given.groups, given.queries, given.keys)
    names = ("(i64)at.batch", "at.head", "group", "query", "key")
    terms, step = [], 1
    for size, name, whole in reversed(list(zip(sizes, names, extra.whole, strict=True))):
        if whole:
            terms.append((name, step))
            step *= size
    return linear(0, terms[::-1])


def _write_near(given: BlockedAttention, text: Text) -> None:
    """Write whether queries from a position to another may see one of some keys."""
    conditions = []
    if not given.shifted:
        if given.causal:
            conditions.append("key <= last")
        if given.window is not None:
            left, right = given.window
            conditions.append(f"key <= last + {right}")
            conditions.append(f"key + count > first - {left}")
    holds = " && ".join(conditions) or "true"
    text.add("const auto near = [](int first, int last, int key, int count) {")
    text.add(f"  return {holds};")
    text.add("};")


def _literal(value: float) -> str:
    return f"(f32){value!r}"
