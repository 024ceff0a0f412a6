"""`jax.monitoring`: events that programs record, and listeners that hear of them.

spmd records no events of its own here; `spmd.profiler` and `SPMD_DEBUG` say what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_event: list[Callable[..., Any]] = []
_duration: list[Callable[..., Any]] = []
_span: list[Callable[..., Any]] = []
_scalar: list[Callable[..., Any]] = []


def record_event(event: str, **kwargs: Any) -> None:
    """Tell the listeners that something happened."""
    for listener in _event:
        listener(event, **kwargs)


def record_event_duration_secs(event: str, duration: float, **kwargs: Any) -> None:
    """Tell the listeners how long something took, in seconds."""
    for listener in _duration:
        listener(event, duration, **kwargs)


def record_event_time_span(event: str, start_time: float, end_time: float, **kwargs: Any) -> None:
    """Tell the listeners when something began and ended."""
    for listener in _span:
        listener(event, start_time, end_time, **kwargs)


def record_scalar(event: str, value: float, **kwargs: Any) -> None:
    """Tell the listeners a number."""
    for listener in _scalar:
        listener(event, value, **kwargs)


register_event_listener = _event.append
register_event_duration_secs_listener = _duration.append
register_event_time_span_listener = _span.append
register_scalar_listener = _scalar.append
unregister_event_listener = _event.remove
unregister_event_duration_listener = _duration.remove
unregister_event_time_span_listener = _span.remove
unregister_scalar_listener = _scalar.remove


def clear_event_listeners() -> None:
    """Forget all listeners."""
    for listeners in (_event, _duration, _span, _scalar):
        listeners.clear()
