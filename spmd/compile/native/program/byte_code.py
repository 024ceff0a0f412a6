"""The byte code of programs: words that `encode` writes and the native executor reads.

A program is a list of steps. Each begins with `HEAD` words, the first of them its opcode; then come
the fields of its kind, its slots, and the blocks of steps inside.
"""

from __future__ import annotations

# Opcodes.
KERNEL, COPY, CALLBACK, FOR, WHILE, COND, COLLECTIVE, SEGMENT, PARALLEL = range(1, 10)
BATCH, RANKS, ONCE = range(10, 13)

# Words at the start of every step; the fields of each kind come next, then its slots, then the
# blocks. A slot is [base, offset, number of strides, (level, stride)...].
HEAD = 3
KERNEL_FIELDS = 6  # function, units, cost_ps, slots, scratch, word at which the sizes stand
COPY_FIELDS = 1  # bytes
CALLBACK_FIELDS = 2  # slots, together
# level, trips (-1: in the slot), bytes of the count, most trips, reverse, body words
FOR_FIELDS = 6
# level, number of dims, product of their trips, lanes, trips taken at a time, cost_ps of one trip,
# body words; then the trips of each dim
PARALLEL_FIELDS = 7
# pieces, cost_ps of one; then for each piece [word at which its step stands, first and last unit],
# then the steps
BATCH_FIELDS = 2
WHILE_FIELDS = 3  # level, test words, body words
COND_FIELDS = 2  # bytes of the index, branches; behind the slot one word each: its words
# kind, bytes of a block, rows, group size, groups, reduce kernel, elements, root, cost_ps,
# word at which the members stand, word at which the sources of a permute stand, whether it streams,
# members of a group that write a result. An exchange has its boxes where the sources would stand,
# their number in the place of the root and the pieces of each in that of the elements.
COLLECTIVE_FIELDS = 13
# source (-1: zeros), target, start, place, width; then the loops, the first the outermost: trips,
# distances in the source and in the target
BOX_LOOPS = 4
BOX_FIELDS = 5 + 3 * BOX_LOOPS
SEGMENT_FIELDS = 1  # cost_ps of one device
ONCE_FIELDS = 1  # body words; then a word for each device, 1 if it runs the body
# address of the group's words, digest of the call, word at which the packed call stands, word at
# which the actions stand, number of actions, word at which the constant stands, label and bytes for
# the flight record; then the slots of input, output and scratch
RANKS_FIELDS = 8

_REDUCTIONS = ("all_reduce", "reduce_scatter")
KINDS = (*_REDUCTIONS, "broadcast", "permute", "all_gather", "all_to_all", "exchange")
