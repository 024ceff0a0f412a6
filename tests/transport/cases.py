"""One table of collective calls that every transport must get right, and a plain reference.

A `Case` knows what each rank gives and, from the inputs of *all* ranks, what each must get. The
reference is a loop in rank order over NumPy scalars' ufuncs; results are compared bit by bit.
`check_all(comm)` runs the whole table on one rank of any communicator.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from spmd.transport.communicator import Communicator, ReduceOp

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
SIZES = (0, 1, 7, 1000, 100_000)
ARITHMETIC = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MAX, ReduceOp.MIN)
BITWISE = (ReduceOp.AND, ReduceOp.OR, ReduceOp.XOR)
KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "ragged",
)  # fmt: skip

STEP = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.AND: np.logical_and,
    ReduceOp.OR: np.logical_or,
    ReduceOp.XOR: np.logical_xor,
}


def dtype_of(name: str) -> np.dtype:
    """A NumPy dtype by name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass(frozen=True)
class Case:
    """One collective on one dtype and size."""

    kind: str
    dtype: str
    count: int
    op: ReduceOp | None = None

    def __str__(self) -> str:
        op = f"-{self.op.value}" if self.op else ""
        return f"{self.kind}{op}-{self.dtype}-{self.count}"

    def give(self, rank: int, size: int) -> np.ndarray:
        """What a rank passes as `buf`; the same on every call, different for every rank."""
        blocks = size if self.kind in ("reduce_scatter", "all_to_all") else 1
        seed = [KINDS.index(self.kind), DTYPES.index(self.dtype), self.count, rank]
        random = np.random.default_rng(seed)
        dtype = dtype_of(self.dtype)
        count = self.count * blocks
        if self.kind == "ragged":
            count = sum(self.counts(size)[rank])
        if self.dtype == "bool":
            return random.integers(0, 2, count).astype(bool)
        if self.dtype in INTEGERS:
            # The whole range: sums and products wrap, and must wrap alike.
            return random.integers(0, 256, (count, dtype.itemsize), np.uint8).view(dtype)[:, 0]
        real = random.normal(size=count)
        if self.dtype in COMPLEX:
            return (real + 1j * random.normal(size=count)).astype(dtype)
        return real.astype(dtype)

    def counts(self, size: int) -> list[list[int]]:
        """What each rank sends to each: much, little or nothing, to itself too."""
        return [[self.count * ((3 * r + 2 * q) % 4) // 2 for q in range(size)] for r in range(size)]

    def pairs(self, size: int) -> list[tuple[int, int]]:
        """A ring that leaves out its last hop, so that one rank sends nothing and one gets none."""
        return [(r, (r + 1) % size) for r in range(size - 1)] or [(0, 0)]

    def expect(self, rank: int, size: int) -> np.ndarray:
        """What `rank` must get, from everyone's inputs."""
        given = [self.give(r, size) for r in range(size)]
        mine = slice(rank * self.count, (rank + 1) * self.count)
        if self.kind == "all_reduce":
            return reduce_in_order(self.op, given)
        if self.kind == "reduce_scatter":
            return reduce_in_order(self.op, given)[mine]
        if self.kind == "all_gather":
            return np.concatenate(given)
        if self.kind == "all_to_all":
            return np.concatenate([x[mine] for x in given])
        if self.kind == "broadcast":
            return given[size - 1]
        if self.kind == "ragged":
            table = np.array(self.counts(size))
            starts = table[:, :rank].sum(1)
            parts = zip(given, starts, table[:, rank], strict=True)
            return np.concatenate([x[start : start + n] for x, start, n in parts])
        sources = [s for s, target in self.pairs(size) if target == rank]
        return given[sources[0]] if sources else np.zeros_like(given[0])

    def run(self, comm: Communicator) -> np.ndarray:
        """Make the call and return what this rank got."""
        buf = self.give(comm.rank, comm.size)
        blocks = comm.size if self.kind == "all_gather" else 1
        count = buf.size if self.kind == "all_to_all" else self.count * blocks
        out = np.full(count, buf[0] if buf.size else 0, buf.dtype)  # never zeros by luck
        if self.kind == "all_reduce":
            comm.all_reduce(buf, self.op)
            return buf
        if self.kind == "broadcast":
            comm.broadcast(buf, comm.size - 1)
            return buf
        if self.kind == "ragged":
            counts = self.counts(comm.size)
            out = np.zeros(sum(row[comm.rank] for row in counts), buf.dtype)
            comm.all_to_all(buf, out, counts=counts)
        elif self.kind == "permute":
            comm.permute(buf, out, self.pairs(comm.size))
        elif self.kind == "reduce_scatter":
            comm.reduce_scatter(buf, out, self.op)
        else:
            getattr(comm, self.kind)(buf, out)
        return out

    def check(self, comm: Communicator) -> None:
        """Run and compare, bit by bit."""
        got, wanted = self.run(comm), self.expect(comm.rank, comm.size)
        assert got.dtype == wanted.dtype, (str(self), got.dtype)
        assert got.tobytes() == wanted.tobytes(), (
            f"rank {comm.rank} of {comm.size}: {self}: got {got[:4]}..., wanted {wanted[:4]}..."
        )


def reduce_in_order(op: ReduceOp | None, parts: list[np.ndarray]) -> np.ndarray:
    """The definition: rank 0's part, then each next one; narrow floats rounded once, at the end."""
    assert op is not None
    dtype = parts[0].dtype
    step = STEP[op]
    if op in BITWISE and dtype.kind != "b":
        step = getattr(np, f"bitwise_{op.value}")
    narrow = dtype.name in ("float16", "bfloat16") and op in (ReduceOp.SUM, ReduceOp.PROD)
    total = parts[0].astype(np.float32 if narrow else dtype)
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total = step(total, part.astype(total.dtype))
    return total.astype(dtype)


def all_cases() -> list[Case]:
    """Every dtype and size for each kind; every operator for each dtype that has it."""
    reducing = ("all_reduce", "reduce_scatter")
    moving = [kind for kind in KINDS if kind not in reducing]
    cases = [Case(k, d, n) for k, d, n in itertools.product(moving, DTYPES, SIZES)]
    for kind, dtype in itertools.product(reducing, DTYPES):
        cases += [Case(kind, dtype, count, ReduceOp.SUM) for count in SIZES]
        others = [*ARITHMETIC[1:], *(BITWISE if dtype in ("bool", *INTEGERS) else ())]
        cases += [Case(kind, dtype, 7, op) for op in others]
    return cases


def check_all(comm: Communicator) -> int:
    """The whole table, then objects, groups and special values; returns the number of cases."""
    cases = all_cases()
    for case in cases:
        case.check(comm)
    check_objects(comm)
    check_groups(comm)
    check_special_values(comm)
    comm.barrier()
    return len(cases)


def check_objects(comm: Communicator) -> None:
    """Objects of different lengths arrive in rank order."""
    got = comm.all_gather_object({"rank": comm.rank, "text": "x" * (comm.rank * 1000)})
    assert [entry["rank"] for entry in got] == list(range(comm.size))
    assert [len(entry["text"]) for entry in got] == [1000 * r for r in range(comm.size)]


def check_groups(comm: Communicator) -> None:
    """Subgroups order by key, reduce among themselves, and may leave ranks out."""
    halves = comm.split(comm.rank % 2, key=-comm.rank)
    members = [r for r in range(comm.size) if r % 2 == comm.rank % 2][::-1]
    assert halves is not None
    assert (halves.size, halves.rank) == (len(members), members.index(comm.rank))
    assert halves.all_gather_object(comm.rank) == members
    total = np.array([comm.rank], np.int64)
    halves.all_reduce(total)
    assert total[0] == sum(members)
    nobody_last = comm.split(None if comm.rank == comm.size - 1 else 0)
    assert (nobody_last is None) == (comm.rank == comm.size - 1)
    if nobody_last is not None:
        Case("all_reduce", "float32", 1000, ReduceOp.SUM).check(nobody_last)
        again = nobody_last.split(0)
        assert again is not None and again.size == comm.size - 1


def check_special_values(comm: Communicator) -> None:
    """A NaN of one rank reaches everyone; infinities stay; shapes survive."""
    x = np.array([[1.0, np.inf], [np.nan if comm.rank == 0 else 2.0, -np.inf]], np.float32)
    comm.all_reduce(x, ReduceOp.MAX)
    assert np.isnan(x[1, 0]) and x[0, 1] == np.inf and x[1, 1] == -np.inf and x[0, 0] == 1
    big = np.full(3, 3e38, np.float32)
    comm.all_reduce(big, ReduceOp.SUM)  # overflows to infinity without a warning
    assert np.all(big == (np.inf if comm.size > 1 else np.float32(3e38)))
