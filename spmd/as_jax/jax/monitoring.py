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


def register_event_listener(callback: Callable[..., Any]) -> None:
    """Call `callback` for events from now on."""
    _event.append(callback)


def register_event_duration_secs_listener(callback: Callable[..., Any]) -> None:
    """Call `callback` for durations from now on."""
    _duration.append(callback)


def register_event_time_span_listener(callback: Callable[..., Any]) -> None:
    """Call `callback` for spans of time from now on."""
    _span.append(callback)


def register_scalar_listener(callback: Callable[..., Any]) -> None:
    """Call `callback` for numbers from now on."""
    _scalar.append(callback)


def unregister_event_listener(callback: Callable[..., Any]) -> None:
    """Call `callback` for events no longer; raises a ValueError if it was not."""
    _event.remove(callback)


def unregister_event_duration_listener(callback: Callable[..., Any]) -> None:
    """Call `callback` for durations no longer; raises a ValueError if it was not."""
    _duration.remove(callback)


def unregister_event_time_span_listener(callback: Callable[..., Any]) -> None:
    """Call `callback` for spans of time no longer; raises a ValueError if it was not."""
    _span.remove(callback)


def unregister_scalar_listener(callback: Callable[..., Any]) -> None:
    """Call `callback` for numbers no longer; raises a ValueError if it was not."""
    _scalar.remove(callback)


def clear_event_listeners() -> None:
    """Forget all listeners."""
    for listeners in (_event, _duration, _span, _scalar):
        listeners.clear()
