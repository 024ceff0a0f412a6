"""Pytrees: nested containers seen as a list of leaves and a structure.

Tuples, lists, dicts, named tuples, `None`, `OrderedDict`, `defaultdict` and registered classes are
containers; everything else is a leaf. Dict children are in sorted key order, so that every process
walks the same tree in the same order.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from spmd.base.errors import ArgumentError, PytreeError
from spmd.base.record import record

# ---- key paths ---------------------------------------------------------------------------------


@record
class SequenceKey:
    """The path step into a list or tuple."""

    idx: int

    def __str__(self) -> str:
        return f"[{self.idx}]"


@record
class DictKey:
    """The path step into a dict."""

    key: Any

    def __str__(self) -> str:
        return f"[{self.key!r}]"


@record
class GetAttrKey:
    """The path step into a named tuple, dataclass or registered class."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"


@record
class FlattenedIndexKey:
    """The path step into a registered class that names no keys."""

    key: int

    def __str__(self) -> str:
        return f"[<flat index {self.key}>]"


def keystr(keys: Iterable[Any], *, simple: bool = False, separator: str = "") -> str:
    """A path as text: `['w'][0].bias`."""
    if not simple:
        return separator.join(str(k) for k in keys)
    names = ("idx", "key", "name")
    values = (next(getattr(k, n) for n in names if hasattr(k, n)) for k in keys)
    return separator.join(str(v) for v in values)


# ---- the registry of containers ----------------------------------------------------------------


@record
class Container:
    """How one class of container is taken apart and put together."""

    flatten: Callable[[Any], tuple[Sequence[Any], Any]]
    unflatten: Callable[[Any, Sequence[Any]], Any]
    keys: Callable[[Any, int], Sequence[Any]]


def _index_keys(_: Any, n: int) -> list[SequenceKey]:
    return [SequenceKey(k) for k in range(n)]


def _dict_keys(aux: Any, _: int) -> list[DictKey]:
    return [DictKey(k) for k in aux]


def _sorted_keys(d: dict[Any, Any]) -> tuple[Any, ...]:
    try:
        return tuple(sorted(d))
    except TypeError:
        names = ", ".join(f"{k!r} ({type(k).__name__})" for k in d)
        raise PytreeError(
            f"a dict in a pytree needs keys that can be sorted with each other; got {names}"
        ) from None


def _flatten_dict(d: dict[Any, Any]) -> tuple[Sequence[Any], Any]:
    keys = _sorted_keys(d)
    return [d[k] for k in keys], keys


def _flatten_defaultdict(d: defaultdict[Any, Any]) -> tuple[Sequence[Any], Any]:
    keys = _sorted_keys(d)
    return [d[k] for k in keys], (d.default_factory, keys)


def _unflatten_defaultdict(aux: Any, children: Sequence[Any]) -> Any:
    return defaultdict(aux[0], zip(aux[1], children, strict=True))


_containers: dict[type, Container] = {
    tuple: Container(lambda t: (t, None), lambda _, c: tuple(c), _index_keys),
    list: Container(lambda t: (t, None), lambda _, c: list(c), _index_keys),
    dict: Container(_flatten_dict, lambda keys, c: dict(zip(keys, c, strict=True)), _dict_keys),
    type(None): Container(lambda _: ((), None), lambda _, c: None, lambda _, n: ()),
    OrderedDict: Container(
        lambda d: (list(d.values()), tuple(d)),
        lambda keys, c: OrderedDict(zip(keys, c, strict=True)),
        _dict_keys,
    ),
    defaultdict: Container(
        _flatten_defaultdict, _unflatten_defaultdict, lambda aux, n: _dict_keys(aux[1], n)
    ),
}


def _named_tuple_container(kind: type) -> Container:
    fields = kind._fields  # type: ignore[attr-defined]
    return Container(
        # Its fields, whatever `len`, `x[i]` and iteration are in the class.
        lambda t: (tuple.__getitem__(t, slice(None)), None),
        lambda _, c: kind(*c),
        lambda _, n: [GetAttrKey(f) for f in fields],
    )


