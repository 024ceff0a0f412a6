"""Values of the per-device program, in the forms that exist of them.

A value has *forms*, each split in its own way or partial: every device holds a term of a sum. Each
reader asks for the form that it needs, and a form that is made stays for the next reader. A
gathered argument stays for readers nearby: the next one far away gathers it again, so that a
backward pass does not hold all weights that the forward pass gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd.base.context import state
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import Literal
from spmd.core.remat import optimization_barrier
from spmd.core.stage import JaxprTracer
from spmd.core.structural import broadcast_in_dim
from spmd.lax.array import full
from spmd.lax.convert import convert_element_type
from spmd.partition.moves import Root, alone, combined, moved, root_term, seconds
from spmd.partition.propagate import Axes, Cell, Split, cell_of_literal
from spmd.partition.unasked import here

# How a value is split, and over which axes it is partial, with which operator; or the axes along
# which one device has it, and that device.
Form = tuple[Split, Axes, str | Root]
Sizes = Mapping[Any, int]
# How a value with one form is split, the type of its part, and of terms of a sum their axes.
Plain = tuple[Split, ShapedArray] | tuple[Split, ShapedArray, Axes]

# A gathered argument is let go if none of so many equations reads it, and it has so many bytes more
# than the part that a device holds anyway.
FAR_EQUATIONS = 100
LEAST_BYTES_LET_GO = 1 << 18


class Value:
    """A value of the program; `uses` is the number of its readers.

    `is_zero` says that all its elements are known to be zero. Of an argument, and of what is cast
    of one, `read_at` has the equation, by its number, that read each form last, `now` the one that
    is being written. The `origin` is an operand of which forms can be made without a move; values
    that have this one for their origin are `renamed`. A value is `plain` if it has one form
    alone, as its cell says, or terms of a sum: these are the split with the part's type, and for
    terms their axes, and the part.
    """

    __slots__ = (
        "cell",
        "forms",
        "is_zero",
        "now",
        "origin",
        "plain",
        "read_at",
        "renamed",
        "source",
        "uses",
    )

    def __init__(self, cell: Cell, forms: dict[Form, Any], is_zero: bool = False):
        self.cell = cell
        self.forms = forms
        self.is_zero = is_zero
        self.uses = 1
        self.source = state.source  # the line that makes it
        self.now = 0
        self.read_at: dict[Form, int] | None = None
        self.plain: tuple[Plain, JaxprTracer] | None = None
        self.origin: Origin | None = None
        self.renamed: dict[Any, Value] = {}

    def only_form(self) -> Form | None:
        """The form that the value has, if there is no other."""
        if len(self.forms) > 1:
            return None
        (form,) = self.forms
        return form

    def partial(self) -> Form | None:
        """The form that still has to be combined, if there is no other."""
        form = self.only_form()
        return form if form is not None and form[1] else None

    def rooted(self) -> Form | None:
        """The form that one device has, if there is no other."""
        form = self.only_form()
        return form if form is not None and type(form[2]) is Root else None

    def axes_whole(self) -> frozenset[Any]:
        """The axes along which devices have the value whole in some form, though not in its own."""
        named = {a for axes in self.cell.axes for a in axes}
        totals = [split for split, over, _ in self.forms if not over]
        return frozenset(
            a for a in named if any(all(a not in own for own in split) for split in totals)
        )

    def copy(self) -> Value:
        """The same for a reader inside a nested trace: what is made there stays there."""
        made = Value(self.cell, dict(self.forms), self.is_zero)
        made.uses, made.source = self.uses, self.source
        made.origin = self.origin and self.origin.copy()
        return made

    def read(self, want: Split, sizes: Sizes, unreduced: Axes = ()) -> Any:
        """A device's part of the value as `want` splits it, or of a term along `unreduced` axes."""
        wanted = (want, unreduced, "add" if unreduced else "")
        if wanted not in self.forms:
            made = self._term(want, unreduced, sizes) if unreduced else self._made(want, sizes)
            self.forms[wanted], self.plain = made, None
        if self.read_at is not None:
            self.read_at[wanted] = self.now
        return self.forms[wanted]

    def let_go(self, now: int) -> None:
        """Forget what was gathered of an argument and not read for long, before equation `now`.

        So is what was cast of one.
        """
        self.now, own = now, total_form(self.cell.axes)
        if self.read_at is None or own not in self.forms:
            return
        held = typeof(self.forms[own]).nbytes
        far = [
            form
            for form, at in self.read_at.items()
            if now - at > FAR_EQUATIONS and form in self.forms and not form[1]
        ]
        large = [
            form
            for form in far
            if typeof(self.forms[form]).nbytes - (form != own and held) >= LEAST_BYTES_LET_GO
        ]
        for form in large:
            if form != own:
                del self.forms[form]
        # After a barrier: without one, passes would merge the two gathers and keep the first.
        if own in large and self.origin is not None:
            if (found := self.origin.again(self.cell.axes)) is not None:
                self.forms[own] = found
            self.read_at[own] = now
        elif any(form != own for form in large):
            self.forms[own] = optimization_barrier(self.forms[own])

    def _made(self, want: Split, sizes: Sizes) -> Any:
        if self.is_zero:
            return self.zeros(want, sizes)
        if self.origin is not None and (found := self.origin.made(want)) is not None:
            return found
        totals = self._totals()
        if not totals:
            form = min(self.forms, key=lambda form: len(form[1]))
            target = want if self.uses <= 1 else self.cell.axes
            total, now = self._combined(self.forms[form], form, target, sizes)
            self.forms[total_form(now)] = total
            if now == want:
                return total
            totals = [(now, total)]
        if self.origin is not None and self.origin.is_narrower and self.origin.operand._totals():
            return self.origin.moved(want, sizes)
        if len(totals) > 1:
            totals.sort(key=lambda pair: self._seconds(pair[0], want, sizes))
        split, x = totals[0]
        return self._moved(x, split, want, sizes)

    def _moved(self, x: Any, have: Split, want: Split, sizes: Sizes) -> Any:
        """A form as another; `unasked.py` may want to know."""
        if here.watch is not None:
            return here.watch.moved(self, x, have, want, sizes)
        return moved(x, self.cell.shape, have, want, sizes)

    def _combined(self, x: Any, form: Form, want: Split, sizes: Sizes) -> tuple[Any, Split]:
        """The total of the terms of a form, and how it is split."""
        if here.watch is not None:
            return here.watch.combined(self, x, form, want, sizes)
        split, over, how = form
        return combined(x, split, over, how, want, sizes)

    def _seconds(self, have: Split, want: Split, sizes: Sizes) -> tuple[float, int]:
        """The cost of making one form from another."""
        x = typeof(next(iter(self.forms.values())))
        return seconds(x.update(shape=self.cell.shape), have, want, sizes)

    def _totals(self) -> list[tuple[Split, Any]]:
        return [(split, x) for (split, over, _), x in self.forms.items() if not over]

    def zeros(self, want: Split, sizes: Sizes) -> Any:
        """Zeros like a device's part of the value as `want` splits it."""
        aval = typeof(next(iter(self.forms.values())))
        zeros = full(part_shape(self.cell.shape, want, sizes), 0, aval.dtype)
        return convert_element_type(zeros, aval.dtype, aval.weak_type)

    def _term(self, want: Split, unreduced: Axes, sizes: Sizes) -> Any:
        """A term of the value: one that is there, or the value on one device of each group."""
        if self.is_zero:
            return self.zeros(want, sizes)
        for (split, over, combine), x in self.forms.items():
            if combine == "add" and set(unreduced) <= set(over):
                more = tuple(a for a in over if a not in unreduced)
                term, now = self._combined(x, (split, more, "add"), want, sizes)
                return self._moved(term, now, want, sizes)
            if isinstance(combine, Root) and set(unreduced) == set(over):
                return self._moved(root_term(x, over, combine), split, want, sizes)
        found = [own for own, _ in self._totals()] or [self.cell.axes]
        split = min(found, key=lambda own: self._seconds(own, want, sizes))
        kept = [
            (*wanted, *(a for a in own[len(wanted) :] if a in unreduced))
            if own[: len(wanted)] == wanted
            else wanted
            for own, wanted in zip(split, want, strict=True)
        ]
        return alone(self.read(tuple(kept), sizes), tuple(kept), want, unreduced, sizes)


