"""Runs ONNX models in the tests: by onnxruntime, or where it has no kernel for a dtype by ONNX's
own reference evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="ONNX models are written with the onnx package")
onnxruntime = pytest.importorskip("onnxruntime", reason="runs the ONNX models")
from onnx.reference import ReferenceEvaluator  # noqa: E402

# What says that a runtime has no kernel: an error of its own of this name.
_NO_KERNEL = ("NotImplemented", "InvalidGraph", "Fail")


def session(model: bytes) -> Any:
    """A session of onnxruntime on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(model: bytes, args: Sequence[np.ndarray], only_runtime: bool = True) -> list[np.ndarray]:
    """The results of a model, whose inputs are given in order."""
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    names = [value.name for value in onnx.load_from_string(model).graph.input]
    feeds = dict(zip(names, map(np.asarray, args), strict=True))
    try:
        return session(model).run(None, feeds)
    except Exception as error:
        if only_runtime or type(error).__name__ not in _NO_KERNEL:
            raise
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(model).run(None, feeds)