# The named tuples among the containers, which are made like any class: `kind(*children)`.
_named_tuples: dict[type, bool] = {}


def container_of(kind: type) -> Container | None:
    """How a class is taken apart; None if its objects are leaves."""
    found = _containers.get(kind)
    if found is None and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        found = _containers[kind] = _named_tuple_container(kind)
        _named_tuples[kind] = True
    return found


def is_named_tuple(kind: type) -> bool:
    """Whether a class is a named tuple that is not registered as something else."""
    return container_of(kind) is not None and kind in _named_tuples


def register_pytree_node(
    nodetype: type,
    flatten_func: Callable[[Any], tuple[Iterable[Any], Any]],
    unflatten_func: Callable[[Any, Any], Any],
    flatten_with_keys_func: Callable[[Any], tuple[Iterable[tuple[Any, Any]], Any]] | None = None,
) -> None:
    """Make `nodetype` a container: `flatten(x) -> (children, aux)`, `unflatten(aux, children)`."""
    if nodetype in _containers:
        raise PytreeError(f"{nodetype.__name__} is already registered as a pytree node")

    def keys(_: Any, n: int) -> Sequence[Any]:
        return [FlattenedIndexKey(k) for k in range(n)]

    def flatten(x: Any) -> tuple[Sequence[Any], Any]:
        pair = flatten_func(x)
        try:
            children, aux = pair
            return tuple(children), aux
        except (TypeError, ValueError) as error:
            raise PytreeError(
                f"the flatten function of {nodetype.__name__} must return a pair of an iterable of "
                f"children and hashable data: {error}"
            ) from error

    container = Container(flatten, unflatten_func, keys)
    if flatten_with_keys_func is not None:
        _paths_of[nodetype] = lambda x: [k for k, _ in flatten_with_keys_func(x)[0]]
    _containers[nodetype] = container


# Registered classes whose keys depend on the object itself rather than on its structure.
_paths_of: dict[type, Callable[[Any], list[Any]]] = {}


def keys_of(x: Any, container: Container, aux: Any, count: int) -> Sequence[Any]:
    """The path steps to the children of a container."""
    own = _paths_of.get(type(x))
    return own(x) if own else container.keys(aux, count)


def register_pytree_with_keys(
    nodetype: type,
    flatten_with_keys: Callable[[Any], tuple[Iterable[tuple[Any, Any]], Any]],
    unflatten_func: Callable[[Any, Any], Any],
    flatten_func: Callable[[Any], tuple[Iterable[Any], Any]] | None = None,
) -> None:
    """Like `register_pytree_node`, with the children's path keys given too."""

    def flatten(x: Any) -> tuple[Iterable[Any], Any]:
        pairs, aux = flatten_with_keys(x)
        return [c for _, c in pairs], aux

    register_pytree_node(nodetype, flatten_func or flatten, unflatten_func, flatten_with_keys)


def register_pytree_node_class(cls: type) -> type:
    """Class decorator: the class has methods `tree_flatten` and `tree_unflatten`."""
    register_pytree_node(cls, lambda x: x.tree_flatten(), cls.tree_unflatten)  # type: ignore
    return cls


def register_pytree_with_keys_class(cls: type) -> type:
    """Class decorator: the class has `tree_flatten_with_keys` and `tree_unflatten`."""
    flatten = getattr(cls, "tree_flatten", None)
    register_pytree_with_keys(
        cls,
        lambda x: x.tree_flatten_with_keys(),
        cls.tree_unflatten,  # type: ignore[attr-defined]
        None if flatten is None else lambda x: x.tree_flatten(),
    )
    return cls


