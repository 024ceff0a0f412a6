"""Memory that kernels compute in, as native code: a block for each thread, kept until it ends."""

from __future__ import annotations

import mmap

from spmd.compile.native.llvm.function_builder import I64, Function, define

# Scratch blocks from here on start on a huge page.
HUGE_PAGE = 2 * 2**20
HUGE_FROM = 2**17
MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def scratch_texts() -> list[str]:
    """The key of the block and the functions."""
    key = "@scratch_key = internal global i64 0"
    return [key, _initialize().text(), _scratch().text()]


@define("spmd_initialize", "i32", exported=True)
def _initialize(f: Function) -> None:
    """Prepare the runtime, once per process; give 0, or the error of pthread_key_create."""
    f.ret(f.call("pthread_key_create", "i32", f.symbol("scratch_key"), f.symbol("free")))


@define("scratch", "ptr")
def _scratch(f: Function, needed: I64) -> None:
    """scratch(bytes): memory of the calling thread, kept until it ends or asks for more.

    The block starts with its size, in a cache line of its own. Null if there is no memory. Large
    blocks ask for huge pages: packed operands are read all over, and with small pages the look-ups
    of their addresses cost a product of 1024 rows up to a third of its speed.
    """
    key = f.load("i64", f.symbol("scratch_key"))
    block = f.call("pthread_getspecific", "ptr", key)
    with f.if_(block.differs(0)):
        with f.if_(f.load("i64", block) >= needed):
            f.ret(f.at(block, 64))
        f.call("free", "void", block)
        f.call("pthread_setspecific", "i32", key, f.null())
    place, huge = f.stack("ptr"), needed >= HUGE_FROM
    alignment = f.select(huge, f.value("i64", HUGE_PAGE), 64)
    whole = (needed + 63 + alignment) // alignment * alignment
    failed = f.call("posix_memalign", "i32", place, alignment, whole)
    f.ret_if(failed.differs(0), f.null())
    fresh = f.load("ptr", place)
    if MADV_HUGEPAGE is not None:
        with f.if_(huge):
            f.call("madvise", "i32", fresh, whole, f.value("i32", MADV_HUGEPAGE))
    f.store(needed, fresh)
    f.call("pthread_setspecific", "i32", key, fresh)
    f.ret(f.at(fresh, 64))
