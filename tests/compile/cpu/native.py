"""Compile rendered text and call it on NumPy arrays: a small harness for the renderer's tests."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence

import llvmlite.binding as llvm
import numpy as np

from spmd.compile.cpu.codegen.kernel import Rendered, render
from spmd.compile.cpu.codegen.streaming_stores import STREAM_FROM
from spmd.compile.kernel.ir import Kernel
from spmd.compile.native.llvm.shared_functions import called_by_text, shared_text
from spmd.compile.native.llvm.vector_emitter import Target

SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
# Engines own the code they compiled: functions must not outlive them.
_ENGINES: list[object] = []


@functools.cache
def host_target() -> Target:
    """Return the target of this machine."""
    return Target.from_features(llvm.get_host_cpu_features().flatten())


@functools.cache
def _target_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
    )


def compile_rendered(rendered: Rendered):
    """Return the compiled function of a rendered kernel."""
    module = llvm.parse_assembly(rendered.text)
    called = called_by_text(rendered.text)
    for symbol in called:  # grows: shared functions call others
        module.link_in(llvm.parse_assembly(shared_text(symbol)))
        called += [s for s in called_by_text(shared_text(symbol)) if s not in called]
    module.verify()
    engine = llvm.create_mcjit_compiler(module, _target_machine())
    engine.finalize_object()
    _ENGINES.append(engine)
    return SIGNATURE(engine.get_function_address(rendered.symbol))


def run_native(
    kernel: Kernel,
    arrays: Sequence[np.ndarray],
    splits: int = 1,
    target: Target | None = None,
    stream_from: int = STREAM_FROM,
) -> None:
    """Run a kernel on flat arrays, its units divided into `splits` calls, last ones first."""
    rendered = render(kernel, target or host_target(), stream_from=stream_from)
    function = compile_rendered(rendered)
    pointers = (ctypes.c_void_p * max(len(arrays), 1))(*(a.ctypes.data for a in arrays))
    bounds = np.linspace(0, rendered.units, splits + 1).astype(int)
    for begin, end in reversed(list(itertools.pairwise(bounds))):
        if begin < end:
            function(pointers, None, int(begin), int(end))