class Origin:
    """The operand of a value that has the same elements at other places, or of another type.

    Of a form that exists of the operand the same form of the value is made, and nothing moves.
    """

    __slots__ = ("is_narrower", "make", "operand", "places")

    def __init__(
        self,
        operand: Value,
        places: Sequence[int],
        make: Callable[[Any], Any],
        is_narrower: bool = False,
    ):
        self.operand = operand
        self.places = places  # for each dim of the operand, that of the value
        self.make = make
        self.is_narrower = is_narrower  # whether an element of the operand has fewer bytes

    def copy(self) -> Origin:
        """The same for a reader inside a nested trace."""
        return Origin(self.operand.copy(), self.places, self.make, self.is_narrower)

    def moved(self, want: Split, sizes: Sizes) -> Any:
        """A form of the value, of which the operand is moved."""
        return self.make(self.operand.read(tuple([want[d] for d in self.places]), sizes))

    def made(self, want: Split) -> Any | None:
        """The form of the value that is split so; None if there is no such form of the operand."""
        form = total_form(tuple([want[d] for d in self.places]))
        x = self.operand
        found = x.forms.get(form)
        if found is None and x.origin is not None:
            found = x.origin.made(form[0])
        return None if found is None else self.make(found)

    def again(self, want: Split) -> Any | None:
        """The form of the value once more, so that the one before need not be kept."""
        form, x = total_form(tuple([want[d] for d in self.places])), self.operand
        if form not in x.forms:
            return None
        x.forms[form] = optimization_barrier(x.forms[form])
        return self.make(x.forms[form])


