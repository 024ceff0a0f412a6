"""The words of an entry point: operands, results, and the trees that hold them.

The native code that reads these words (`ir/entry_point.py`, `ir/entry_trees.py`) is written
once a machine; what is here is needed in every process.
"""

from __future__ import annotations

from typing import Any

from spmd.base.tree import TreeDef, is_named_tuple

# The words of an entry point: program header, number of operands, words of all frames, whether the
# run releases the GIL, address of the frames' template, number of buffers, number of offsets; how
# many bytes behind the entry point's first word the trees of the arguments (0: it takes the
# operands themselves) and of the results are; the number of results, the size of the bytes object
# for them (0: none) and its word, the number of blocks that are made, the object that says that
# nothing fits, the function that raises for a status, the type of arrays and of blocks, None. Then
# for each operand its kind, the word of the frames that gets its address, and the object it is
# compared with; then for each offset a word, the word that it starts from, and the bytes in
# between; then for each result the word with its address, its owner, its aval and its sharding;
# then for each block its size class and the word that gets its address; then the nodes of the trees
# (`ir/entry_trees.py`).
(
    HEADER,
    COUNT,
    WORDS,
    RELEASES,
    TEMPLATE,
    BUFFERS,
    OFFSETS,
    GIVEN,
    OUT,
    RESULTS,
    SLAB,
    SLAB_WORD,
    BLOCKS,
    MISS,
    FAIL,
    ARRAY_TYPE,
    BLOCK_TYPE,
    NONE,
    OPERANDS,
) = range(19)

# How an operand is given: the address itself, an object with the buffer protocol, a Python number
# that is stored as an element, an array of one device with the aval it is compared with, or a block
# of the allocator. Numbers are of the type they are compared with, if there is one.
ADDRESS, BUFFER, F32, F64, I32, I64, BOOL, ARRAY, BLOCK = range(9)

# The owner of a result's memory: operand k itself (k >= 0), the owner of the array operand k
# (`of_operand(k)`), block k (`of_block(k)`), or the bytes object.
OF_SLAB = -1
FIRST_BLOCK = 1 << 32


def of_operand(k: int) -> int:
    """The owner of a result that is the array given as operand `k`."""
    return -2 - k


def of_block(k: int) -> int:
    """The owner of a result whose memory is block `k` of those that the entry point makes."""
    return FIRST_BLOCK + k


# ---- trees --------------------------------------------------------------------------------------

# The words of a node: what it is, the number of its children, its class; of a dict the tuple of its
# keys and a dict with these keys, which is copied faster than one grows.
NODE_OP, NODE_COUNT, NODE_CLASS, NODE_KEYS, NODE_TEMPLATE = range(0, 40, 8)
NODE_BYTES = 40
IS_LEAF, IS_NONE, IS_TUPLE, IS_LIST, IS_DICT, IS_NAMED = range(6)

_PLAIN = {None: IS_LEAF, type(None): IS_NONE, tuple: IS_TUPLE, list: IS_LIST, dict: IS_DICT}


def is_plain(tree: TreeDef) -> bool:
    """Whether an entry point knows all containers of a tree."""
    known = tree.kind is None or tree.kind in _PLAIN or is_named_tuple(tree.kind)
    return known and all(map(is_plain, tree.parts))


def tree_words(tree: TreeDef, kept: list[Any]) -> list[int]:
    """The nodes of a plain tree; what they refer to by address is added to `kept`."""
    op = _PLAIN.get(tree.kind, IS_NAMED)
    objects = [tree.kind, tree.aux, dict.fromkeys(tree.aux) if op == IS_DICT else None]
    kept.append(objects)
    words = [op, len(tree.parts), *map(id, objects)]
    return words + [word for child in tree.parts for word in tree_words(child, kept)]
