"""The text of the native runtime: its parts as one module."""

from __future__ import annotations

from spmd.compile.cpu.runtime_ir_control import control_texts
from spmd.compile.cpu.runtime_ir_exchange import exchange_texts
from spmd.compile.cpu.runtime_ir_execute import execute_texts
from spmd.compile.cpu.runtime_ir_parallel import parallel_texts
from spmd.compile.cpu.runtime_ir_place import place_texts
from spmd.compile.cpu.runtime_ir_pool import pool_texts
from spmd.compile.cpu.runtime_ir_queue import queue_texts
from spmd.compile.cpu.runtime_ir_ranks import rank_texts
from spmd.compile.cpu.runtime_ir_wait import wait_texts


def runtime_text() -> str:
    """The module of the runtime."""
    parts = (
        wait_texts(),
        place_texts(),
        pool_texts(),
        execute_texts(),
        control_texts(),
        parallel_texts(),
        exchange_texts(),
        rank_texts(),
        queue_texts(),
    )
    return "\n".join(text for part in parts for text in part)
