"""Jitted functions as ONNX models, which other runtimes load: `to_onnx(jit(f))(*args)`.

The only file that imports the optional `onnx` package. The function is traced as `export` traces
it, at several sizes where shapes are symbolic; each trace is written as a graph of plain data
(`onnx_graph.py`), and the graphs are joined to one whose sizes are computed from the inputs'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError
from spmd.base.tree import TreeDef, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from spmd.base.util import function_name
from spmd.compile.dispatch.jit import JitFunction
from spmd.core.aval import ShapeDtypeStruct
from spmd.export import onnx_control, onnx_index, onnx_rules, onnx_windows, unify  # noqa: F401
from spmd.export.encode import decode_number, dtype_named
from spmd.export.exported import constraints_of, info_at, info_of, symbols_of
from spmd.export.onnx_graph import Graph, code, write_program
from spmd.export.symbolic import DimExpr, parse

# The versions of ONNX 1.15; runtimes of the last years read them.
_OPSET, _IR = 20, 9


def to_onnx(fun_jit: Any) -> Callable[..., bytes]:
    """A function that writes a jitted function as an ONNX model for given arguments.

    The arguments may be `ShapeDtypeStruct`s with symbolic sizes (`symbolic_shape("b, 4")`), which
    become dynamic dims of the model; every symbol must be the size of a dim of some argument. The
    model's inputs have the arguments' names, its outputs are `out`, or `out[0]`, `out['loss']`.
    Arrays that the function closes over, such as trained parameters, are stored in the model.

    For inference: elementwise functions, products, convolutions, pooling, attention, reductions,
    indexing, sorting, `cond`, `while_loop` and `scan`. A `RefusedError` names a primitive that has
    no form in ONNX and the line that uses it. **NaNs in `argmax`, `sort` and `top_k` go where the
    runtime puts them.** Needs the `onnx` package: `pip install 'spmd[onnx]'`.

        model = to_onnx(jit(predict))(ShapeDtypeStruct(symbolic_shape("b, 784"), "float32"))
        open("digits.onnx", "wb").write(model)
        onnxruntime.InferenceSession(model).run(None, {"images": images})
    """
    if not isinstance(fun_jit, JitFunction):
        raise ArgumentError(f"to_onnx: the function must be jitted, got {fun_jit!r}; use jit(f)")

    def do_export(*args: Any, **kwargs: Any) -> bytes:
        leaves, tree = tree_flatten((args, kwargs))
        return _to_onnx(fun_jit, [info_of(x) for x in leaves], tree)

    return do_export


def _to_onnx(fun_jit: JitFunction, infos: list[ShapeDtypeStruct], tree: TreeDef) -> bytes:
    """Write a graph at several sizes of the symbols, and unify them to one model."""
    onnx = _package()
    symbols, constraints = symbols_of(infos), constraints_of(infos)
    fixed = frozenset(s for info in infos for s in info.shape if not isinstance(s, DimExpr))
    samples = unify.choose_samples(symbols, constraints, fixed)
    documents, arrays, traced = [], {}, None
    for sizes in samples:
        args, kwargs = tree_unflatten(tree, [info_at(info, sizes) for info in infos])
        traced = fun_jit.trace(*args, **kwargs)
        g = Graph()
        inputs = [g.name() for _ in infos]
        outputs = [g.op("Identity", x) for x in write_program(g, traced.program, inputs)]
        shapes = [list(aval.shape) for aval in traced.jaxpr.out_avals]
        documents.append({"nodes": g.nodes, "in": inputs, "out": outputs, "shapes": shapes})
        arrays = g.arrays
    assert traced is not None
    document = unify.Unifier(symbols, samples, function_name(fun_jit))(documents)
    results = tree_unflatten(traced.out_tree, range(len(document["out"])))
    out_names = [f"out{keystr(path)}" for path, _ in tree_flatten_with_path(results)[0]]
    in_names = _input_names(traced.jaxpr.jaxpr.arg_names, len(infos))
    model = _Model(onnx, arrays, infos, dict(zip(document["in"], in_names, strict=True)))
    model.names.update(zip(document["out"], out_names, strict=True))
    nodes = model.nodes(document["nodes"])
    described = [
        model.described(
            name, aval.dtype, [parse(s["size"]) if type(s) is dict else s for s in shape]
        )
        for name, aval, shape in zip(
            out_names, traced.jaxpr.out_avals, document["shapes"], strict=True
        )
    ]
    return model.write(function_name(fun_jit), nodes, in_names, described)


def _input_names(names: Sequence[str], count: int) -> list[str]:
    found = list(names[-count:]) if count else []
    unique = len(set(found)) == len(found) == count
    return found if unique else [f"in[{k}]" for k in range(count)]


def _package() -> Any:
    try:
        import onnx
    except ImportError:
        raise ArgumentError(
            "to_onnx: the package onnx is not installed: pip install 'spmd[onnx]'"
        ) from None
    return onnx


class _Model:
    """Writes the document of a graph with the `onnx` package."""

    def __init__(
        self,
        onnx: Any,
        arrays: Mapping[str, np.ndarray],
        infos: Sequence[ShapeDtypeStruct],
        inputs: Mapping[str, str],
    ):
        self.onnx, self.arrays, self.infos = onnx, arrays, infos
        # Names of the document that the model replaces: those of inputs, outputs and constants.
        self.names: dict[str, str] = dict(inputs)
        self.initializers: dict[str, Any] = {}
        self.sizes: dict[str, str] = {}
        self.before: list[Any] = []  # nodes that compute sizes; every other node comes after
        self.symbols: dict[str, tuple[str, int]] = {}
        for name, info in zip(inputs.values(), infos, strict=True):
            for d, size in enumerate(info.shape):
                if isinstance(size, DimExpr) and str(size) in size.symbols():
                    self.symbols.setdefault(str(size), (name, d))

    # ---- constants and sizes ----

    def _initializer(self, key: str, dtype: np.dtype, shape: Sequence[int], data: bytes) -> str:
        name = f"c{len(self.initializers)}"
        if key not in self.initializers:
            self.initializers[key] = self.onnx.helper.make_tensor(
                name, code(dtype), list(shape), data, raw=True
            )
        return self.initializers[key].name

    def _numbers(self, values: Any, dtype: Any, shape: Sequence[int]) -> str:
        array = np.array(values, dtype).reshape(shape)
        key = f"{dtypes.long_name(array.dtype)}{list(shape)} {array.tobytes().hex()}"
        return self._initializer(key, array.dtype, shape, array.tobytes())

    def _before(self, op: str, *inputs: str, **attributes: Any) -> str:
        out = f"size{len(self.before)}"
        self.before.append(self.onnx.helper.make_node(op, list(inputs), [out], **attributes))
        return out

    def _size(self, text: str) -> str:
        """A size as a vector of one element, computed from the shapes of the inputs."""
        if text not in self.sizes:
            expr = parse(text)
            assert isinstance(expr, DimExpr)
            total = ""
            for monomial, factor in expr.terms.items():
                term = self._numbers([factor], np.int64, (1,))
                for symbol in monomial:
                    assert isinstance(symbol, str), "programs have polynomials of symbols"
                    term = self._before("Mul", term, self._symbol(symbol))
                total = self._before("Add", total, term) if total else term
            self.sizes[text] = total
        return self.sizes[text]

    def _symbol(self, symbol: str) -> str:
        if symbol not in self.symbols:
            raise ArgumentError(
                f"to_onnx: the size {symbol} is not the size of a dim of any argument, so a model "
                "cannot read it; give an argument a dim of just that size"
            )
        if symbol not in self.sizes:
            name, d = self.symbols[symbol]
            self.sizes[symbol] = self._before("Shape", name, start=d, end=d + 1)
        return self.sizes[symbol]

    def _constant(self, node: Mapping[str, Any]) -> str:
        if "array" in node:
            x = self.arrays[node["array"]]
            return self._initializer(node["array"], x.dtype, x.shape, x.tobytes())
        if "ints" in node:
            ints = node["ints"]
            if all(type(n) is int for n in ints):
                return self._numbers(ints, np.int64, (len(ints),))
            parts = [
                self._size(n["size"]) if type(n) is dict else self._numbers([n], np.int64, (1,))
                for n in ints
            ]
            return parts[0] if len(parts) == 1 else self._before("Concat", *parts, axis=0)
        value, dtype = node["value"], dtype_named(node["dtype"])
        if not isinstance(value, dict):
            return self._numbers(decode_number(value), dtype, ())
        ((kind, text),) = value.items()
        size = self._before("Reshape", self._size(text), self._numbers([], np.int64, (0,)))
        if kind == "one over":
            wide = self._before("Cast", size, to=code(np.float64))
            size = self._before("Reciprocal", wide)
        return self._before("Cast", size, to=code(dtype))

    # ---- nodes ----

    def nodes(self, nodes: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The nodes of a graph. Constants become initializers of the whole model."""
        out = []
        for node in nodes:
            if "constant" in node:
                self.names[node["constant"]] = self._constant(node)
                continue
            attributes = {k: self._attribute(v, node) for k, v in node["with"].items()}
            inputs, outputs = ([self.names.get(n, n) for n in node[k]] for k in ("in", "out"))
            out.append(self.onnx.helper.make_node(node["op"], inputs, outputs, **attributes))
        return out

    def _attribute(self, value: Any, node: Mapping[str, Any]) -> Any:
        if isinstance(value, dict) and "graph" in value:
            return self._inner(value["graph"])
        if any(isinstance(x, dict) for x in (value if isinstance(value, list) else [value])):
            raise ArgumentError(
                f"{node['at']}: to_onnx: ONNX's {node['op']} takes {value} as fixed numbers, but "
                "they depend on symbolic sizes here; give the dims they come from fixed sizes"
            )
        return value

    def _inner(self, graph: Mapping[str, Any]) -> Any:
        helper = self.onnx.helper
        nodes = self.nodes(graph["nodes"])
        types = graph["types"]
        # The first two of a loop body, the step's number and whether to go on, are scalars.
        shapes = [[], [], *[None] * len(types)]
        inputs = [
            helper.make_tensor_value_info(name, code(dtype_named(dtype)), shape)
            for name, dtype, shape in zip(graph["inputs"], types, shapes, strict=False)
        ]
        outputs = [
            helper.make_tensor_value_info(self.names.get(name, name), code(dtype_named(d)), None)
            for name, d in zip(graph["outputs"], graph["results"], strict=True)
        ]
        return helper.make_graph(nodes, "body", inputs, outputs)

    # ---- the model ----

    def described(self, name: str, dtype: Any, shape: Sequence[Any]) -> Any:
        """The type of an input or output; a symbolic size is its text."""
        sizes = [str(s) if isinstance(s, DimExpr) else int(s) for s in shape]
        return self.onnx.helper.make_tensor_value_info(name, code(dtype), sizes)

    def write(self, name: str, nodes: list[Any], in_names: Sequence[str], outputs: Any) -> bytes:
        """The whole model's bytes."""
        helper = self.onnx.helper
        inputs = [
            self.described(n, info.dtype, info.shape)
            for n, info in zip(in_names, self.infos, strict=True)
        ]
        tensors = list(self.initializers.values())
        graph = helper.make_graph([*self.before, *nodes], name, inputs, outputs, tensors)
        opset = helper.make_opsetid("", _OPSET)
        model = helper.make_model(
            graph, opset_imports=[opset], ir_version=_IR, producer_name="spmd"
        )
        return model.SerializeToString(deterministic=True)
