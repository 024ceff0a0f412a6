"""A stand-in for NCCL over the emulator: `standin.c` as `libnccl.so.2`.

Programs call it through `cupy.cuda.nccl` of the real wheel where that is installed, else through a
module of the same names and signatures.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from ctypes import c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from types import ModuleType
from typing import Any

from spmd.base.errors import CudaError, SpmdError
from spmd.compile.cuda.driver import driver
from spmd.compile.cuda.emulator.driver import EmulatorDriver
from spmd.compile.cuda.emulator.streams import WAITS

SOURCE = Path(__file__).with_name("standin.c")
COMPILERS = "cc", "gcc", "clang"
# ctypes frees functions without a reference.
_KEPT: list[object] = []
# What `standin_progress` gives, beside 0 for an operation that is not done.
_DONE, _BAD_MEMORY, _BAD_LENGTH = 1, 2, 3


def compiler() -> list[str] | None:
    """The command of a C compiler; None where there is none."""
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


def build(folder: Path) -> Path:
    """The compiled library."""
    path, command = folder / "libnccl.so.2", compiler()
    assert command is not None
    options = "-O1", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", str(path)
    subprocess.run([*command, *options, str(SOURCE)], check=True)
    return path


def connect(path: str) -> str:
    """Let the emulator's streams carry what the library does; says through which module."""
    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    kinds = (
        ctypes.CFUNCTYPE(c_int, c_uint64, c_void_p),
        ctypes.CFUNCTYPE(c_uint64, c_uint64, c_uint64, c_int),
    )
    failures: list[str] = []

    def submit(stream: int, op: int) -> int:
        def work() -> object:
            state = library.standin_progress(c_void_p(op))
            if state == _BAD_MEMORY:
                raise CudaError(f"NCCL: {failures.pop()}")
            if state == _BAD_LENGTH:
                raise CudaError("NCCL: ranks send and receive different numbers of bytes")
            return None if state == _DONE else WAITS

        emulator().submit(stream, work)
        return 0

    def host_address(address: int, nbytes: int, how: int) -> int:
        try:
            return emulator().host_address(address, nbytes, "NCCL", how)
        except SpmdError as error:
            failures.append(error.text)
            return 0

    kept = kinds[0](submit), kinds[1](host_address)
    library.standin_connect(*kept)
    _KEPT.append(kept)
    EmulatorDriver.carries_nccl = True
    if importlib.util.find_spec("cupy") is not None:
        return "cupy.cuda.nccl"
    nccl = module(library)
    cuda, cupy = ModuleType("cupy.cuda"), ModuleType("cupy")
    vars(cuda)["nccl"], vars(cupy)["cuda"] = nccl, cuda
    sys.modules.update({"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl})
    return "a stand-in for cupy.cuda.nccl"


def emulator() -> EmulatorDriver:
    """The driver in use."""
    found = driver()
    assert isinstance(found, EmulatorDriver)
    return found


# ---- in the place of CuPy's module ---------------------------------------------------------------

# As the docstrings of the wheel have them: sizes are `size_t`, addresses and streams `intptr_t`.
METHODS = (
    "allReduce(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, int op, "
    "intptr_t stream)",
    "reduceScatter(self, intptr_t sendbuf, intptr_t recvbuf, size_t recvcount, int datatype, "
    "int op, intptr_t stream)",
    "allGather(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, "
    "intptr_t stream)",
    "broadcast(self, intptr_t sendbuff, intptr_t recvbuff, size_t count, int datatype, int root, "
    "intptr_t stream)",
    "send(self, intptr_t sendbuf, size_t count, int datatype, int peer, intptr_t stream)",
    "recv(self, intptr_t recvbuf, size_t count, int datatype, int peer, intptr_t stream)",
)
NUMBERS = {
    f"NCCL_{name}": code
    for code, name in enumerate("INT8 UINT8 INT32 UINT32 INT64 UINT64 FLOAT16 FLOAT32".split())
} | {"NCCL_FLOAT64": 8, "NCCL_SUM": 0, "NCCL_PROD": 1, "NCCL_MAX": 2, "NCCL_MIN": 3}
_ID_BYTES = 128
_NAMES = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR",
    2: "NCCL_ERROR_SYSTEM_ERROR",
    3: "NCCL_ERROR_INTERNAL_ERROR",
    4: "NCCL_ERROR_INVALID_ARGUMENT",
    5: "NCCL_ERROR_INVALID_USAGE",
    6: "NCCL_ERROR_REMOTE_ERROR",
}
_KINDS = {"intptr_t": c_uint64, "size_t": c_size_t, "int": c_int}


def module(library: Any) -> Any:
    """A module like `cupy.cuda.nccl` over the library."""

    class NcclError(RuntimeError):
        def __init__(self, status: int):
            self.status = status
            super().__init__(f"{_NAMES[status]}: {_NAMES[status].lower()}")

    def check(status: int) -> None:
        if status:
            raise NcclError(status)

    class UniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)

    def get_version() -> int:
        version = c_int()
        check(library.ncclGetVersion(ctypes.byref(version)))
        return version.value

    def get_unique_id() -> tuple[int, ...]:
        made = UniqueId()
        check(library.ncclGetUniqueId(ctypes.byref(made)))
        return tuple(made.internal)

    class NcclCommunicator:
        def __init__(self, ndev: int, commId: tuple[int, ...], rank: int):
            assert type(commId) is tuple and len(commId) == _ID_BYTES
            self.comm = c_void_p()
            given = UniqueId((ctypes.c_byte * _ID_BYTES)(*commId))
            check(library.ncclCommInitRank(ctypes.byref(self.comm), ndev, given, rank))

        def check_async_error(self) -> None:
            status = c_int()
            check(library.ncclCommGetAsyncError(self.comm, ctypes.byref(status)))
            check(status.value)

        def abort(self) -> None:
            if self.comm:
                library.ncclCommAbort(self.comm)
                self.comm = c_void_p()

    def method(signature: str) -> Any:
        name, given = signature.rstrip(")").split("(self, ")
        kinds = [_KINDS[part.split()[0]] for part in given.split(", ")]
        function = getattr(library, f"nccl{name[0].upper()}{name[1:]}")

        def call(self: NcclCommunicator, *args: int) -> None:
            if len(args) != len(kinds) or any(type(x) is not int or x < 0 for x in args):
                raise TypeError(f"{signature} was given {args}")
            *first, stream = [kind(x) for kind, x in zip(kinds, args, strict=True)]
            check(function(*first, self.comm, stream))

        return name, call

    for signature in METHODS:
        setattr(NcclCommunicator, *method(signature))
    made = ModuleType("cupy.cuda.nccl")
    vars(made).update(
        available=True,
        NcclError=NcclError,
        NcclCommunicator=NcclCommunicator,
        get_version=get_version,
        get_unique_id=get_unique_id,
        groupStart=lambda: check(library.ncclGroupStart()),
        groupEnd=lambda: check(library.ncclGroupEnd()),
        **NUMBERS,
    )
    return made