def register_dataclass(
    nodetype: type,
    data_fields: Sequence[str] | None = None,
    meta_fields: Sequence[str] | None = None,
    drop_fields: Sequence[str] = (),
) -> type:
    """Make a dataclass a container: `data_fields` are children, `meta_fields` its structure."""
    import dataclasses  # takes long, and spmd itself can start without it

    if data_fields is None or meta_fields is None:
        if not dataclasses.is_dataclass(nodetype):
            raise PytreeError(
                f"register_dataclass: {nodetype.__name__} is no dataclass; "
                "give data_fields and meta_fields"
            )
        fields = [f for f in dataclasses.fields(nodetype) if f.init and f.name not in drop_fields]
        meta_fields = [f.name for f in fields if f.metadata.get("static", False)]
        data_fields = [f.name for f in fields if f.name not in meta_fields]
    data, meta = tuple(data_fields), tuple(meta_fields)
    if dataclasses.is_dataclass(nodetype):
        wanted = {f.name for f in dataclasses.fields(nodetype) if f.init} - set(drop_fields)
        if missing := wanted - {*data, *meta}:
            raise PytreeError(
                f"register_dataclass: {nodetype.__name__} has the fields {sorted(missing)} too; "
                "give each field with init=True in data_fields, meta_fields or drop_fields"
            )
        if unknown := {*data, *meta} - wanted:
            raise PytreeError(
                f"register_dataclass: {nodetype.__name__} has no fields {sorted(unknown)} that "
                "its __init__ takes"
            )

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children = [(GetAttrKey(n), getattr(x, n)) for n in data]
        return children, tuple(getattr(x, n) for n in meta)

    def unflatten(aux: Any, children: Sequence[Any]) -> Any:
        values = dict(zip(data, children, strict=True)) | dict(zip(meta, aux, strict=True))
        return nodetype(**values)

    register_pytree_with_keys(nodetype, flatten_with_keys, unflatten)
    return nodetype


# ---- structures --------------------------------------------------------------------------------


class TreeDef:
    """The structure of a pytree: hashable, comparable, and able to rebuild the tree."""

    __slots__ = ("_hash", "aux", "kind", "num_leaves", "parts")

    if TYPE_CHECKING:  # methods that `tree_structures.py` adds
        num_nodes: int
        children: Callable[[], list[TreeDef]]
        compose: Callable[[TreeDef], TreeDef]
        deserialize_using_proto: ClassVar[Callable[[Any, bytes], TreeDef]]
        from_iterable_tree: Callable[[Any], Any]
        from_node_data_and_children: ClassVar[Callable[..., TreeDef]]
        node_data: Callable[[], tuple[type, Any] | None]
        serialize_using_proto: Callable[[], bytes]
        walk: Callable[..., Any]

    def __init__(self, kind: type | None, aux: Any, children: tuple[TreeDef, ...]):
        self.kind = kind
        self.aux = aux
        self.parts = children
        self.num_leaves = 1 if kind is None else sum(c.num_leaves for c in children)
        self._hash: int | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TreeDef):
            return False
        pairs: list[tuple[TreeDef, TreeDef]] = [(self, other)]
        for a, b in pairs:
            if a is b:
                continue
            same = a.kind is b.kind and a.num_leaves == b.num_leaves and a.aux == b.aux
            if not same or len(a.parts) != len(b.parts):
                return False
            pairs.extend(zip(a.parts, b.parts, strict=True))
        return True

    def __hash__(self) -> int:
        unknown = [self] if self._hash is None else []
        while unknown:
            node = unknown[-1]
            inside = [child for child in node.parts if child._hash is None]
            if inside:
                unknown += inside
            else:  # each child tells the hash that it knows
                node._hash = _hash_of(node)
                unknown.pop()
        assert self._hash is not None
        return self._hash

    def is_deeper_than(self, limit: int) -> bool:
        """Whether a path from the root to a leaf has more than `limit` containers."""
        level = [self]
        for _ in range(limit):
            level = [child for node in level for child in node.parts if child.kind is not None]
            if not level:
                return False
        return any(node.parts for node in level)

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Build a tree of this structure."""
        leaves = list(leaves)
        if len(leaves) != self.num_leaves:
            raise PytreeError(f"{self} has {self.num_leaves} leaves, but got {len(leaves)}")
        return _unflatten(self, leaves)

    def flatten_up_to(self, tree: Any, what: str = "tree") -> list[Any]:
        """The subtrees of `tree` at this structure's leaves; a PytreeError names the difference."""
        out: list[Any] = []
        try:
            if walks.flatten_up_to(self, tree, out):
                return out
        except RecursionError:
            pass
        return self._flatten_up_to(tree, what)

    def _flatten_up_to(self, tree: Any, what: str) -> list[Any]:
        out: list[Any] = []
        waiting: list[tuple[TreeDef, Any, _Path]] = [(self, tree, None)]
        while waiting:
            spec, x, path = waiting.pop()
            if spec.kind is None:
                out.append(x)
                continue
            container = container_of(type(x))
            if container is None or type(x) is not spec.kind:
                raise PytreeError(
                    f"{what}{keystr(_keys(path))} must be a {spec.kind.__name__} with "
                    f"{len(spec.parts)} children, got {type(x).__name__}: {_brief(x)}"
                )
            children, aux = container.flatten(x)
            if len(children) != len(spec.parts) or aux != spec.aux:
                # Libraries match these words of JAX's.
                why = " (Dict key mismatch)" if spec.kind is dict else ""
                raise PytreeError(
                    f"{what}{keystr(_keys(path))} must be a {spec.kind.__name__} of "
                    f"{_describe(spec.aux, spec.parts)}, got one of {_describe(aux, children)}{why}"
                )
            keys = container.keys(aux, len(children))
            found = zip(spec.parts, children, keys, strict=True)
            waiting += reversed([(s, c, (path, k)) for s, c, k in found])
        return out

    def __str__(self) -> str:
        texts: list[str] = []
        for node in _children_first(self):
            first = len(texts) - len(node.parts)
            texts[first:] = [node._text(texts[first:])]
        return f"PyTreeDef({texts[0]})"

    __repr__ = __str__

    def _text(self, parts: list[str]) -> str:
        """The text of a node, from those of its children."""
        if self.kind is None:
            return "*"
        if self.kind is type(None):
            return "None"
        if self.kind is tuple:
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if self.kind is list:
            return f"[{', '.join(parts)}]"
        if self.kind is dict:
            items = zip(self.aux, parts, strict=True)
            return "{" + ", ".join(f"{k!r}: {v}" for k, v in items) + "}"
        named = is_named_tuple(self.kind)
        what = f"namedtuple[{self.kind.__name__}]" if named else f"{self.kind.__name__}[{self.aux}]"
        return f"CustomNode({what}, [{', '.join(parts)}])"


