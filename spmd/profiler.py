"""Timelines of a job, with the names of `jax.profiler`.

`SPMD_TRACE=dir` keeps the timeline of a whole run; `with profiler.trace(dir)` of a part. The folder
gets one file a rank, and at the end `trace.json` for Perfetto (https://ui.perfetto.dev);
`spmd stats dir` names late ranks and their cost, `spmd stats dir --html file` shows them.
"""

from __future__ import annotations

import typing as _typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from spmd.base.config import config
from spmd.base.errors import RefusedError, TimelineError
from spmd.base.lazy_import import Deferred
from spmd.base.lazy_import import without as _without
from spmd.base.record import field, record
from spmd.base.source import current_source
from spmd.base.util import wraps
from spmd.transport import trace_export
from spmd.transport import world as bootstrap
from spmd.transport.flight_recorder import FLIGHT, source_text

# Of a higher floor than the timelines, and rarely asked for.
_memory_profile = Deferred("spmd.debug.memory_profile")

__all__ = [
    "ProfileOptions",
    "StepTraceAnnotation",
    "TraceAnnotation",
    "annotate_function",
    "device_memory_profile",
    "save_device_memory_profile",
    "start_trace",
    "stop_trace",
    "trace",
]

F = TypeVar("F", bound=Callable[..., Any])


def start_trace(
    log_dir: str | Path,
    create_perfetto_link: bool = False,
    create_perfetto_trace: bool = False,
    profiler_options: Any = None,
) -> None:
    """Begin a timeline of this rank in the folder `log_dir`, until `stop_trace`.

    **Every rank must make the call**: a timeline without one shows no waits for it. The file is
    one for Perfetto in any case, with or without `create_perfetto_trace`, and `profiler_options`
    are those of XLA's profiler, without effect. Raises `TimelineError` while another timeline is
    under way, and `RefusedError` for `create_perfetto_link`, which would serve the file.
    """
    if create_perfetto_link:
        raise RefusedError(
            "start_trace: create_perfetto_link=True serves no file here; open trace.json of "
            f"{log_dir} at https://ui.perfetto.dev"
        )
    if config.trace and FLIGHT.keeps_programs:
        raise TimelineError(
            f"start_trace: a timeline is under way in {config.trace}; stop it first"
        )
    world = bootstrap.world()
    bootstrap.record_rank(world)
    trace_export.start(log_dir)
    bootstrap.set_clocks(world)


def stop_trace() -> None:
    """End the timeline that `start_trace` began; rank 0 merges the files of all ranks.

    Raises `TimelineError` if there is none.
    """
    tracer = trace_export.stop()
    if tracer is None:
        raise TimelineError("stop_trace: no timeline is under way; call start_trace(log_dir) first")
    tracer.merge()


@contextmanager
def trace(
    log_dir: str | Path,
    create_perfetto_link: bool = False,
    create_perfetto_trace: bool = False,
    profiler_options: Any = None,
) -> Iterator[None]:
    """Keep a timeline of a `with` block in the folder `log_dir`.

    The parameters are those of `start_trace`.

    >>> import tempfile, os, spmd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with spmd.profiler.trace(folder):
    ...         y = spmd.jit(lambda x: x + 1)(1.0)
    ...     sorted(os.listdir(folder))
    ['rank-0.trace', 'trace.json']
    """
    start_trace(log_dir, create_perfetto_link, create_perfetto_trace, profiler_options)
    try:
        yield
    finally:
        stop_trace()


class TraceAnnotation:
    """Names the work in a `with` block, or in a function, in the timeline.

    Without a timeline it costs nothing that matters. Keyword arguments become part of the name.

    >>> import spmd
    >>> with spmd.profiler.TraceAnnotation("augment", images=32):
    ...     total = sum(range(32))
    """

    _kind = "annotation"

    def __init__(self, name: str, **kwargs: Any):
        said = ", ".join(f"{key}={value}" for key, value in kwargs.items())
        self._name = f"{name} ({said})" if said else name
        self._places: list[int] = []

    @staticmethod
    def is_enabled() -> bool:
        """Whether there is a timeline that names of work would go to."""
        return FLIGHT.keeps_programs

    def __enter__(self) -> TraceAnnotation:
        place = 0
        if FLIGHT.keeps_programs:
            source = source_text(current_source())
            place = FLIGHT.begin(FLIGHT.label(self._kind, program=self._name, source=source), 0)
        self._places.append(place)
        return self

    def __exit__(self, *_: object) -> None:
        place = self._places.pop()
        if place:
            FLIGHT.completed(place)

    def __call__(self, fun: F) -> F:
        @wraps(fun)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            with self:
                return fun(*args, **kwargs)

        return annotated  # type: ignore[return-value]


class StepTraceAnnotation(TraceAnnotation):
    """Names a step of a loop in the timeline, and in the reports of failures and stalls.

    >>> import spmd
    >>> for k in range(3):
    ...     with spmd.profiler.StepTraceAnnotation("train", step_num=k):
    ...         pass
    """

    _kind = "step"

    def __init__(self, name: str, step_num: int | None = None, **kwargs: Any):
        super().__init__(name if step_num is None else f"{name} {step_num}", **kwargs)
        self._step = step_num

    def __enter__(self) -> StepTraceAnnotation:
        if self._step is not None:
            FLIGHT.set_step(self._step)
        super().__enter__()
        return self


def annotate_function(func: F, name: str | None = None, **kwargs: Any) -> F:
    """A function whose calls have a name in the timeline, by default the function's own.

    >>> import spmd
    >>> spmd.profiler.annotate_function(abs)(-3)
    3
    """
    return TraceAnnotation(name or getattr(func, "__name__", repr(func)), **kwargs)(func)


@record(frozen=False)
class ProfileOptions:
    """Options of XLA's profiler, which a timeline here does not depend on; `trace` takes them.

    >>> options = spmd.profiler.ProfileOptions()
    >>> options.python_tracer_level = 0
    """

    host_tracer_level: int = 2
    python_tracer_level: int = 1
    device_tracer_level: int = 1
    enable_hlo_proto: bool = True
    include_dataset_ops: bool = True
    repository_path: str = ""
    session_id: str = ""
    duration_ms: int = 0
    start_timestamp_ns: int = 0
    raise_error_on_start_failure: bool = False
    advanced_configuration: dict[str, Any] = field(default_factory=dict)


def device_memory_profile(backend: str | None = None) -> bytes:
    """Return a profile of the arrays that are alive, for the tool `pprof`.

    It counts them and their bytes by device, dtype and shape. `backend` is accepted as JAX's; all
    arrays of a process are on one.

    >>> device_memory_profile()[:2]  # it is compressed with gzip
    b'\\x1f\\x8b'
    """
    return _memory_profile.profile()


def save_device_memory_profile(filename: str | Path, backend: str | None = None) -> None:
    """Write `device_memory_profile()` to the file `filename`.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     save_device_memory_profile(file.name)
    ...     len(file.read()) > 50
    True
    """
    Path(filename).write_bytes(device_memory_profile(backend))


if not _typing.TYPE_CHECKING:  # which knows what is missing by itself
    __getattr__ = _without(__name__)
