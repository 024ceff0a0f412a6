"""Tracebacks without spmd's frames: which functions cut them, and what each setting leaves."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spmd
import spmd.numpy as jnp
from spmd import lax
from spmd.base.source import is_ours
from spmd.base.traceback_filter import NOTE
from spmd.checkify import checkify
from spmd.errors import UnfilteredStackTrace

MESH = spmd.make_mesh((1,), ("i",))


def failing(*_: Any, **__: Any) -> Any:
    """A user's function with a fault."""
    raise LookupError("a fault of the user's")


@spmd.custom_jvp
def with_rule(x: Any) -> Any:
    return x


with_rule.defjvp(failing)


@spmd.custom_vjp
def with_backward(x: Any) -> Any:
    return x


with_backward.defvjp(lambda x: (x, None), failing)

# Calls of a function of the user's, which fails.
CALLS: dict[str, Callable[[], Any]] = {
    "jit": lambda: spmd.jit(failing)(1.0),
    "jit of jit": lambda: spmd.jit(lambda x: spmd.jit(failing)(x))(1.0),
    "trace": lambda: spmd.jit(failing).trace(1.0),
    "lower": lambda: spmd.jit(failing).lower(1.0),
    "grad": lambda: spmd.grad(failing)(1.0),
    "value_and_grad": lambda: spmd.value_and_grad(failing)(1.0),
    "vjp": lambda: spmd.vjp(failing, 1.0),
    "jvp": lambda: spmd.jvp(failing, (1.0,), (1.0,)),
    "linearize": lambda: spmd.linearize(failing, 1.0),
    "jacfwd": lambda: spmd.jacfwd(failing)(1.0),
    "jacrev": lambda: spmd.jacrev(failing)(1.0),
    "hessian": lambda: spmd.hessian(failing)(1.0),
    "vmap": lambda: spmd.vmap(failing)(jnp.ones(2)),
    "pmap": lambda: spmd.pmap(failing)(jnp.ones((1, 2))),
    "shard_map": lambda: spmd.shard_map(failing, mesh=MESH, in_specs=spmd.P(), out_specs=spmd.P())(
        jnp.ones(2)
    ),
    "checkpoint": lambda: spmd.checkpoint(failing)(1.0),
    "make_jaxpr": lambda: spmd.make_jaxpr(failing)(1.0),
    "eval_shape": lambda: spmd.eval_shape(failing, 1.0),
    "custom_jvp": lambda: spmd.jvp(with_rule, (1.0,), (1.0,)),
    "custom_vjp": lambda: spmd.grad(with_backward)(1.0),
    "pullback": lambda: spmd.vjp(with_backward, 1.0)[1](1.0),
    "cond": lambda: lax.cond(True, failing, failing, 1.0),
    "switch": lambda: lax.switch(0, [failing, failing], 1.0),
    "scan": lambda: lax.scan(failing, 1.0, jnp.ones(2)),
    "while_loop": lambda: lax.while_loop(lambda x: x < 0, failing, 1.0),
    "fori_loop": lambda: lax.fori_loop(0, 2, failing, 1.0),
    "map": lambda: lax.map(failing, jnp.ones(2)),
    "associative_scan": lambda: lax.associative_scan(failing, jnp.ones(4)),
    "checkify": lambda: checkify(failing)(1.0),
}

# Calls that spmd refuses itself.
REFUSED: dict[str, Callable[[], Any]] = {
    "ufunc": lambda: jnp.add(jnp.ones(2), jnp.ones(3)),
    "operator": lambda: jnp.ones(2) + jnp.ones(3),
    "reduction": lambda: jnp.sum(jnp.ones(2), axis=3),
    "jit": lambda: spmd.jit(lambda x: x)("text"),
    "grad": lambda: spmd.grad(lambda x: x)(jnp.ones(2)),
    "compiled": lambda: spmd.jit(lambda x: x).lower(1.0).compile()(1.0, 2.0),
}


def caught(call: Callable[[], Any], mode: str) -> Exception:
    with spmd.config.override("traceback_filtering", mode):
        try:
            call()
        except Exception as error:
            return error
    raise AssertionError("nothing was raised")