def _hash_of(node: TreeDef) -> int:
    """The hash of a node from its children's; unhashable data is left to the comparison."""
    try:
        return hash((node.kind, node.aux, node.parts))
    except TypeError:
        return hash((node.kind, node.parts))


def _children_first(treedef: TreeDef) -> Iterator[TreeDef]:
    """All nodes of a structure, each after its children, the first child first."""
    waiting = [(treedef, False)]
    while waiting:
        node, done = waiting.pop()
        if done or not node.parts:
            yield node
        else:
            waiting.append((node, True))
            waiting += [(child, False) for child in reversed(node.parts)]


# The path to a node while a tree is walked: that to its container, and the last step.
_Path: TypeAlias = "tuple[_Path, Any] | None"


def _keys(path: _Path) -> tuple[Any, ...]:
    """A path as its steps from the root."""
    steps = []
    while path is not None:
        path, step = path
        steps.append(step)
    return tuple(reversed(steps))


LEAF = TreeDef(None, None, ())
NONE = TreeDef(type(None), None, ())


def _describe(aux: Any, children: Sequence[Any]) -> str:
    if isinstance(aux, tuple) and aux:
        return "keys " + ", ".join(repr(k) for k in aux)
    return f"{len(children)} children"


def _brief(x: Any) -> str:
    try:
        text = repr(x)
    except RecursionError:
        text = "..."  # Python's own text of a deep tree
    return text if len(text) < 60 else text[:57] + "..."


# ---- flatten, unflatten, map -------------------------------------------------------------------