class Repeated(Origin):
    """The operand of a value that repeats it along dims: what moves is the operand."""

    __slots__ = ("shape", "sizes")

    def __init__(self, operand: Value, places: Sequence[int], shape: Sequence[int], sizes: Sizes):
        super().__init__(operand, places, lambda x: x)
        self.shape = shape
        self.sizes = sizes

    def copy(self) -> Repeated:
        return Repeated(self.operand.copy(), self.places, self.shape, self.sizes)

    def made(self, want: Split) -> Any:
        rows = zip(self.operand.cell.shape, self.places, strict=True)
        split = tuple([() if n == 1 else want[d] for n, d in rows])
        part = self.operand.read(split, self.sizes)
        return broadcast_in_dim(part, part_shape(self.shape, want, self.sizes), self.places)

    def again(self, want: Split) -> None:
        return None


def tell_repeated(made: Value, operand: Value, sizes: Sizes) -> None:
    """Let a value know what it repeats: of a number other forms are made, and nothing moves."""
    made.is_zero = operand.is_zero
    if not operand.cell.shape:
        made.origin = Repeated(operand, (), made.cell.shape, sizes)


def part_shape(shape: Sequence[int], split: Split, sizes: Sizes) -> tuple[int, ...]:
    """The shape of one device's part: where a dim does not divide, that of the first device's."""
    parts = []
    for size, axes in zip(shape, split, strict=True):
        count = 1
        for a in axes:
            count *= sizes[a]
        parts.append(-(-size // count))
    return tuple(parts)


def total_form(split: Split) -> Form:
    """The form of a value that is not partial."""
    return split, (), ""


_TOTAL_SCALAR = total_form(())


def form_of(cell: Cell, split: Split) -> Form:
    """The form in which a value of a type is at the edges of loops and programs."""
    return split, cell.unreduced, "add" if cell.unreduced else ""


def read_as(values: Sequence[Value], cells: Sequence[Cell], sizes: Sizes) -> list[Any]:
    """Some values, each split as a cell says, or a term of it."""
    return [x.read(cell.axes, sizes, cell.unreduced) for x, cell in zip(values, cells, strict=True)]


def values_of(cells: Sequence[Cell], parts: Sequence[Any]) -> list[Value]:
    """The values of which these are the parts, split as the cells say."""
    made = []
    for cell, x in zip(cells, parts, strict=True):
        made.append(value := Value(cell, {form_of(cell, cell.axes): x}))
        if type(x) is JaxprTracer and not cell.unreduced:
            value.plain = (cell.axes, x.aval), x
    return made


def whole(cell: Cell, x: Any) -> Value:
    """A value that every device has whole."""
    return Value(cell, {total_form(unsplit(cell)): x})


def unsplit(cell: Cell) -> Split:
    """How a whole value is split."""
    return ((),) * len(cell.shape)


def literal(atom: Literal) -> Value:
    """The value of a literal."""
    aval = atom.aval
    form = _TOTAL_SCALAR if not aval.ndim else total_form(((),) * aval.ndim)
    return Value(cell_of_literal(aval), {form: atom.val}, not aval.ndim and atom.val == 0)