def files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def functions(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("name", CALLS)
def test_the_frames_left_are_the_users(name: str) -> None:
    error = caught(CALLS[name], "auto")
    assert isinstance(error, LookupError)
    assert set(files(error)) == {__file__}
    assert functions(error)[-1] == "failing"
    assert error.__notes__ == [NOTE]
    assert error.__cause__ is None


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_end_at_the_users_line(name: str) -> None:
    error = caught(REFUSED[name], "quiet_remove_frames")
    assert set(files(error)) == {__file__}
    assert error.__notes__ == [NOTE]


@pytest.mark.parametrize("name", CALLS)
def test_off_keeps_all_frames(name: str) -> None:
    error = caught(CALLS[name], "off")
    assert any(map(is_ours, files(error)))
    assert functions(error)[-1] == "failing"
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("name", CALLS)
def test_remove_frames_has_all_frames_in_the_cause(name: str) -> None:
    error = caught(CALLS[name], "remove_frames")
    assert set(files(error)) == {__file__}
    cause = error.__cause__
    assert isinstance(cause, UnfilteredStackTrace)
    assert str(cause).startswith("LookupError: a fault of the user's\n\n")
    assert any(map(is_ours, files(cause)))
    assert functions(cause)[-1] == "failing"
    # It begins at the program, above the handler.
    assert len(functions(cause)) > functions(cause).index("caught") >= 1


@pytest.mark.parametrize("name", ["jit", "grad", "scan", "vmap"])
def test_tracebackhide_marks_ours(name: str) -> None:
    error = caught(CALLS[name], "tracebackhide")
    marks = {
        bool(frame.f_locals.get("__tracebackhide__")) == is_ours(frame.f_code.co_filename)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    }
    assert marks == {True}
    assert any(map(is_ours, files(error)))


def test_a_cause_is_kept() -> None:
    def chained(x: Any) -> Any:
        try:
            failing()
        except LookupError as error:
            raise KeyError("second") from error

    quiet = caught(lambda: spmd.jit(chained)(1.0), "quiet_remove_frames")
    assert isinstance(quiet.__cause__, LookupError)
    whole = caught(lambda: spmd.jit(chained)(1.0), "remove_frames")
    assert isinstance(whole.__cause__, UnfilteredStackTrace)
    assert isinstance(whole.__cause__.__cause__, LookupError)


def test_the_outermost_boundary_cuts_once() -> None:
    inside: list[Exception] = []

    def looking(x: Any) -> Any:
        try:
            return spmd.grad(failing)(x)
        except LookupError as error:
            inside.append(error)
            assert any(map(is_ours, files(error)))
            raise

    error = caught(lambda: spmd.jit(looking)(1.0), "auto")
    assert inside == [error]
    assert functions(error)[-2:] == ["looking", "failing"]
    assert set(files(error)) == {__file__}
    assert error.__notes__ == [NOTE]


def test_wrapped_functions_keep_their_names() -> None:
    @functools.lru_cache
    def square(x: float) -> float:
        """The square."""
        return x * x

    assert spmd.grad(square).__name__ == "square"
    assert lax.scan.__name__ == "scan"
    assert lax.scan.__module__.startswith("spmd.lax")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of auto, off"):
        spmd.config.update("jax_traceback_filtering", "some")


def test_what_a_program_prints() -> None:
    text = "import spmd\ndef f(x):\n    return 1 // 0\nspmd.jit(f)(1.)\n"
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", text], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    lines = [x.strip() for x in done.stderr.splitlines() if x.strip()]
    # From Python 3.13 on, code given by -c is shown too.
    shown = [x for x in lines if x.startswith("File")]
    assert shown == ['File "<string>", line 4, in <module>', 'File "<string>", line 3, in f']
    assert lines[-3:] == [
        "ZeroDivisionError: integer division or modulo by zero",
        *NOTE.splitlines(),
    ]


# ---- exceptions that end the program -----------------------------------------------------------


def _ended_by(tmp_path: Path, line: str, **env: str) -> str:
    """The stderr of a program whose last line fails."""
    program = tmp_path / "train.py"
    program.write_text(f"import spmd, spmd.numpy as jnp\n{line}\n")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=os.environ | env
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize("line", ["spmd.device_put(object())", "jnp.ones((2, 3)) @ jnp.ones(2)"])
def test_the_end_of_a_program_is_shown_without_frames_of_spmd(tmp_path: Path, line: str):
    """These functions are no boundaries: the program might catch what they raise."""
    shown = _ended_by(tmp_path, line, SPMD_TRACEBACK_FILTERING="auto")
    assert shown.count("  File ") == 1 and "train.py" in shown and line in shown
    assert shown.rstrip().endswith(NOTE)
    whole = _ended_by(tmp_path, line, SPMD_TRACEBACK_FILTERING="off")
    assert whole.count("  File ") > 1 and NOTE not in whole


def test_an_exception_that_spmd_has_no_part_in_is_shown_as_it_is(tmp_path: Path):
    shown = _ended_by(tmp_path, "1 / 0", SPMD_TRACEBACK_FILTERING="auto")
    assert shown.count("  File ") == 1 and NOTE not in shown