def tree_flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None):
    """Leaves and structure of a pytree.

    >>> tree_flatten({"b": (1, 2), "a": None})
    ([1, 2], PyTreeDef({'a': None, 'b': (*, *)}))
    """
    leaves: list[Any] = []
    if is_leaf is None:
        try:
            return leaves, walks.flatten(tree, leaves)
        except RecursionError:  # native walks use the stack; Python's below do not
            leaves.clear()
    return leaves, flatten_in_python(tree, leaves, is_leaf)


def flatten_in_python(
    tree: Any,
    leaves: list[Any],
    is_leaf: Callable[..., bool] | None = None,
    paths: list[tuple[Any, ...]] | None = None,
) -> TreeDef:
    """Append the leaves of a tree of any depth; gives its structure.

    With `paths` the path of each leaf is appended to that, and the call is `is_leaf(path, x)`.
    """
    made: list[TreeDef] = []
    # Objects that are to be taken apart, and the path to each. Containers whose children are under
    # way: the number of objects waiting behind them, and of their children.
    waiting: list[Any] = [tree]
    places: list[_Path] = [None]
    opened: list[tuple[int, type, Any, int]] = []
    while True:
        while opened and len(waiting) == opened[-1][0]:
            _, kind, aux, count = opened.pop()
            first = len(made) - count
            made[first:] = [TreeDef(kind, aux, tuple(made[first:]))]
        if not waiting:
            return made[0]
        x = waiting.pop()
        path: _Path = None if paths is None else places.pop()
        if is_leaf is None:
            ends = False
        else:
            ends = is_leaf(x) if paths is None else is_leaf(_keys(path), x)
        container = None if ends else container_of(type(x))
        if container is None:
            made.append(LEAF)
            leaves.append(x)
            if paths is not None:
                paths.append(_keys(path))
            continue
        if x is None:
            made.append(NONE)
            continue
        children, aux = container.flatten(x)
        opened.append((len(waiting), type(x), aux, len(children)))
        waiting += reversed(children)
        if paths is not None:
            keys = keys_of(x, container, aux, len(children))
            places += [(path, key) for key in reversed(keys)]


def flatten_container(x: Any, leaves: list[Any]) -> TreeDef:
    """The structure of `x`; a native walk calls this for each type that it does not know."""
    container = container_of(type(x))
    if container is None:
        leaves.append(x)
        return LEAF
    children, aux = container.flatten(x)
    return TreeDef(type(x), aux, tuple([walks.flatten(c, leaves) for c in children]))


def unflatten_in_python(treedef: TreeDef, leaves: list[Any]) -> Any:
    """Build a tree of as many leaves as the structure has."""
    rest = iter(leaves)
    made: list[Any] = []
    for node in _children_first(treedef):
        if node.kind is None:
            made.append(next(rest))
        else:
            first = len(made) - len(node.parts)
            made[first:] = [_containers[node.kind].unflatten(node.aux, made[first:])]
    return made[0]


def _unflatten(treedef: TreeDef, leaves: list[Any]) -> Any:
    try:
        return walks.unflatten(treedef, leaves)
    except RecursionError:
        return unflatten_in_python(treedef, leaves)


def build_container(kind: type, aux: Any, children: Sequence[Any]) -> Any:
    """A container of any class, from its children."""
    return _containers[kind].unflatten(aux, children)


def flatten_container_up_to(treedef: TreeDef, x: Any, leaves: list[Any]) -> bool:
    """Append the subtrees at a structure's leaves; False if a container of `x` does not match."""
    container = container_of(type(x))
    if container is None or type(x) is not treedef.kind:
        return False
    children, aux = container.flatten(x)
    if len(children) != len(treedef.parts) or aux != treedef.aux:
        return False
    pairs = zip(treedef.parts, children, strict=True)
    return all([walks.flatten_up_to(spec, child, leaves) for spec, child in pairs])


