"""Sorting keys in place: quicksort in vectors, bounded by a sort by bytes.

The one idea: a partition compresses the lower keys of a register to the left and the others into
scratch memory, without a branch for any key; a hundred keys are sorted between registers. Pivots
are medians of samples, so it takes a contrived row to make bad ones: when partitions have gone
through more keys than any ordinary row needs, the rest is sorted by its bytes. So is everything
where the processor cannot compress a register.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.compile.cpu.gemm_ir import lane_mask, splat
from spmd.compile.cpu.runtime_ir import Function, Value, Variable
from spmd.compile.cpu.sort_network import COLUMN_NETWORKS, Keys, network

# Registers of a partition's turn.
_TURN = 4
# From so many keys on a pivot is the middle one of a larger sample.
_MANY = 2048
_FEW_SAMPLES, _MANY_SAMPLES = 16, 64
# How often partitions may go through a row, besides twice the logarithm of its length.
_PATIENCE = 8
# The larger part of each partition waits: one for each bit of a length.
_WAITING = 64
_BUCKETS = 256


def sorting(keys: Keys, compresses: bool, registers: int) -> list[Function]:
    """The functions `sort_keys(place, count, scratch)` and `sort_halves` with all they call.

    Scratch memory is as long as the keys and a register. `compresses` says whether the processor
    compresses registers; there are no more keys than `registers` hold, if that is not 0, and no
    halves then.
    """
    # Of what partitions leave, one between the least and the largest sorts nothing any faster.
    sizes = [registers] if registers else [min(COLUMN_NETWORKS), max(COLUMN_NETWORKS)]
    parts = [network(keys, n, _network(n)) for n in sizes]
    parts.append(_small(keys, sizes))
    if registers:
        return [*parts, _plain(keys, None)]
    bytewise = _by_bytes(keys)
    if compresses:
        return [*parts, bytewise, _partition(keys), _quick(keys), _halves(keys)]
    return [*parts, bytewise, _plain(keys, bytewise)]


def declarations(keys: Keys) -> str:
    """Declarations of what they call besides."""
    return "\n".join(
        (
            "declare ptr @memcpy(ptr, ptr, i64)",
            "declare i64 @llvm.ctlz.i64(i64, i1)",
            "declare i64 @llvm.ctpop.i64(i64)",
            f"declare {keys.vector} @{_compress(keys)}({keys.vector}, {keys.mask}, {keys.vector})",
            keys.declarations(),
        )
    )


def _network(registers: int) -> str:
    return f"sort_{registers}_registers"


def _compress(keys: Keys) -> str:
    return f"llvm.experimental.vector.compress.v{keys.lanes}{keys.element}"


def inner(keys: Keys, name: str, returns: str, *params: str) -> Function:
    attributes = f"{keys.attributes} noinline"
    return Function(name, returns, params, internal=True, attributes=attributes)


def _most(keys: Keys) -> int:
    """How many keys the largest network sorts."""
    return max(COLUMN_NETWORKS) * keys.lanes


def _small(keys: Keys, sizes: Sequence[int]) -> Function:
    """Sort not more keys than the last network does: `sort_small(place, count)`."""
    f = inner(keys, "sort_small", "void", "ptr", "i64")
    place, count = f.params
    for registers in sizes:
        with f.if_(count <= registers * keys.lanes):
            f.call(_network(registers), "void", place, count)
            f.ret()
    return f


# ---- by bytes ----------------------------------------------------------------------------------


def _by_bytes(keys: Keys) -> Function:
    """Sort keys by their bytes, the lowest first: `sort_by_bytes(place, count, scratch)`."""
    f = inner(keys, "sort_by_bytes", "void", "ptr", "i64", "ptr")
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
    """Put lower keys first, and count them: `sort_partition(place, count, pivot, scratch)`."""
    f = inner(keys, "sort_partition", "i64", "ptr", "i64", keys.element, "ptr")
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
        # What is not kept of a register is written over later: of the lower keys by what comes
        # next, since they never get ahead of what was read.
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
    """Sort keys by partitions: `sort_keys(place, count, scratch)`."""
    f = inner(keys, "sort_keys", "void", "ptr", "i64", "ptr")
    place, count, scratch = f.params
    waiting, sample = f.stack("i64", 2 * _WAITING), f.stack(keys.element, _MANY_SAMPLES)
    depth, first, size = f.var("i64", 0), f.var("i64", 0), f.var("i64", count)
    logarithm = 64 - f.call("llvm.ctlz.i64", "i64", count, f.value("i1", 0))
    patience = f.var("i64", (logarithm * 2 + _PATIENCE) * count)
    with f.loop():
        here = f.at(place, first.get() * keys.nbytes)
        with f.if_else(size.get() <= _most(keys)) as it:
            f.call("sort_small", "void", here, size.get())
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
                pivot = _pivot(f, keys, here, size.get(), sample)
                _split(f, keys, here, pivot, scratch, (waiting, depth, first, size))
    return f


def _pivot(f: Function, keys: Keys, here: Value, size: Value, sample: Value) -> Value:
    """The middle one of keys that are evenly spaced; there are more than a network sorts."""
    most = f.value("i64", min(_MANY_SAMPLES, _most(keys)))
    taken = f.select(size >= _MANY, most, _FEW_SAMPLES)
    step = size // taken
    half = step // 2
    with f.range(0, taken) as i:
        key = f.load(keys.element, here, (i * step + half) * keys.nbytes)
        f.store(key, sample, i * keys.nbytes)
    f.call("sort_small", "void", sample, taken)
    return f.load(keys.element, sample, taken // 2 * keys.nbytes)


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
    low = f.call("sort_partition", "i64", here, count, pivot, scratch)
    with f.if_else(low.equals(0)) as it:
        # The pivot is the least key: what equals it is in order.
        with f.if_else(pivot.equals(keys.largest)) as all_equal:
            size.set(0)
            all_equal.otherwise()
            equal = f.call("sort_partition", "i64", here, count, pivot + 1, scratch)
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
    f = inner(keys, "sort_halves", "i64", "ptr", "i64", "ptr")
    place, count, scratch = f.params
    with f.if_(count <= _most(keys)):
        f.ret(0)
    sample = f.stack(keys.element, _MANY_SAMPLES)
    pivot = _pivot(f, keys, place, count, sample)
    low = f.var("i64", f.call("sort_partition", "i64", place, count, pivot, scratch))
    # The pivot may be the least key.
    with f.if_(low.get().equals(0) & pivot.differs(keys.largest)):
        low.set(f.call("sort_partition", "i64", place, count, pivot + 1, scratch))
    f.ret(low.get())
    return f


def _plain(keys: Keys, beyond: Function | None) -> Function:
    """Sort keys by a network, or by `beyond`: `sort_keys(place, count, scratch)`."""
    f = inner(keys, "sort_keys", "void", "ptr", "i64", "ptr")
    place, count, scratch = f.params
    if beyond is not None:
        with f.if_(count > _most(keys)):
            f.call(beyond.name, "void", place, count, scratch)
            f.ret()
    f.call("sort_small", "void", place, count)
    return f
