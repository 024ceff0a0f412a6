"""cp.async: copies land where they are waited for, no earlier, and who does not wait is told."""

from __future__ import annotations

import numpy as np
import pytest

from spmd.base.errors import CudaError
from spmd.compile.cuda.emulator.types import UnknownPtxError
from tests.compile.cuda.test_instructions import run

# A thread copies four words from x into shared memory, in a group of its own for each of `rounds`.
KERNEL = r"""
__device__ void begin(void *to, const void *from, int nbytes) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(nbytes)
               : "memory");
}
__device__ void begin_word(void *to, const void *from) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at), "l"(from) : "memory");
}
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
#define WAIT_ALL asm volatile("cp.async.wait_all;" ::: "memory")
extern "C" __global__ void f(unsigned *out, const unsigned *x) {
  extern __shared__ unsigned s[];
  const int i = threadIdx.x, other = i ^ 32;
  BODY
}
"""
X = np.arange(256, dtype=np.uint32) + 7


def got(body: str, out: int = 64) -> np.ndarray:
    return run(KERNEL.replace("BODY", body), np.zeros(out, np.uint32), X, threads=64)


COPY = "begin(s + 4 * {to}, x + 4 * {of}, 16);"


def test_a_copy_is_there_for_its_thread_behind_the_wait_and_for_others_behind_a_barrier():
    own = COPY.format(to="i", of="i") + "COMMIT; WAIT(0); out[i] = s[4 * i + 3];"
    assert np.array_equal(got(own), X[3::4])
    all_of_it = COPY.format(to="i", of="i") + "WAIT_ALL; out[i] = s[4 * i + 2];"
    assert np.array_equal(got(all_of_it), X[2::4])
    others = COPY.format(to="i", of="i") + "COMMIT; WAIT(0); __syncthreads();"
    assert np.array_equal(
        got(others + "out[i] = s[4 * other + 1];"), X[1::4].reshape(2, 32)[::-1].reshape(-1)
    )


def test_bytes_beyond_those_of_the_source_are_zero():
    body = "begin(s + 4 * i, i % 4 ? x + 4 * i : nullptr, i % 4 * 4); COMMIT; WAIT(0);"
    body += "for (int k = 0; k < 4; k++) out[4 * i + k] = s[4 * i + k];"
    wanted = np.where(np.arange(256) % 4 < np.arange(256) // 4 % 4, X, 0)
    assert np.array_equal(got(body, 256), wanted)


def test_a_wait_leaves_the_last_groups_under_way():
    first = "begin(s + 4 * (i % 32), x, 16); COMMIT; begin(s + 128 + 4 * (i % 32), x + 4, 16);"
    first = f"if (i < 32) {{ {first} COMMIT; WAIT(1); "
    assert np.array_equal(got(first + "out[i] = s[4 * i]; }")[:32], np.full(32, X[0]))
    with pytest.raises(CudaError, match="and nothing waits for that"):
        got(first + "out[i] = s[128 + 4 * i]; }")


def test_a_full_queue_lands_its_oldest_copies():
    body = "for (int k = 0; k < 200; k++) { begin_word(s + k, x + k); if (k % 3 == 0) COMMIT; } "
    body = f"if (i == 0) {{ {body} WAIT_ALL; for (int k = 0; k < 200; k++) out[k] = s[k]; }}"
    assert np.array_equal(got(body, 200), X[:200])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (COPY.format(to="i", of="i") + "COMMIT; out[i] = s[4 * i];", "nothing waits for that"),
        (COPY.format(to="i", of="i") + "WAIT(0); out[i] = s[4 * i];", "nothing waits for that"),
        (COPY.format(to="i", of="i") + "COMMIT; s[4 * i] = 1;", "nothing waits for that"),
        (
            COPY.format(to="i", of="i") + "COMMIT; __syncthreads(); out[i] = s[4 * other];",
            "nothing waits for that",
        ),
        (
            "s[i] = i; " + COPY.format(to="(16 + i)", of="i") + "COMMIT; out[i] = s[4 * i];"
            "WAIT(0); begin(s + 4 * other, x, 16);",
            "with no barrier between",
        ),
        ("begin(s + 4 * i, x + 4 * i + 1, 16);", "no multiple of it"),
        ("begin(s + 4 * i + 1, x + 4 * i, 16);", "no multiple of it"),
        ("begin(s + 4 * i, x + 256 + 4 * i, 16);", "outside of what is allocated"),
        ("begin(s + 256 * i, x + 4 * i, 16);", "of the shared memory, which has 1024"),
    ],
)
def test_mistakes_are_told(body, message):
    with pytest.raises(CudaError, match=message):
        got(body)


def test_a_report_does_not_outlive_its_launch():
    with pytest.raises(CudaError, match="nothing waits"):
        got(COPY.format(to="i", of="i") + "out[i] = s[4 * i];")
    assert np.array_equal(got("s[4 * i] = i; __syncthreads(); out[i] = s[4 * i];"), np.arange(64))


def test_other_forms_are_unknown():
    body = 'asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(0), "l"(x));'
    with pytest.raises(UnknownPtxError, match="L2::128B"):
        got(body)