class _Walks:
    """How trees are taken apart and put together: in Python, until `compile` has native code.

    `flatten_up_to` may return False with leaves appended already; Python then finds the reason.
    """

    flatten: Callable[[Any, list[Any]], TreeDef] = staticmethod(flatten_in_python)
    unflatten: Callable[[TreeDef, list[Any]], Any] = staticmethod(unflatten_in_python)
    flatten_up_to: Callable[[TreeDef, Any, list[Any]], bool] = staticmethod(lambda *_: False)

    def registries(self) -> tuple[dict[type, Container], dict[type, bool]]:
        """All containers, and the named tuples among them, as they are at any time."""
        return _containers, _named_tuples


walks = _Walks()


def tree_unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Any:
    """Put leaves back into a structure."""
    return treedef.unflatten(leaves)


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of a pytree, in order."""
    return tree_flatten(tree, is_leaf)[0]


def tree_structure(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> TreeDef:
    """The structure of a pytree."""
    return tree_flatten(tree, is_leaf)[1]


def tree_map(
    f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Apply `f` to the leaves of one or several trees of the same structure.

    >>> tree_map(lambda x, y: x + y, {"a": 1}, {"a": 10})
    {'a': 11}
    """
    leaves, treedef = tree_flatten(tree, is_leaf)
    columns = [leaves]
    for k, other in enumerate(rest, 1):
        columns.append(treedef.flatten_up_to(other, f"tree_map: tree number {k + 1}"))
    return _unflatten(treedef, list(map(f, *columns)))


def tree_flatten_with_path(
    tree: Any, is_leaf: Callable[..., bool] | None = None, is_leaf_takes_path: bool = False
):
    """Like `tree_flatten`, with (path, leaf) pairs instead of leaves.

    With `is_leaf_takes_path` it is called as `is_leaf(path, x)`.
    """
    leaves: list[Any] = []
    paths: list[tuple[Any, ...]] = []
    ends = is_leaf
    if is_leaf is not None and not is_leaf_takes_path:
        ends = lambda _, x: is_leaf(x)  # noqa: E731
    treedef = flatten_in_python(tree, leaves, ends, paths)
    return list(zip(paths, leaves, strict=True)), treedef


def tree_leaves_with_path(
    tree: Any, is_leaf: Callable[..., bool] | None = None, is_leaf_takes_path: bool = False
):
    """(path, leaf) pairs of a pytree."""
    return tree_flatten_with_path(tree, is_leaf, is_leaf_takes_path)[0]


def tree_map_with_path(
    f: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[..., bool] | None = None,
    is_leaf_takes_path: bool = False,
) -> Any:
    """Like `tree_map`, and `f` gets the path as first argument."""
    pairs, treedef = tree_flatten_with_path(tree, is_leaf, is_leaf_takes_path)
    columns = [treedef.flatten_up_to(other, "tree_map_with_path: a later tree") for other in rest]
    rows = zip(pairs, *columns, strict=True)
    return treedef.unflatten([f(path, x, *others) for (path, x), *others in rows])


