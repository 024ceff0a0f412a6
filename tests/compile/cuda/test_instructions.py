"""Single PTX instructions, against what the PTX manual says of them, written in Python."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from spmd.base.errors import SpmdError
from spmd.compile.cuda.emulator.code import load
from spmd.compile.cuda.emulator.layout import Mode
from spmd.compile.cuda.emulator.types import UnknownPtxError
from spmd.compile.cuda.launch import Launch
from spmd.compile.cuda.nvrtc import compile_ptx
from tests.compile.cuda.emulated import gpu

COUNT = 256
REGISTER = {"u16": "h", "u32": "r", "s32": "r", "u64": "l", "s64": "l", "f32": "f", "f64": "d"}
CPP = {
    "u16": "unsigned short", "u32": "unsigned", "s32": "int", "u64": "unsigned long long",
    "s64": "long long", "f32": "float", "f64": "double",
}  # fmt: skip
NUMPY = {
    "u16": np.uint16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
    "f32": np.float32, "f64": np.float64,
}  # fmt: skip


def kernel_of(asm: str, result: str, operands: list[str]) -> str:
    """CUDA C++ that applies an instruction to each element of some arrays."""
    parameters = "".join(f", const {CPP[t]} *x{k}" for k, t in enumerate(operands))
    inputs = ", ".join(f'"{REGISTER[t]}"(x{k}[i])' for k, t in enumerate(operands))
    return (
        f'extern "C" __global__ void f({CPP[result]} *out{parameters}) {{\n'
        f"  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n  {CPP[result]} r;\n"
        f'  asm volatile("{asm}" : "={REGISTER[result]}"(r) : {inputs});\n  out[i] = r;\n}}\n'
    )


def run(
    source: str, out: np.ndarray, *arrays: np.ndarray, mode: Mode = "checked", threads: int = COUNT
):
    """Launch the kernel `f` of a text, one block, on arrays; what it left in the first."""
    kernel = load(compile_ptx(source, "sm_90"), ["f"], mode, source)["f"]
    memory = gpu().memory
    given = [out, *arrays]
    addresses = [memory.allocate(x.nbytes) for x in given]
    try:
        for x, address in zip(given, addresses, strict=True):
            memory.view(address, x.nbytes, "in")[:] = x.reshape(-1).view(np.uint8)
        gpu().launch(kernel, Launch(1, (threads, 1), 1024), addresses)
        return memory.view(addresses[0], out.nbytes, "out").copy().view(out.dtype)
    finally:
        for address in addresses:
            memory.free(address)


def applied(
    asm: str, result: str, operands: list[str], *arrays: np.ndarray, mode: Mode = "checked"
):
    """An instruction applied to arrays."""
    out = np.zeros(COUNT, NUMPY[result])
    return run(kernel_of(asm, result, operands), out, *arrays, mode=mode)


def numbers(type: str, seed: int, small: bool = False) -> np.ndarray:
    """Numbers of a type with its corners; `small` ones are below 70."""
    rng = np.random.default_rng(seed)
    if type[0] == "f":
        values = rng.standard_normal(COUNT) * 10.0 ** rng.integers(-6, 7, COUNT)
        corners = [0.0, -0.0, 1.0, -1.0, 2.0**-140, 3.0e38]
        values[: len(corners)] = corners
        return values.astype(NUMPY[type])
    info = np.iinfo(NUMPY[type])
    if small:
        return rng.integers(0, 70, COUNT).astype(NUMPY[type])
    values = rng.integers(info.min, info.max, COUNT, NUMPY[type], endpoint=True)
    values[:4] = [info.min, info.max, 0, 1]
    return values


# ---- integers ----------------------------------------------------------------------------------


def wrapped(number: int, type: str) -> int:
    """A number as it is left in a register."""
    bits = int(type[1:])
    number &= (1 << bits) - 1
    return number - (1 << bits) if type[0] == "s" and number >> bits - 1 else number


def field(x: int, start: int, length: int, type: str) -> int:
    """bfe: bits of a number, the sign above them where the type has one."""
    bits = int(type[1:])
    start, length = start & 255, length & 255
    if type[0] == "u":
        return (x & (1 << bits) - 1) >> start & (1 << length) - 1 if start < bits else 0
    if length == 0:
        return 0
    sign = x >> min(start + length - 1, bits - 1) & 1
    found = 0
    for k in range(bits):
        bit = x >> start + k & 1 if k < length and start + k < bits else sign
        found |= bit << k
    return wrapped(found, type)


def dot_of_bytes(x: int, y: int, total: int, left: str, right: str) -> int:
    """dp4a."""
    parts = [
        [wrapped(v >> shift, f"{kind[0]}8") for shift in (0, 8, 16, 24)]
        for v, kind in ((x, left), (y, right))
    ]
    return wrapped(total + sum(a * b for a, b in zip(*parts, strict=True)), "s32")


def dot_of_halves(x: int, y: int, total: int, skipped: int, left: str, right: str) -> int:
    """dp2a."""
    halves = [wrapped(x >> shift, f"{left[0]}16") for shift in (0, 16)]
    parts = [wrapped(y >> 8 * (skipped + k), f"{right[0]}8") for k in (0, 1)]
    return wrapped(total + sum(a * b for a, b in zip(halves, parts, strict=True)), "s32")


def inserted(x: int, into: int, start: int, length: int) -> int:
    """bfi.b32."""
    mask = (((1 << min(length & 255, 32)) - 1) << (start & 255)) & 0xFFFFFFFF
    return into & ~mask | (x << (start & 255)) & mask


def permuted(low: int, high: int, selector: int) -> int:
    """prmt.b32: four bytes of eight."""
    both, out = low | high << 32, 0
    for k in range(4):
        choice = selector >> 4 * k & 15
        byte = both >> 8 * (choice & 7) & 255
        byte = 255 * (byte >> 7) if choice & 8 else byte
        out |= byte << 8 * k
    return out


def quotient(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


INTEGERS: dict[str, tuple[str, list[str], Callable[..., int | None]]] = {
    "mul.hi.s32 %0, %1, %2;": ("s32", ["s32", "s32"], lambda x, y: x * y >> 32),
    "mul.hi.u64 %0, %1, %2;": ("u64", ["u64", "u64"], lambda x, y: x * y >> 64),
    "mul.wide.u32 %0, %1, %2;": ("u64", ["u32", "u32"], lambda x, y: x * y),
    "mad.wide.s32 %0, %1, %2, %3;": ("s64", ["s32", "s32", "s64"], lambda x, y, z: x * y + z),
    "mad.lo.u32 %0, %1, %2, %3;": ("u32", ["u32"] * 3, lambda x, y, z: x * y + z),
    "{.reg .u32 t; add.cc.u32 t, %1, %1; addc.u32 %0, %2, 0;}": (
        "u32", ["u32", "u32"], lambda x, y: y + (2 * x >> 32)),
    "{.reg .u32 t; sub.cc.u32 t, %1, %2; subc.u32 %0, %2, %1;}": (
        "u32", ["u32", "u32"], lambda x, y: y - x - (x < y)),
    "{.reg .u32 t; mad.lo.cc.u32 t, %1, %2, %1; madc.hi.u32 %0, %1, %2, 5;}": (
        "u32", ["u32", "u32"],
        lambda x, y: (x * y >> 32) + 5 + ((x * y & 0xFFFFFFFF) + x >> 32)),
    "shl.b32 %0, %1, %2;": ("u32", ["u32", "u32:small"], lambda x, n: x << n if n < 32 else 0),
    "shr.s32 %0, %1, %2;": ("s32", ["s32", "u32:small"], lambda x, n: x >> min(n, 31)),
    "shr.u64 %0, %1, %2;": ("u64", ["u64", "u32:small"], lambda x, n: x >> n),
    "shf.l.wrap.b32 %0, %1, %2, %3;": (
        "u32", ["u32", "u32", "u32:small"], lambda x, y, n: (x | y << 32) << (n & 31) >> 32),
    "shf.r.wrap.b32 %0, %1, %2, %3;": (
        "u32", ["u32", "u32", "u32:small"], lambda x, y, n: (x | y << 32) >> (n & 31)),
    "shf.l.clamp.b32 %0, %1, %2, %3;": (
        "u32", ["u32", "u32", "u32:small"], lambda x, y, n: (x | y << 32) << min(n, 32) >> 32),
    "shf.r.clamp.b32 %0, %1, %2, %3;": (
        "u32", ["u32", "u32", "u32:small"], lambda x, y, n: (x | y << 32) >> min(n, 32)),
    "bfe.u32 %0, %1, %2, %3;": (
        "u32", ["u32", "u32:small", "u32:small"], lambda x, s, n: field(x, s, n, "u32")),
    "bfe.s32 %0, %1, %2, %3;": (
        "s32", ["s32", "u32:small", "u32:small"], lambda x, s, n: field(x, s, n, "s32")),
    "bfe.s64 %0, %1, %2, %3;": (
        "s64", ["s64", "u32:small", "u32:small"], lambda x, s, n: field(x, s, n, "s64")),
    "bfi.b32 %0, %1, %2, %3, %4;": (
        "u32", ["u32", "u32", "u32:small", "u32:small"], inserted),
    "dp4a.s32.s32 %0, %1, %2, %3;": (
        "s32", ["u32", "u32", "s32"], lambda x, y, z: dot_of_bytes(x, y, z, "s32", "s32")),
    "dp4a.u32.s32 %0, %1, %2, %3;": (
        "s32", ["u32", "u32", "s32"], lambda x, y, z: dot_of_bytes(x, y, z, "u32", "s32")),
    "dp2a.lo.s32.u32 %0, %1, %2, %3;": (
        "s32", ["u32", "u32", "s32"], lambda x, y, z: dot_of_halves(x, y, z, 0, "s32", "u32")),
    "dp2a.hi.u32.s32 %0, %1, %2, %3;": (
        "s32", ["u32", "u32", "s32"], lambda x, y, z: dot_of_halves(x, y, z, 2, "u32", "s32")),
    "prmt.b32 %0, %1, %2, %3;": ("u32", ["u32", "u32", "u32"], permuted),
    "lop3.b32 %0, %1, %2, %3, 0x96;": ("u32", ["u32"] * 3, lambda x, y, z: x ^ y ^ z),
    "lop3.b32 %0, %1, %2, %3, 0xE8;": (
        "u32", ["u32"] * 3, lambda x, y, z: x & y | x & z | y & z),
    "popc.b64 %0, %1;": ("u32", ["u64"], lambda x: x.bit_count()),
    "clz.b32 %0, %1;": ("u32", ["u32"], lambda x: 32 - x.bit_length()),
    "brev.b32 %0, %1;": ("u32", ["u32"], lambda x: int(f"{x:032b}"[::-1], 2)),
    "div.s32 %0, %1, %2;": ("s32", ["s32", "s32"], lambda x, y: quotient(x, y) if y else None),
    "rem.s32 %0, %1, %2;": (
        "s32", ["s32", "s32"], lambda x, y: x - y * quotient(x, y) if y else None),
    "min.s32 %0, %1, %2;": ("s32", ["s32", "s32"], lambda x, y: min(x, y)),
    "max.u64 %0, %1, %2;": ("u64", ["u64", "u64"], lambda x, y: max(x, y)),
    "abs.s32 %0, %1;": ("s32", ["s32"], lambda x: abs(x)),
    "cvt.s64.s32 %0, %1;": ("s64", ["s32"], lambda x: x),
    "cvt.s32.s8 %0, %1;": ("s32", ["u32"], lambda x: (x & 255 ^ 128) - 128),
    "cvt.u16.u32 %0, %1;": ("u16", ["u32"], lambda x: x),
    "{.reg .pred p, q, c; setp.lt.u32 c, %1, 7; setp.gt.and.s32 p|q, %1, %2, !c; "
    "selp.u32 %0, 1, 2, q;}": (
        "u32", ["s32", "s32"],
        lambda x, y: 1 if not x > y and not (x & 0xFFFFFFFF) < 7 else 2),
    "{.reg .u16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {b, a};}": (
        "u32", ["u32"], lambda x: x >> 16 | x << 16),
}  # fmt: skip


@pytest.mark.parametrize("asm", INTEGERS)
def test_an_instruction_on_integers(asm):
    result, types, meaning = INTEGERS[asm]
    names = [name.partition(":")[0] for name in types]
    arrays = [numbers(n, k, t != n) for k, (n, t) in enumerate(zip(names, types, strict=True))]
    got = applied(asm, result, names, *arrays).tolist()
    for number, row in zip(got, zip(*(a.tolist() for a in arrays), strict=True), strict=True):
        expected = meaning(*row)
        if expected is not None:  # where the manual leaves it open
            assert number == wrapped(expected, result), row


# ---- floats ------------------------------------------------------------------------------------


def rounded(exact: Fraction, direction: str, dtype: type) -> float:
    """An exact number rounded in a direction (rz, rm, rp)."""
    with np.errstate(over="ignore"):
        near = dtype(float(exact))
    if not np.isfinite(near):
        near = np.copysign(np.finfo(dtype).max, near)
    # The nearest double may be rounded already: go to the neighbour where that is needed.
    low, high = near, near
    while Fraction(float(low)) > exact:
        low = np.nextafter(low, dtype(-np.inf))
    while Fraction(float(high)) < exact:
        high = np.nextafter(high, dtype(np.inf))
    if Fraction(float(low)) == exact:
        return float(low)
    while Fraction(float(np.nextafter(low, dtype(np.inf)))) <= exact:
        low = np.nextafter(low, dtype(np.inf))
    while Fraction(float(np.nextafter(high, dtype(-np.inf)))) >= exact:
        high = np.nextafter(high, dtype(-np.inf))
    toward_zero = low if exact > 0 else high
    return float({"rz": toward_zero, "rm": low, "rp": high}[direction])


DIRECTED = [
    (name, direction, type)
    for name in ("add", "sub", "mul", "fma")
    for direction in ("rz", "rm", "rp")
    for type in ("f32", "f64")
    if (name, type) != ("fma", "f64")
]


@pytest.mark.parametrize(("name", "direction", "type"), DIRECTED)
def test_rounding_in_a_direction(name, direction, type):
    count = 3 if name == "fma" else 2
    arrays = [numbers(type, k) for k in range(count)]
    arrays[1][:100] *= NUMPY[type](1e-9)  # far below the other operand's last place
    places = ", ".join(f"%{k + 1}" for k in range(count))
    got = applied(f"{name}.{direction}.{type} %0, {places};", type, [type] * count, *arrays)
    for number, row in zip(got, zip(*arrays, strict=True), strict=True):
        x, y, *z = (Fraction(float(v)) for v in row)
        exact = {"add": x + y, "sub": x - y, "mul": x * y, "fma": x * y + sum(z)}[name]
        limits = np.finfo(NUMPY[type])
        smallest = Fraction(float(limits.tiny))
        if not 0 < abs(exact) < Fraction(float(limits.max)):
            continue
        if name != "mul" or type != "f64" or abs(exact) > smallest * 2**60:
            assert float(number) == rounded(exact, direction, NUMPY[type]), row


def test_flushing_saturation_and_extremes():
    x = np.array([2.0**-140, -(2.0**-140), 0.5, 7.0, np.nan, -3.0] * 50, np.float32)[:COUNT]
    tiny = np.abs(x) < 2.0**-126
    flushed = applied("add.ftz.f32 %0, %1, %2;", "f32", ["f32", "f32"], x, np.zeros_like(x))
    assert np.array_equal(flushed, np.where(tiny, 0, x), equal_nan=True)
    saturated = applied("add.sat.f32 %0, %1, %2;", "f32", ["f32", "f32"], x, np.zeros_like(x))
    assert np.array_equal(saturated, np.clip(np.nan_to_num(x), 0, 1))
    y = np.full(COUNT, 0.25, np.float32)
    assert not np.isnan(applied("max.f32 %0, %1, %2;", "f32", ["f32", "f32"], x, y)).any()
    both = applied("max.NaN.f32 %0, %1, %2;", "f32", ["f32", "f32"], x, y)
    assert np.array_equal(np.isnan(both), np.isnan(x))
    zeros = np.array([0.0, -0.0] * 128, np.float32)
    least = applied("min.f32 %0, %1, %2;", "f32", ["f32", "f32"], zeros, -zeros)
    assert np.signbit(least).all()


CONVERSIONS = {
    "cvt.rni.s32.f32": ("s32", "f32", lambda x: np.rint(x)),
    "cvt.rzi.s32.f64": ("s32", "f64", np.trunc),
    "cvt.rmi.u32.f32": ("u32", "f32", np.floor),
    "cvt.rpi.s64.f64": ("s64", "f64", np.ceil),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversion_to_integers_saturates(name):
    target, source, meaning = CONVERSIONS[name]
    with np.errstate(over="ignore"):
        x = numbers(source, 5) * NUMPY[source](1000)
    x[10:13] = [np.inf, -np.inf, np.nan]
    got = applied(f"{name} %0, %1;", target, [source], x).tolist()
    info = np.iinfo(NUMPY[target])
    for number, value in zip(got, x.tolist(), strict=True):
        if math.isnan(value):
            expected = 0
        elif math.isinf(value):
            expected = info.max if value > 0 else info.min
        else:
            expected = min(max(int(meaning(value)), info.min), info.max)
        assert number == expected, value


def test_tf32_has_eleven_bits():
    source = """extern "C" __global__ void f(unsigned *out, const float *x) {
      asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out[threadIdx.x]) : "f"(x[threadIdx.x]));
    }"""
    x = numbers("f32", 0)
    half, nan = np.float32(1 + 2.0**-11), np.uint32(0x7F800001).view(np.float32)
    x[:6] = [half, -half, np.nextafter(half, np.float32(1)), np.inf, nan, -0.0]
    with np.errstate(invalid="ignore"):  # NumPy looks at the NaN
        got = run(source, np.zeros(COUNT, np.uint32), x).view(np.float32)
    scale = np.exp2(10 - np.floor(np.log2(np.abs(x[6:].astype(np.float64)))))
    scaled = np.abs(x[6:]) * scale
    wanted = np.copysign(np.floor(scaled + 0.5) / scale, x[6:])
    assert list(got[:4]) == [1 + 2.0**-10, -1 - 2.0**-10, 1, np.inf]
    assert np.isnan(got[4]) and np.signbit(got[5])
    np.testing.assert_array_equal(got[6:], wanted)


def test_conversions_between_floats():
    x = numbers("f32", 3)
    x[20] = np.nan
    half = applied("cvt.rn.f16.f32 %0, %1;", "u16", ["f32"], x).view(np.float16)
    with np.errstate(over="ignore"):
        assert np.array_equal(half, x.astype(np.float16), equal_nan=True)
    brain = applied("cvt.rn.bf16.f32 %0, %1;", "u16", ["f32"], x).view(ml_dtypes.bfloat16)
    expected = x.astype(ml_dtypes.bfloat16)
    assert np.array_equal(brain.astype(np.float32), expected.astype(np.float32), equal_nan=True)
    wide = numbers("f64", 4)
    down = applied("cvt.rm.f32.f64 %0, %1;", "f32", ["f64"], wide)
    assert (down.astype(np.float64) <= wide).all()
    assert (np.nextafter(down, np.float32(np.inf)).astype(np.float64) > wide).all()


APPROXIMATE = {
    "ex2.approx.ftz.f32": (np.exp2, 2.0**-22, 0.0),
    "lg2.approx.f32": (lambda x: np.log2(np.abs(x)), 2.0**-22, 2.0**-22),
    "sin.approx.f32": (np.sin, 0.0, 2.0**-20.5),
    "rcp.approx.f32": (lambda x: 1 / x, 2.0**-23, 0.0),
    "rsqrt.approx.f32": (lambda x: 1 / np.sqrt(np.abs(x)), 2.0**-22.9, 0.0),
    "tanh.approx.f32": (np.tanh, 2.0**-11, 0.0),
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_an_approximate_instruction_errs_within_its_bound_when_checked(name):
    meaning, relative, absolute = APPROXIMATE[name]
    rng = np.random.default_rng(0)
    x = rng.uniform(0.1, 6, COUNT).astype(np.float32)
    exact = meaning(x.astype(np.float64))
    call = functools.partial(applied, f"{name} %0, %1;", "f32", ["f32"], x)
    plain, checked = call(mode="plain"), call()
    assert np.array_equal(plain, exact.astype(np.float32))
    errors = np.abs(checked - exact)
    bound = np.maximum(np.abs(exact) * relative, absolute)
    assert (errors <= bound).all()
    # It uses its room, and not the same part everywhere.
    assert (errors > 0.5 * bound).any() and (errors < 0.3 * bound).any()
    assert np.array_equal(checked, call()), "the same seed gives the same errors"


# ---- lanes -------------------------------------------------------------------------------------


def lanes(body: str) -> str:
    return (
        'extern "C" __global__ void f(unsigned *out, const unsigned *x) {\n'
        "  const unsigned i = threadIdx.x, v = x[i]; unsigned r = 0;\n"
        f"  {body}\n  out[i] = r;\n}}\n"
    )


SHUFFLES = {
    "__shfl_xor_sync(~0u, v, 5)": lambda x, k: x[k ^ 5],
    "__shfl_up_sync(~0u, v, 3)": lambda x, k: x[k - 3] if k >= 3 else x[k],
    "__shfl_down_sync(~0u, v, 7, 16)": lambda x, k: x[k + 7] if k % 16 < 9 else x[k],
    "__shfl_sync(~0u, v, 9, 8)": lambda x, k: x[k // 8 * 8 + 1],
    "__ballot_sync(~0u, v & 1)": lambda x, k: sum((v & 1) << j for j, v in enumerate(x)),
    "__any_sync(~0u, v == 12345)": lambda x, k: 0,
    "__all_sync(~0u, v != 12345)": lambda x, k: 1,
}


@pytest.mark.parametrize("mode", ["plain", "checked"])
@pytest.mark.parametrize("call", SHUFFLES)
def test_lanes_exchange_numbers(call, mode):
    x = np.random.default_rng(0).integers(0, 1000, 96).astype(np.uint32)
    got = run(lanes(f"r = {call};"), np.zeros_like(x), x, mode=mode, threads=96)
    for k in range(96):
        warp = x[k // 32 * 32 :][:32].tolist()
        assert got[k] == SHUFFLES[call](warp, k % 32), k


def test_lanes_of_a_part_of_a_warp_exchange_numbers():
    x = np.arange(32, dtype=np.uint32)
    body = (
        "if (i < 16) r = __shfl_xor_sync(0xffffu, v, 1); else r = __ballot_sync(~0xffffu, v & 1);"
    )
    got = run(lanes(body), np.zeros_like(x), x, threads=32)
    assert got[:16].tolist() == [k ^ 1 for k in range(16)]
    assert (got[16:] == 0xAAAA0000).all()


def test_memory_is_in_order_inside_of_a_warp_only_behind_syncwarp():
    body = "__shared__ extern unsigned s[]; s[i] = v; {sync} r = s[i ^ 1];"  # its neighbour's
    x = np.arange(64, dtype=np.uint32)
    good = run(lanes(body.replace("{sync}", "__syncwarp();")), np.zeros_like(x), x, threads=64)
    assert np.array_equal(good, x ^ 1)
    with pytest.raises(SpmdError, match="with no barrier between"):
        run(lanes(body.replace("{sync}", "")), np.zeros_like(x), x, threads=64)
    far = body.replace("{sync}", "__syncwarp();").replace("i ^ 1", "i ^ 32")
    with pytest.raises(SpmdError, match="with no barrier between"):
        run(lanes(far), np.zeros_like(x), x, threads=64)


def test_bytes_of_one_word_do_not_race():
    body = "__shared__ extern unsigned s[]; ((unsigned char *)s)[i] = v; "
    body += "__syncthreads(); r = s[i / 4];"
    x = np.arange(64, dtype=np.uint32)
    got = run(lanes(body), np.zeros_like(x), x, threads=64)
    assert got[5] == 4 | 5 << 8 | 6 << 16 | 7 << 24


def test_what_a_block_finds_in_shared_memory_is_nan():
    body = "__shared__ extern unsigned s[]; r = s[i];"
    x = np.zeros(32, np.uint32)
    got = run(lanes(body), np.zeros_like(x), x, threads=32)
    assert np.isnan(got.view(np.float32)).all()


MMA = r"""
extern "C" __global__ void f(float *c, const unsigned short *a, const unsigned short *b) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4, K = 64;
  float s[4] = {0, 0, 0, 0};
  for (int k = 0; k < K; k += 16) {
    const unsigned *ar = (const unsigned *)(a + g * K + k);
    const unsigned *as = (const unsigned *)(a + (g + 8) * K + k);
    const unsigned *br = (const unsigned *)(b + g * K + k);
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.HALF.HALF.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
      : "r"(ar[t]), "r"(as[t]), "r"(ar[t + 4]), "r"(as[t + 4]), "r"(br[t]), "r"(br[t + 4]));
  }
  float *o = c + g * 8 + 2 * t;
  o[0] = s[0]; o[1] = s[1]; o[64] = s[2]; o[65] = s[3];
}
"""


def test_a_warp_multiplies_tiles_of_tf32():
    source = MMA.replace("HALF", "tf32").replace("m16n8k16", "m16n8k8").replace("k += 16", "k += 8")
    source = source.replace("unsigned short", "unsigned")
    a, b = (np.random.default_rng(0).standard_normal(s).astype("f4") for s in ((16, 64), (8, 64)))
    got = run(source, np.zeros((16, 8), np.float32), a, b, threads=32).reshape(16, 8)
    # The lower bits of factors are ignored.
    left, right = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b))
    expected = left.astype(np.float64) @ right.astype(np.float64).T
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_a_warp_multiplies_tiles(half):
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[half]
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((16, 64), (8, 64)))
    out = np.zeros((16, 8), np.float32)
    got = run(MMA.replace("HALF", half), out, a, b, threads=32).reshape(16, 8)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_warp_reads_tiles(count, transposed):
    words = ", ".join(f"%{k}" for k in range(count))
    outs = ", ".join(f'"=r"(r[{k}])' for k in range(count))
    trans = ".trans" if transposed else ""
    source = f"""extern "C" __global__ void f(unsigned *out, const unsigned *x) {{
      extern __shared__ unsigned s[];
      const int i = threadIdx.x;
      for (int k = 0; k < 4; k++) s[4 * i + k] = x[4 * i + k];
      __syncthreads();
      unsigned r[{count}];
      const unsigned at = (unsigned)__cvta_generic_to_shared(s + 4 * (31 - i));
      asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{words}}}, [%{count}];"
                   : {outs} : "r"(at) : "memory");
      for (int k = 0; k < {count}; k++) out[{count} * i + k] = r[k];
    }}"""
    x = np.arange(256, dtype=np.uint16)
    out = run(source, np.zeros(32 * count, np.uint32), x.view(np.uint32), threads=32)
    # Row by row from the last on, as the lanes say.
    tiles = x.reshape(32, 8)[::-1].reshape(4, 8, 8)[:count]
    tiles = tiles.transpose(0, 2, 1) if transposed else tiles
    pairs = np.ascontiguousarray(tiles).reshape(count, 32, 2)
    assert np.array_equal(out.view(np.uint16).reshape(32, count, 2), pairs.transpose(1, 0, 2))


# ---- what is not known -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asm", "named"),
    [
        ("vabsdiff4.u32.u32.u32.add %0, %1, %1, %1;", "vabsdiff4.u32.u32.u32.add"),
        ("mov.u32 %0, %%smid;", "%smid"),
        ("bar.sync 1; mov.u32 %0, 0;", "bar.sync 1"),
    ],
)
def test_an_unknown_instruction_is_an_error_that_names_it(asm, named):
    with pytest.raises(UnknownPtxError, match=re.escape(named)):
        applied(asm, "u32", ["u32"], numbers("u32", 0))
