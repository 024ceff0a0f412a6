"""Train with and without overlap on all ranks: the same bits, in all kinds of programs.

mpirun -n 2 python -m tests.multiprocess.programs.overlap
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.executable import mesh_executable
from spmd.sharding import Mesh
from spmd.sharding import PartitionSpec as P
from tests.collectives.compare import assert_same
from tests.collectives.programs import example, random_program

N = spmd.device_count()
HERE = spmd.local_device_count()
MINE = slice(spmd.process_index() * HERE, (spmd.process_index() + 1) * HERE)
WIDTH, LAYERS = 320, 5


def weights() -> Any:
    rng = np.random.default_rng(0)
    shape = WIDTH, WIDTH
    return [
        (rng.normal(size=shape).astype(np.float32) / 18, np.zeros(WIDTH, np.float32))
        for _ in range(LAYERS)
    ]


def batch() -> Any:
    x = np.random.default_rng(1).normal(size=(N, 32, WIDTH)).astype(np.float32)
    return x[MINE]


def loss(params: Any, x: Any) -> Any:
    for w, b in params:
        x = snp.tanh(x @ w + b)
    return snp.mean(x**2)


def step(params: Any, x: Any) -> Any:
    """Data parallel: gradients that differ by device, summed at the end."""
    value, gradients = spmd.value_and_grad(loss)(params, x)
    gradients = lax.pmean(gradients, "i")
    return lax.pmean(value, "i"), spmd.tree.map(lambda a, g: a - 0.1 * g, params, gradients)


def scanned(params: Any, x: Any) -> Any:
    """Steps in a loop: exchanges in flight within each round."""

    def once(params: Any, _: Any) -> Any:
        value, new = step(params, x)
        return new, value

    params, values = lax.scan(once, params, None, 3)
    return values, params


def mixed(params: Any, x: Any) -> Any:
    """Collectives of all kinds, some of which depend on others."""
    whole = lax.all_gather(x, "i")
    shifted = lax.ppermute(x, "i", [(k, (k + 1) % N) for k in range(N)])
    y = snp.sin(x) @ params[0][0] + shifted
    part = lax.psum_scatter(snp.stack([y] * N), "i")
    most = lax.pmax(y, "i")
    turned = lax.all_to_all(snp.stack([x * k for k in range(N)]), "i", 0, 0)
    z = y @ params[1][0] + part
    return lax.psum(z.sum() + whole.sum(), "i"), z + most + turned.sum(0) @ params[2][0]


def both(make: Callable[[], Callable[..., Any]], *args: Any, name: str) -> list[str]:
    """Compare a program without and with exchanges in flight; what it says of those."""
    found, said = [], []
    for mode in ("never", "always"):
        with spmd.config.override("overlap", mode):
            function, before = make(), mesh_executable.known_executables()
            found.append(function(*args))
            new = [e for e in mesh_executable.known_executables() if e not in before]
            said.append({text for e in new for text in e.exchanges})
    assert_same(found[1], found[0], name)
    flew = [text for text in said[1] - said[0] if "while the program computes" in text]
    assert not any("while the program computes" in text for text in said[0] - said[1]), said
    return sorted(flew)


def check_programs() -> int:
    flew = 0
    for f, out_axes in ((step, None), (scanned, None), (mixed, (None, 0))):
        said = both(
            lambda f=f, out=out_axes: spmd.pmap(f, axis_name="i", in_axes=(None, 0), out_axes=out),
            weights(),
            batch(),
            name=f.__name__,
        )
        wanted = "psum: 11 tensors in 2 exchanges, 2 of them" if f is not mixed else "all_gather: 1"
        assert any(text.startswith(wanted) for text in said), said
        flew += len(said)
    return flew


def check_shard_map() -> None:
    """Replicated weights: the psum of each gradient stands where the gradient is made."""
    mesh = Mesh(np.array(spmd.devices()), ("i",))

    def train(params: Any, x: Any) -> Any:
        value, gradients = spmd.value_and_grad(lambda p: lax.pmean(loss(p, x), "i"))(params)
        return value, spmd.tree.map(lambda a, g: a - 0.1 * g, params, gradients)

    x = np.random.default_rng(1).normal(size=(N * 32, WIDTH)).astype(np.float32)
    x = spmd.device_put(x, spmd.sharding.NamedSharding(mesh, P("i")))
    make = lambda: spmd.jit(  # noqa: E731
        spmd.shard_map(train, mesh=mesh, in_specs=(P(), P("i")), out_specs=(P(), P()))
    )
    said = both(make, weights(), x, name="shard_map")
    assert any(text.startswith("psum: 11 tensors in 2 exchanges, 2 of them") for text in said), said


def check_random_programs() -> None:
    for seed in range(2):
        f, x = random_program(seed, N), example(seed, N)[MINE]
        both(lambda f=f: spmd.pmap(f, axis_name="i"), x, name=f"random {seed}")


def main() -> None:
    flew = check_programs()
    check_shard_map()
    check_random_programs()
    if spmd.process_index() == 0:
        ranks = spmd.process_count()
        print(
            f"{flew} kinds of collectives flew on {ranks} ranks x {HERE} devices: all right",
            flush=True,
        )


main()