def tree_all(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> bool:
    """Whether all leaves are true."""
    return all(tree_leaves(tree, is_leaf))


# Stands for "no initial value": None may be one.
NOTHING = object()


def tree_reduce(
    function: Callable[[Any, Any], Any], tree: Any, initializer: Any = NOTHING, is_leaf: Any = None
) -> Any:
    """Fold `function` over the leaves from left to right, from `initializer` if there is one."""
    initial = () if initializer is NOTHING else (initializer,)
    return functools.reduce(function, tree_leaves(tree, is_leaf), *initial)


def tree_transpose(
    outer_treedef: TreeDef, inner_treedef: TreeDef | None, pytree_to_transpose: Any
) -> Any:
    """Turn a tree of trees inside out: `outer` of `inner` becomes `inner` of `outer`."""
    outer, inner = outer_treedef, inner_treedef
    leaves, tree = tree_flatten(pytree_to_transpose)
    if inner is not None and tree.num_leaves == outer.num_leaves * inner.num_leaves:
        # As in JAX, containers of other kinds may hold the same leaves.
        columns = [leaves[k :: inner.num_leaves] for k in range(inner.num_leaves)]
        return inner.unflatten([outer.unflatten(column) for column in columns])
    subtrees = outer.flatten_up_to(pytree_to_transpose, "tree_transpose: tree")
    if inner is None:
        inner = tree_structure(subtrees[0])
    rows = [inner.flatten_up_to(s, "tree_transpose: inner tree") for s in subtrees]
    return inner.unflatten([outer.unflatten(column) for column in zip(*rows, strict=True)])


def treedef_tuple(treedefs: Iterable[TreeDef]) -> TreeDef:
    """The structure of a tuple of trees."""
    return TreeDef(tuple, None, tuple(treedefs))


def all_leaves(iterable: Iterable[Any], is_leaf: Callable[[Any], bool] | None = None) -> bool:
    """Whether no element is a container."""
    return all(
        (is_leaf is not None and is_leaf(x)) or container_of(type(x)) is None for x in iterable
    )


def broadcast_prefix(
    prefix: Any, tree: Any, what: str, is_leaf: Any = None, value: str = "the value there"
) -> list[Any]:
    """Spread a prefix tree over the leaves of `tree`: one entry of `prefix` for each leaf.

    `None` in `prefix` is a leaf. `what` and `value` name the prefix and the tree in the PytreeError
    raised when one is not a prefix of the other.

    >>> broadcast_prefix((0, None), ({"a": 1, "b": 2}, 3), "in_axes")
    [0, 0, None]
    """
    out: list[Any] = []

    def leaf(x: Any) -> bool:
        return x is None or (is_leaf is not None and is_leaf(x))

    waiting: list[tuple[Any, Any, _Path]] = [(prefix, tree, None)]
    while waiting:
        p, t, path = waiting.pop()
        container = None if leaf(p) else container_of(type(p))
        if container is None:
            out.extend([p] * tree_structure(t).num_leaves)
            continue
        children = _matching(p, t, path, container, (what, value))
        waiting += reversed([(a, b, (path, key)) for key, a, b in children])
    return out


def _matching(
    p: Any, t: Any, path: _Path, container: Container, names: tuple[str, str]
) -> Iterator[tuple[Any, Any, Any]]:
    """The steps to the children of a container in a prefix, these, and those of the tree."""
    what, value = names
    t_container = container_of(type(t))
    where = keystr(_keys(path))
    there = value if value == "the value there" else f"{value}{where}"
    if t_container is None or not _same_kind(type(p), type(t)):
        raise PytreeError(
            f"{what}{where} is a {type(p).__name__} ({_brief(p)}), but {there} is "
            f"a {type(t).__name__}: give one entry for it, or a matching container"
        )
    p_children, p_aux = container.flatten(p)
    t_children, t_aux = t_container.flatten(t)
    if len(p_children) != len(t_children) or p_aux != t_aux:
        raise PytreeError(
            f"{what}{where} has {_describe(p_aux, p_children)}, but {there} has "
            f"{_describe(t_aux, t_children)}; they must correspond one to one"
        )
    keys = t_container.keys(t_aux, len(t_children))
    return zip(keys, p_children, t_children, strict=True)


def _same_kind(a: type, b: type) -> bool:
    return a is b or (a in (list, tuple) and b in (list, tuple))


class Partial(functools.partial):
    """`functools.partial` whose bound arguments are pytree children (so it can cross `jit`)."""

    def __new__(cls, func: Callable[..., Any], *args: Any, **kw: Any) -> Partial:
        """Bind arguments, and leave a `func` that is a partial itself as it is."""
        if not callable(func):
            raise ArgumentError(f"Partial: {func!r} is not callable")
        self = super().__new__(cls, func, *args, **kw)
        if isinstance(func, functools.partial):
            # Python would merge both; the arguments of the inner one are no children of ours.
            self.__setstate__((func, args, kw, None))  # type: ignore[attr-defined]
        return self

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self.keywords.items()]
        return f"Partial({', '.join([repr(self.func), *map(repr, self.args), *named])})"


register_pytree_node(
    Partial,
    lambda p: ((p.args, p.keywords), p.func),
    lambda func, children: Partial(func, *children[0], **children[1]),
)
