"""Sorting keys in place: quicksort in vectors, bounded by a sort by bytes.

The one idea: a partition compresses the lower keys of a register to the left and the others into
scratch memory, without a branch for any key; a hundred keys are sorted between registers. Pivots
are medians of samples, so it takes a contrived row to make bad ones: when partitions have gone
through more keys than any ordinary row needs, the rest is sorted by its bytes. So is everything
where the processor cannot compress a register.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from spmd.base.record import record
from spmd.compile.cpu.sort.network import COLUMN_NETWORKS, Keys, network
from spmd.compile.native.llvm.function_builder import Function, Value, Variable
from spmd.compile.native.llvm.shared_functions import share
from spmd.compile.native.llvm.vectors import lane_mask, splat

# Registers of a partition's turn.
_TURN = 4
# From so many keys on a pivot is the middle one of a larger sample.
LARGE_SAMPLE_FROM = 2048
_SMALL_SAMPLE, LARGE_SAMPLE = 16, 64
# How often partitions may go through a row, besides twice the logarithm of its length.
EXTRA_PASSES = 8
# The larger part of each partition waits: one for each bit of a length.
_WAITING = 64
_BUCKETS = 256

# The attribute of functions without vectors that LLVM is to compile soon rather than well.
RARE = " optnone"


@record
class Sorter:
    """A function `(place, count, scratch)` that sorts keys, for texts that call it."""

    name: str
    # The functions that define it, or their declarations, with all that it calls.
    functions: Sequence[Function]
    declared: Sequence[str]


def sorter(keys: Keys, compresses: bool, registers: int) -> Sorter:
    """The function that sorts keys; scratch memory is as long as these and a register.

    `compresses` says whether the processor compresses registers; there are no more keys than
    `registers` hold, if that is not 0.
    """
    if registers:
        networks, declared = _networks(keys, [registers])
        small = _small(keys, [registers])
        return Sorter(small.name, [*networks, small], declared)
    symbol = share(f"sort_i{keys.bits}", _keys_text(keys, compresses), optimize=True)
    return Sorter(symbol, (), [_declared(symbol, *_SORTER)])


def halving(keys: Keys, sorts: Sorter) -> tuple[list[Function], list[str]]:
    """The function `sort_halves` with its callees, and its declarations besides `sorts`."""
    functions = [_pivot(keys, sorts.name, rare=True), _halves(keys)]
    return functions, [_declared(partition_symbol(keys), *_partition_type(keys))]


_SORTER = ("void", "ptr", "i64", "ptr")


def _declared(symbol: str, returns: str, *params: str) -> str:
    return f"declare {returns} @{symbol}({', '.join(params)})"


# ---- compiled by LLVM beside the rest, since it takes as long ----


@cache
def network_symbol(keys: Keys) -> str:
    """The shared function of the largest network."""
    f = network(keys, max(COLUMN_NETWORKS), "SYMBOL", internal=False)
    return share(f"sort_network_i{keys.bits}", f"{keys.declarations()}\n{f.text()}")


@cache
def partition_symbol(keys: Keys) -> str:
    """The shared function of a partition."""
    text = f"{declarations(keys)}\n{_partition(keys).text()}"
    return share(f"sort_partition_i{keys.bits}", text, optimize=True)


def _partition_type(keys: Keys) -> tuple[str, ...]:
    return "i64", "ptr", "i64", keys.element, "ptr"


def _networks(keys: Keys, sizes: Sequence[int]) -> tuple[list[Function], list[str]]:
    """The networks of so many registers, and declarations of those that are elsewhere."""
    largest = max(COLUMN_NETWORKS)
    written = [network(keys, n, _network(keys, n)) for n in sizes if n < largest]
    declared = [_declared(network_symbol(keys), "void", "ptr", "i64")] if largest in sizes else []
    return written, declared


def _keys_text(keys: Keys, compresses: bool) -> str:
    """The text that sorts any number of keys."""
    # For the rests of partitions, networks between the least and the largest are no faster.
    sizes = [min(COLUMN_NETWORKS), max(COLUMN_NETWORKS)]
    networks, declared = _networks(keys, sizes)
    parts = [*networks, _small(keys, sizes), _by_bytes(keys, rare=compresses)]
    if compresses:
        declared.append(_declared(partition_symbol(keys), *_partition_type(keys)))
        parts += [_pivot(keys, "sort_small"), _quick(keys)]
    else:
        parts.append(_plain(keys))
    return "\n".join((declarations(keys), *declared, *(f.text() for f in parts)))


def declarations(keys: Keys) -> str:
    """Declarations of their other callees."""
    return "\n".join(
        (
            "declare ptr @memcpy(ptr, ptr, i64)",
            "declare i64 @llvm.ctlz.i64(i64, i1)",
            "declare i64 @llvm.ctpop.i64(i64)",
            f"declare {keys.vector} @{_compress(keys)}({keys.vector}, {keys.mask}, {keys.vector})",
            keys.declarations(),
        )
    )


def _network(keys: Keys, registers: int) -> str:
    shared = registers == max(COLUMN_NETWORKS)
    return network_symbol(keys) if shared else f"sort_{registers}_registers"


def _compress(keys: Keys) -> str:
    return f"llvm.experimental.vector.compress.v{keys.lanes}{keys.element}"


def inner(keys: Keys, name: str, returns: str, *params: str, rare: bool = False) -> Function:
    """A function that only others of its text call; a `rare` one is compiled as fast as can be."""
    attributes = f"{keys.attributes} noinline{RARE if rare else ''}"
    return Function(name, returns, params, internal=True, attributes=attributes)


def _outer(keys: Keys, returns: str, *params: str) -> Function:
    """The function of a shared text."""
    return Function("SYMBOL", returns, params, attributes=keys.attributes)


def _most(keys: Keys) -> int:
    """The number of keys the largest network sorts."""
    return max(COLUMN_NETWORKS) * keys.lanes


def _small(keys: Keys, sizes: Sequence[int]) -> Function:
    """Sort not more keys than the last network does: `sort_small(place, count, scratch)`."""
    f = inner(keys, "sort_small", *_SORTER)
    place, count, _ = f.params
    for registers in sizes:
        with f.if_(count <= registers * keys.lanes):
            f.call(_network(keys, registers), "void", place, count)
            f.ret()
    return f


# ---- by bytes ----------------------------------------------------------------------------------


def _by_bytes(keys: Keys, rare: bool) -> Function:
    """Sort keys by their bytes, the lowest first: `sort_by_bytes(place, count, scratch)`."""
    f = inner(keys, "sort_by_bytes", *_SORTER, rare=rare)
    place, count, scratch = f.params
    counts = f.stack("i64", _BUCKETS, align=64)
    source, target = f.var("ptr", place), f.var("ptr", scratch)
    with f.range(0, keys.bits, 8) as shift:
        with f.range(0, _BUCKETS) as i:
            f.store(f.value("i64", 0), counts, i * 8)
        with f.range(0, count) as i:
            bucket = _bucket(f, keys, f.load(keys.element, source.get(), i * keys.nbytes), shift)
            f.store(f.load("i64", counts, bucket) + 1, counts, bucket)
        # A byte that all keys share orders nothing.
        first = _bucket(f, keys, f.load(keys.element, place), shift)
        with f.if_(f.load("i64", counts, first).differs(count)):
            _by_byte(f, keys, shift, count, counts, source.get(), target.get())
            before = source.get()
            source.set(target.get())
            target.set(before)
    with f.if_(source.get().differs(place)):
        f.call("memcpy", "ptr", place, source.get(), count * keys.nbytes)
    return f


def _bucket(f: Function, keys: Keys, key: Value, shift: Value) -> Value:
    """The bucket of a key, as bytes into the counts; negative keys come first."""
    by = shift if keys.bits == 64 else f.convert("trunc", shift, keys.element)
    key = key ^ keys.least
    digit = f.emit(key.type, f"lshr {key.type} {key.text}, {by.text}") & (_BUCKETS - 1)
    return (digit if keys.bits == 64 else f.convert("zext", digit, "i64")) * 8


def _by_byte(
    f: Function, keys: Keys, shift: Value, count: Value, counts: Value, source: Value, target: Value
) -> None:
    place = f.var("i64", 0)
    with f.range(0, _BUCKETS) as i:
        found = f.load("i64", counts, i * 8)
        f.store(place.get(), counts, i * 8)
        place.set(place.get() + found)
    with f.range(0, count) as i:
        key = f.load(keys.element, source, i * keys.nbytes)
        bucket = _bucket(f, keys, key, shift)
        to = f.load("i64", counts, bucket)
        f.store(to + 1, counts, bucket)
        f.store(key, target, to * keys.nbytes)


# ---- quicksort ---------------------------------------------------------------------------------


def _partition(keys: Keys) -> Function:
    """Put lower keys first, and count them: `SYMBOL(place, count, pivot, scratch)`."""
    f = _outer(keys, *_partition_type(keys))
    place, count, pivot, scratch = f.params
    nothing = Value(f, keys.vector, "poison")
    pivots = splat(f, pivot, keys.lanes)
    low = f.var("i64", 0)

    def part(i: Value, x: Value, live: Value | None) -> None:
        below = x < pivots
        above = below ^ 1
        if live is not None:
            mask = lane_mask(f, keys.lanes, live)
            below, above = below & mask, above & mask
        # Lanes that are not kept are overwritten later: those of the lower keys by the next
        # stores, which never get ahead of the loads.
        before = low.get()
        bits = f.convert("bitcast", below, f"i{keys.lanes}")
        found = f.call("llvm.ctpop.i64", "i64", f.convert("zext", bits, "i64"))
        lower = f.call(_compress(keys), keys.vector, x, below, nothing)
        upper = f.call(_compress(keys), keys.vector, x, above, nothing)
        there = f.at(place, before * keys.nbytes)
        keys.store(f, lower, there, None if live is None else found)
        keys.store(f, upper, f.at(scratch, (i - before) * keys.nbytes))
        low.set(before + found)

    whole = count & -(_TURN * keys.lanes)
    with f.range(0, whole, _TURN * keys.lanes) as i:
        places = [i + k * keys.lanes for k in range(_TURN)]
        read = [keys.load(f, f.at(place, at * keys.nbytes)) for at in places]
        for at, x in zip(places, read, strict=True):
            part(at, x, None)
    with f.range(whole, count, keys.lanes) as i:
        part(i, keys.load(f, f.at(place, i * keys.nbytes), count - i), count - i)
    rest = (count - low.get()) * keys.nbytes
    f.call("memcpy", "ptr", f.at(place, low.get() * keys.nbytes), scratch, rest)
    f.ret(low.get())
    return f


def _quick(keys: Keys) -> Function:
    """Sort keys by partitions: `SYMBOL(place, count, scratch)`."""
    f = _outer(keys, *_SORTER)
    place, count, scratch = f.params
    waiting = f.stack("i64", 2 * _WAITING)
    depth, first, size = f.var("i64", 0), f.var("i64", 0), f.var("i64", count)
    logarithm = 64 - f.call("llvm.ctlz.i64", "i64", count, f.value("i1", 0))
    patience = f.var("i64", (logarithm * 2 + EXTRA_PASSES) * count)
    with f.loop():
        here = f.at(place, first.get() * keys.nbytes)
        with f.if_else(size.get() <= _most(keys)) as it:
            f.call("sort_small", "void", here, size.get(), scratch)
            f.break_if(depth.get().equals(0))
            depth.set(depth.get() - 1)
            first.set(f.load("i64", waiting, depth.get() * 16))
            size.set(f.load("i64", waiting, depth.get() * 16 + 8))
            it.otherwise()
            patience.set(patience.get() - size.get())
            with f.if_else(patience.get() < 0) as bad:
                f.call("sort_by_bytes", "void", here, size.get(), scratch)
                size.set(0)
                bad.otherwise()
                pivot = f.call("sort_pivot", keys.element, here, size.get(), scratch)
                _split(f, keys, here, pivot, scratch, (waiting, depth, first, size))
    return f


def _pivot(keys: Keys, sorts: str, rare: bool = False) -> Function:
    """The middle one of keys that are evenly spaced: `sort_pivot(place, count, scratch)`.

    There are more keys than a network sorts; `sorts` names the function for few.
    """
    f = inner(keys, "sort_pivot", keys.element, *_SORTER[1:], rare=rare)
    place, count, scratch = f.params
    sample = f.stack(keys.element, LARGE_SAMPLE)
    most = f.value("i64", min(LARGE_SAMPLE, _most(keys)))
    taken = f.select(count >= LARGE_SAMPLE_FROM, most, _SMALL_SAMPLE)
    step = count // taken
    half = step // 2
    with f.range(0, taken) as i:
        key = f.load(keys.element, place, (i * step + half) * keys.nbytes)
        f.store(key, sample, i * keys.nbytes)
    f.call(sorts, "void", sample, taken, scratch)
    f.ret(f.load(keys.element, sample, taken // 2 * keys.nbytes))
    return f


def _split(
    f: Function,
    keys: Keys,
    here: Value,
    pivot: Value,
    scratch: Value,
    state: tuple[Value, Variable, Variable, Variable],
) -> None:
    """Go on with the smaller part of a partition; the other one waits."""
    waiting, depth, first, size = state
    count = size.get()
    low = f.call(partition_symbol(keys), "i64", here, count, pivot, scratch)
    with f.if_else(low.equals(0)) as it:
        # The pivot is the least key: keys equal to it are in order.
        with f.if_else(pivot.equals(keys.largest)) as all_equal:
            size.set(0)
            all_equal.otherwise()
            equal = f.call(partition_symbol(keys), "i64", here, count, pivot + 1, scratch)
            first.set(first.get() + equal)
            size.set(count - equal)
        it.otherwise()
        begin, middle = first.get(), first.get() + low
        smaller = low < count - low
        at = depth.get() * 16
        f.store(f.select(smaller, middle, begin), waiting, at)
        f.store(f.select(smaller, count - low, low), waiting, at + 8)
        first.set(f.select(smaller, begin, middle))
        size.set(f.select(smaller, low, count - low))
        depth.set(depth.get() + 1)


def _halves(keys: Keys) -> Function:
    """Part keys into two: `sort_halves(place, count, scratch)` counts the first ones.

    All of those are less than the others; there may be none.
    """
    f = inner(keys, "sort_halves", "i64", *_SORTER[1:], rare=True)
    place, count, scratch = f.params
    f.ret_if(count <= _most(keys), 0)
    pivot = f.call("sort_pivot", keys.element, place, count, scratch)
    low = f.var("i64", f.call(partition_symbol(keys), "i64", place, count, pivot, scratch))
    # The pivot may be the least key.
    with f.if_(low.get().equals(0) & pivot.differs(keys.largest)):
        low.set(f.call(partition_symbol(keys), "i64", place, count, pivot + 1, scratch))
    f.ret(low.get())
    return f


def _plain(keys: Keys) -> Function:
    """Sort keys by a network, or by their bytes: `SYMBOL(place, count, scratch)`."""
    f = _outer(keys, *_SORTER)
    place, count, scratch = f.params
    with f.if_(count > _most(keys)):
        f.call("sort_by_bytes", "void", place, count, scratch)
        f.ret()
    f.call("sort_small", "void", place, count, scratch)
    return f
