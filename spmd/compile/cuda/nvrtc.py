"""NVRTC: CUDA C++ text to machine code of a GPU, on any machine; the only user of that library.

    compiled = compile_cubin(module_text(functions), "sm_90")
    compiled.cubin                     # an ELF image that a driver loads
    compiled.usage["kernel_..."]       # registers, spills: from ptxas

It needs the wheel `nvidia-cuda-nvrtc` (`pip install spmd[cuda]`), no driver, no GPU and no CUDA
headers.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmd.base.errors import CudaError
from spmd.compile.cuda.launch import NVRTC_WHEEL, Compiled, Usage

# Default rounding and denormals, so that + - * / and sqrt are IEEE's; `-default-device` makes plain
# functions device functions; the report of ptxas goes into the log; PTX names lines of the source.
OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v", "-lineinfo")


class NvrtcError(CudaError):
    """CUDA source does not compile, which is a mistake of the renderer, or NVRTC is missing."""


def compile_cubin(source: str, arch: str, options: tuple[str, ...] = ()) -> Compiled:
    """Compile CUDA C++ text for `arch` ("sm_80", "sm_90", ...).

    Raises:
        NvrtcError: the text does not compile (the message has NVRTC's log and the lines it names,
            with those around them), or NVRTC is not installed.
    """
    with _compiled(source, arch, options) as (program, log):
        cubin = _bytes_of(program, "CUBIN")
        return Compiled(arch, cubin, parse_usage(log), _ptx_of(program), source)


def compile_ptx(source: str, arch: str) -> str:
    """Compile CUDA C++ text as far as PTX: the text that `compile_cubin` makes machine code of.

    It takes half as long. The same errors as `compile_cubin`.
    """
    virtual = arch.replace("sm_", "compute_")
    with _compiled(source, virtual, ()) as (program, _):
        return _ptx_of(program)


@contextmanager
def _compiled(
    source: str, arch: str, options: tuple[str, ...]
) -> Iterator[tuple[ctypes.c_void_p, str]]:
    """A program of the library, compiled, and the log."""
    nvrtc = library()
    program = ctypes.c_void_p()
    text = source.encode()
    _call("nvrtcCreateProgram", ctypes.byref(program), text, b"kernels.cu", 0, None, None)
    try:
        given = [option.encode() for option in (f"-arch={arch}", *OPTIONS, *options)]
        array = (ctypes.c_char_p * len(given))(*given)
        status = nvrtc.nvrtcCompileProgram(program, len(given), array)
        log = _text_of(program, "ProgramLog")
        if status:
            _check_arch(arch)
            raise NvrtcError(f"NVRTC for {arch}: {_name(status)}\n{with_lines(log, source)}")
        yield program, log
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))


def architectures() -> list[int]:
    """Return the architectures that NVRTC compiles for, such as 90 for sm_90, in order."""
    count = ctypes.c_int()
    _call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    _call("nvrtcGetSupportedArchs", found)
    return sorted(found)


def _check_arch(arch: str) -> None:
    """Say so if NVRTC doesn't know an architecture."""
    known, asked = architectures(), int(re.sub(r"\D", "", arch) or 0)
    if asked in known:
        return
    major, minor = version()
    newer = f"pip install --upgrade {NVRTC_WHEEL} may know it"
    older = f"this GPU needs a version of CUDA before {major}, for which spmd is not made"
    raise NvrtcError(
        f"NVRTC {major}.{minor} compiles for sm_{known[0]} to sm_{known[-1]}, and the GPU is of "
        f"{arch}: {older if asked < known[0] else newer}"
    )


def version() -> tuple[int, int]:
    """Return NVRTC's version, such as (13, 0)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


# ---- logs ------------------------------------------------------------------------------------


def parse_usage(log: str) -> dict[str, Usage]:
    """Read the report of `ptxas -v`: the resources of each function."""
    found: dict[str, Usage] = {}
    name, sizes = "", (0, 0, 0)
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name, sizes = match[1], (0, 0, 0)
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            sizes = (int(match[1]), int(match[2]), int(match[3]))
        elif (match := re.search(r"Used (\d+) registers", line)) and name:
            barriers = re.search(r"used (\d+) barriers", line)
            stack, stores, loads = sizes
            count = int(barriers[1]) if barriers else 0
            found[name] = Usage(int(match[1]), stores, loads, stack, count)
    return found


def with_lines(log: str, source: str, around: int = 2) -> str:
    """Return a log followed by the numbered source lines that it names, and their neighbours."""
    lines = source.splitlines()
    named = {int(number) for number in re.findall(r"kernels\.cu\((\d+)\)", log)}
    wanted = sorted(
        {n for at in named for n in range(at - around, at + around + 1) if 0 < n <= len(lines)}
    )
    shown = [f"{'>' if n in named else ' '}{n:5} | {lines[n - 1]}" for n in wanted]
    return "\n".join([log.strip(), *shown])


# ---- the library -----------------------------------------------------------------------------


@functools.cache
def library() -> ctypes.CDLL:
    """Load NVRTC from its wheel."""
    try:
        files = importlib.metadata.files(NVRTC_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        raise NvrtcError(
            f"compiling for CUDA needs NVRTC: pip install {NVRTC_WHEEL} (no GPU is needed)"
        ) from None
    paths = [Path(str(f.locate())) for f in files if f.match("libnvrtc.so*")]
    if not paths:
        raise NvrtcError(f"{NVRTC_WHEEL} has no libnvrtc.so: reinstall it")
    # It looks for its builtins by name: load them first, from the same folder.
    for builtins in sorted(paths[0].parent.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    found = ctypes.CDLL(str(paths[0]))
    found.nvrtcGetErrorString.restype = ctypes.c_char_p
    return found


def _call(function: str, *args: object) -> None:
    status = getattr(library(), function)(*args)
    if status:
        raise NvrtcError(f"{function}: {_name(status)}")


def _name(status: int) -> str:
    return library().nvrtcGetErrorString(status).decode()


def _bytes_of(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{what}", program, buffer)
    return buffer.raw


def _ptx_of(program: ctypes.c_void_p) -> str:
    return _text_of(program, "PTX")


def _text_of(program: ctypes.c_void_p, what: str) -> str:
    return _bytes_of(program, what).rstrip(b"\0").decode(errors="replace")
