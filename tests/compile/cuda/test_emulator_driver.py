"""The emulator as a driver: each call, each misuse, and that its streams are late."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest

from spmd.base.errors import CudaError, OutOfMemoryError
from spmd.compile.cuda.driver import makers
from spmd.compile.cuda.emulator.driver import EmulatorDriver
from spmd.compile.cuda.nvrtc import Compiled, compile_cubin

CAPACITY = 16 << 20
SOURCE = """
extern "C" __global__ void add(float *x, const float *y, const int *count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < *count) x[i] += y[i];
}
extern "C" __global__ void shared_bytes(float *x) {
  extern __shared__ float s[];
  s[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = s[threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def image() -> Compiled:
    """A module of two functions."""
    return compile_cubin(SOURCE, "sm_90")


@pytest.fixture
def gpu() -> EmulatorDriver:
    """Two devices."""
    return EmulatorDriver(2, capacity=CAPACITY)


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def uploaded(gpu: EmulatorDriver, x: np.ndarray, device: int = 0) -> int:
    """The address of a device's copy of an array, which may not be there yet."""
    made = gpu.allocate(device, x.nbytes)
    gpu.copy(device, made, address(x), x.nbytes)
    return made


def downloaded(gpu: EmulatorDriver, where: int, like: np.ndarray, device: int = 0) -> np.ndarray:
    out = np.zeros_like(like)
    gpu.copy(device, address(out), where, out.nbytes)
    gpu.synchronize(device)
    return out


def make_current(gpu: EmulatorDriver, device: int) -> None:
    """Say which device this thread means, as native code does before each call."""
    current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(gpu.entries.current)
    context = gpu.context(device) if 0 <= device < gpu.device_count() else 0
    assert (current(context) == 0) == (context != 0)


def launch(gpu: EmulatorDriver, function: int, arguments: Sequence[int], **given: int) -> int:
    """Call the entry `launch` as native code does; its code."""
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_uint64,
        *[ctypes.c_uint32] * 7,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_void_p,
    )
    values = (ctypes.c_int64 * len(arguments))(*arguments)
    places = (ctypes.c_void_p * len(arguments))(
        *(ctypes.addressof(values) + 8 * k for k in range(len(arguments)))
    )
    sizes = {"grid": 1, "gy": 1, "gz": 1, "x": 128, "y": 1, "z": 1, "shared": 0}
    sizes |= {name: value for name, value in given.items() if name in sizes}
    stream = given.get("stream", gpu.stream(0))
    pointers = ctypes.addressof(places)
    make_current(gpu, given.get("current", stream - gpu.stream(0)))
    return kind(gpu.entries.launch)(function, *sizes.values(), stream, pointers, None)


def add(gpu: EmulatorDriver, image: Compiled, device: int = 0, shared: int = 0) -> int:
    """The handle of the function `add`."""
    return gpu.function(device, gpu.load(device, image), "add", shared)


# ---- what it does --------------------------------------------------------------------------------


def test_devices_and_their_facts(gpu):
    assert gpu.device_count() == 2
    facts = gpu.facts(1)
    assert (facts.name, facts.arch, facts.memory) == ("emulated GPU 1", "sm_90", CAPACITY)
    assert gpu.entries_run_python
    assert gpu.stream(0) != gpu.stream(1)


def test_the_settings_make_it():
    made = makers["emulator"]()
    assert isinstance(made, EmulatorDriver)
    assert (made.device_count(), made.mode) == (1, "checked")


def test_a_launch_through_the_entries_runs_when_it_is_waited_for(gpu, image):
    x, y = (np.random.default_rng(k).random(1000, np.float32) for k in range(2))
    count = np.array([1000], np.int32)
    a, b, c = (uploaded(gpu, each) for each in (x, y, count))
    function = add(gpu, image)
    assert launch(gpu, function, [a, b, c], grid=8) == 0
    assert launch(gpu, function, [a, b, c], grid=8) == 0
    np.testing.assert_allclose(downloaded(gpu, a, x), x + y + y, rtol=1e-6)


def test_the_stream_is_late_and_in_order(gpu):
    x, out = np.arange(8.0), np.zeros(8)
    a = uploaded(gpu, x)
    gpu.copy(0, address(out), a, out.nbytes)
    assert not out.any()
    x[:] = 7  # the copy to the device is not done either
    gpu.synchronize(0)
    assert (out == 7).all()


def test_who_asks_whether_a_stream_is_idle_lets_it_get_on(gpu):
    x, out = np.arange(8.0), np.zeros(8)
    gpu.copy(0, address(out), uploaded(gpu, x), out.nbytes)
    asked = 0
    while not gpu.is_idle(0):
        asked += 1
        assert asked < 5
    assert np.array_equal(out, x) and asked == 1
    assert gpu.is_idle(1)


def test_work_of_other_devices_is_done_at_random_moments():
    seen = set()
    for seed in range(20):
        gpu = EmulatorDriver(2, seed=seed, capacity=CAPACITY)
        x, out = np.arange(8.0), np.zeros(8)
        a = uploaded(gpu, x, 1)
        # Device 0 reads what device 1 writes, and nobody waits for device 1.
        gpu.copy(0, address(out), a, out.nbytes)
        gpu.synchronize(0)
        seen.add(bool(np.array_equal(out, x)))
    assert seen == {True, False}


def test_copies_between_devices_and_within_the_host(gpu):
    x = np.arange(8.0)
    a = uploaded(gpu, x, 0)
    gpu.synchronize(0)
    b = gpu.allocate(1, x.nbytes)
    gpu.copy(1, b, a, x.nbytes)
    assert np.array_equal(downloaded(gpu, b, x, 1), x)
    out = np.zeros(4)
    gpu.copy(0, address(out), address(x) + 8, out.nbytes)
    gpu.synchronize(0)
    assert out.tolist() == [1, 2, 3, 4]


def test_copy_and_wait_entries(gpu):
    copy = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)(gpu.entries.copy)
    wait = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(gpu.entries.wait)
    x, out = np.arange(8.0), np.zeros(8)
    a = gpu.allocate(0, x.nbytes)
    make_current(gpu, 0)
    assert copy(a, address(x), x.nbytes, gpu.stream(0)) == 0
    assert copy(address(out), a, x.nbytes, gpu.stream(0)) == 0
    assert wait(gpu.stream(0)) == 0
    assert np.array_equal(out, x)
    code = copy(a + 8, address(x), x.nbytes, gpu.stream(0))
    assert "is not 64 bytes of one allocation on CUDA device 0" in gpu.error(code)
    code = wait(12345)
    assert gpu.error(code) == "0x3039 is no stream"
    make_current(gpu, 1)
    code = wait(gpu.stream(0))
    assert gpu.error(code) == "a stream of CUDA device 0, and the current device is 1"
    assert gpu.error(999) == "error 999 of the emulator"


def test_memory_is_aligned_apart_and_full_of_nan(gpu):
    sizes = (0, 1, 16, 255, 256, 1000)
    found = [gpu.allocate(0, nbytes) for nbytes in sizes]
    assert all(a % 256 == 0 for a in found)
    for a, b, nbytes in zip(found, found[1:], sizes, strict=False):
        assert b - a >= nbytes + 256
    fresh = downloaded(gpu, found[-1], np.zeros(250, np.float32))
    assert np.isnan(fresh).all()
    pinned = gpu.allocate_pinned(64)
    assert pinned % 256 == 0
    assert np.isnan(np.array((ctypes.c_double * 8).from_address(pinned))).all()
    gpu.free_pinned(0, pinned)


def test_memory_in_use_is_what_is_not_freed(gpu):
    a, b = gpu.allocate(0, 1000), gpu.allocate(0, 500)
    assert gpu.memory_in_use(0) == (1500, 1500) and gpu.memory_in_use(1) == (0, 0)
    gpu.free(0, a)
    assert gpu.memory_in_use(0) == (500, 1500)
    gpu.free(0, b)
    assert gpu.memory_in_use(0) == (0, 1500)


def test_freed_memory_is_there_for_the_work_before_it_and_then_poisoned(gpu):
    x, out = np.arange(8.0), np.zeros(8)
    a = uploaded(gpu, x)
    gpu.copy(0, address(out), a, out.nbytes)
    gpu.free(0, a)
    gpu.synchronize(0)
    assert np.array_equal(out, x)
    # Full memory is found again when the streams' work is done.
    big = CAPACITY // 2 - 4096
    for _ in range(5):
        gpu.free(0, gpu.allocate(0, big))


def test_a_freed_range_is_taken_again_as_late_as_possible(gpu):
    first = gpu.allocate(0, 1000)
    gpu.free(0, first)
    gpu.synchronize(0)
    taken = []
    while len(taken) < 30_000 and first not in taken[-1:]:
        taken.append(gpu.allocate(0, 1000))
        gpu.free(0, taken[-1])
        gpu.synchronize(0)
    assert taken[-1] == first and len(taken) > 0.9 * CAPACITY / 1280


def test_a_graph_is_the_work_of_a_captured_stream(gpu, image):
    x, count = np.ones(100, np.float32), np.array([100], np.int32)
    a, b, c = (uploaded(gpu, each) for each in (x, x, count))
    function = add(gpu, image)
    gpu.synchronize(0)
    stream = gpu.begin_capture(0)
    assert launch(gpu, function, [a, b, c], stream=stream, current=0) == 0
    for call in (lambda: gpu.allocate(0, 8), lambda: gpu.allocate_pinned(8)):
        with pytest.raises(CudaError, match="an allocation while a stream is captured"):
            call()
    with pytest.raises(CudaError, match="a wait for a stream while a stream is captured"):
        gpu.synchronize(0)
    wait = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(gpu.entries.wait)
    assert gpu.error(wait(stream)) == "a wait for a stream that is captured"
    graph = gpu.end_capture(0, stream)
    assert (downloaded(gpu, a, x) == 1).all()  # it was not done
    for _ in range(3):
        gpu.replay(0, graph)
    assert (downloaded(gpu, a, x) == 4).all()
    assert gpu.begin_capture(0) == stream  # is used again
    assert gpu.end_capture(0, stream) != graph
    with pytest.raises(CudaError, match="the end of a capture that did not begin"):
        gpu.end_capture(0, stream)
    with pytest.raises(CudaError, match="is of CUDA device 0, or is freed"):
        gpu.replay(1, graph)
    gpu.free_graph(0, graph)
    with pytest.raises(CudaError, match="is of CUDA device 0, or is freed"):
        gpu.replay(0, graph)


# ---- misuse --------------------------------------------------------------------------------------


def test_a_full_device_says_what_is_free(gpu):
    gpu.allocate(0, CAPACITY // 2)
    with pytest.raises(OutOfMemoryError, match=r"CUDA device 0 .*: 16.8 MB asked, 8.39 MB of") as e:
        gpu.allocate(0, CAPACITY)
    assert isinstance(e.value, MemoryError)
    assert gpu.allocate(1, CAPACITY // 2)


def test_devices_and_sizes_that_are_not_there(gpu):
    for call in (gpu.facts, gpu.stream, gpu.synchronize, gpu.is_idle, gpu.memory_in_use):
        with pytest.raises(CudaError, match=r"CUDA device 2: there are 2 \(emulated\)"):
            call(2)
    with pytest.raises(CudaError, match="CUDA device -1"):
        gpu.allocate(-1, 8)
    with pytest.raises(CudaError, match="allocate: -1 bytes"):
        gpu.allocate(0, -1)


def test_freeing_what_is_no_allocation(gpu):
    a = gpu.allocate(0, 64)
    with pytest.raises(CudaError, match="is not the start of an allocation on CUDA device 0"):
        gpu.free(0, a + 8)
    with pytest.raises(CudaError, match="is not the start of an allocation on CUDA device 1"):
        gpu.free(1, a)
    gpu.free(0, a)
    with pytest.raises(CudaError, match="is freed already"):
        gpu.free(0, a)
    gpu.synchronize(0)
    with pytest.raises(CudaError, match="is not the start of an allocation"):
        gpu.free(0, a)
    with pytest.raises(CudaError, match="0x40 is no pinned memory"):
        gpu.free_pinned(0, 64)


def test_copies_that_leave_memory_or_use_what_is_freed(gpu):
    x = np.zeros(8)
    a = gpu.allocate(0, x.nbytes)
    with pytest.raises(CudaError, match=r"copy to: .* is not 72 bytes of one allocation"):
        gpu.copy(0, a, address(x), 72)
    with pytest.raises(CudaError, match="copy from address 0"):
        gpu.copy(0, a, 0, 8)
    gpu.free(0, a)
    with pytest.raises(CudaError, match=r"copy to .* of CUDA device 0, which is freed"):
        gpu.copy(0, a, address(x), 8)
    # Freed on another device's stream, before the copy was done: only the stream knows.
    b = gpu.allocate(0, x.nbytes)
    gpu.copy(1, address(x), b, 8)
    gpu.free(0, b)
    gpu.synchronize(0)
    with pytest.raises(CudaError, match=r"copy from: .* is not 8 bytes of one allocation"):
        gpu.synchronize(1)


def test_a_host_that_follows_a_device_address_ends(run_python):
    program = (
        "import ctypes\n"
        "from spmd.compile.cuda.emulator.driver import EmulatorDriver\n"
        "a = EmulatorDriver(1).allocate(0, 64)\n"
        "print('allocated', flush=True)\n"
        "ctypes.c_char.from_address(a).value\n"
        "print('not reached')\n"
    )
    done = run_python(["-c", program])
    assert done.returncode < 0 and done.stdout == "allocated\n"


def test_modules_and_functions_that_are_not_there(gpu, image):
    module = gpu.load(0, image)
    with pytest.raises(CudaError, match="function sub: the module has add, shared_bytes"):
        gpu.function(0, module, "sub", 0)
    with pytest.raises(CudaError, match="the module is on CUDA device 0, not 1"):
        gpu.function(1, module, "add", 0)
    with pytest.raises(CudaError, match="0x7 is no module"):
        gpu.function(0, 7, "add", 0)
    with pytest.raises(CudaError, match="300000 shared bytes a block; there are 232448"):
        gpu.function(0, module, "add", 300_000)
    with pytest.raises(CudaError, match="the module has machine code only"):
        gpu.load(0, Compiled("sm_90", b"", {}))


def test_launches_that_no_gpu_begins(gpu, image):
    function = add(gpu, image)
    a = gpu.allocate(0, 4096)

    def told(function: int = function, **sizes: int) -> str:
        return gpu.error(launch(gpu, function, [a, a, a], **sizes))

    assert told(5) == "0x5 is no function"
    assert told(stream=5) == "0x5 is no stream"
    assert "and the stream is of device 1" in told(stream=gpu.stream(1))
    assert told(gy=2) == "launch of add: grid (1, 2, 1), block (128, 1, 1)"
    assert told(x=0) == "launch of add: grid (1, 1, 1), block (0, 1, 1)"
    assert "no GPU has Launch(grid=1, block=(1024, 2)" in told(x=1024, y=2)
    assert "50000 shared bytes a block, and its function was made for 49152" in told(shared=50_000)
    large = gpu.function(0, gpu.load(0, image), "shared_bytes", 50_000)
    assert launch(gpu, large, [a], shared=50_000) == 0
    gpu.synchronize(0)


def test_a_failure_names_the_line_and_drops_what_is_behind_it(gpu, image):
    x, count = np.zeros(100, np.float32), np.array([101], np.int32)
    a, b, c = (uploaded(gpu, each) for each in (x, x, count))
    assert launch(gpu, add(gpu, image), [a, b, c]) == 0
    out = np.ones(100, np.float32)
    gpu.copy(0, address(out), a, out.nbytes)
    gpu.free(0, b)
    expected = r"thread 100 of block 0 read 4 bytes at .*, outside of what is allocated at "
    with pytest.raises(CudaError, match=expected + r"kernels.cu:4: if \(i < \*count\) x\[i\] \+="):
        gpu.synchronize(0)
    assert (out == 1).all()
    gpu.synchronize(0)  # told once
    assert gpu.memory_in_use(0)[0] == x.nbytes + count.nbytes
    assert not downloaded(gpu, a, x)[:100].any()


def test_kernels_may_not_use_another_devices_memory_or_the_hosts(gpu, image):
    x, count = np.zeros(100, np.float32), np.array([100], np.int32)
    a, c = uploaded(gpu, x), uploaded(gpu, count)
    far = uploaded(gpu, x, 1)
    function = add(gpu, image)
    for other, named in ((far, "an address of CUDA device 1"), (address(x), "of the host")):
        launch(gpu, function, [a, other, c])
        with pytest.raises(CudaError, match=named):
            gpu.synchronize(0)


def test_a_second_process_translates_nothing(run_python, tmp_path):
    program = (
        "import sys, numpy as np\n"
        "from spmd.compile.cuda.emulator.driver import EmulatorDriver\n"
        "from spmd.compile.cuda.nvrtc import Compiled\n"
        f"ptx = open({str(tmp_path / 'a.ptx')!r}).read()\n"
        "gpu = EmulatorDriver(1)\n"
        "print(gpu.load(0, Compiled('sm_90', b'', {}, ptx)) > 0)\n"
        "names = ('llvmlite', 'spmd.compile.cuda.emulator.translate')\n"
        "print([m for m in names if m in sys.modules])"
    )
    ptx = compile_cubin(SOURCE, "sm_90").ptx
    (tmp_path / "a.ptx").write_text(ptx)
    env = {"SPMD_CACHE_DIR": str(tmp_path / "cache")}
    first, second = (run_python(["-c", program], env=env) for _ in range(2))
    assert first.stdout == "True\n['llvmlite', 'spmd.compile.cuda.emulator.translate']\n"
    assert second.stdout == "True\n[]\n"
