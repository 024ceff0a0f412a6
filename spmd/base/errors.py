"""Every exception a user can cause, in one place.

An error names the user's argument, measures what was seen against what was needed, and advises.
Each class also derives from the built-in exception that Python programmers would expect to catch.
The text of every error names the user's file and line; where the code that raises it does not, the
base class puts the line first.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from spmd.base.source import UNKNOWN, current_source

# `file:line (function)`, as a Source prints itself, at the start of a message.
_LOCATED = r"[^\s:]+:\d+ \("


class SpmdError(Exception):
    """The base of everything spmd raises on purpose.

    `text` is the message without the place, for errors that quote it in a longer sentence.
    """

    located: ClassVar[bool] = True

    def __init__(self, text: str = "") -> None:
        self.text = text
        super().__init__(_with_place(text) if self.located else text)


def _with_place(text: str) -> str:
    """The text with the user's line in front, unless it names a line itself."""
    source = current_source()
    if source is UNKNOWN or str(source) in text or re.match(_LOCATED, text):
        return text
    return f"{source}: {text}"


# ---- arguments ---------------------------------------------------------------------------------


class ShapeError(SpmdError, TypeError, ValueError):
    """Shapes do not fit the operation."""


class DtypeError(SpmdError, TypeError):
    """An operation does not accept a dtype."""


class TypePromotionError(DtypeError, ValueError):
    """Dtypes have no common one, or must not be promoted to it."""


class ArgumentError(SpmdError, TypeError, ValueError):
    """An argument is of the wrong kind: not an array, not hashable, out of range."""


class DtypeArgumentError(DtypeError, ArgumentError):
    """A function makes no array of this dtype, or takes none: JAX raises a ValueError for it."""


class KeyOperationError(DtypeArgumentError, NotImplementedError):
    """An operation that typed keys, which are opaque, don't have."""


class SettingError(ArgumentError, AttributeError):
    """There is no setting of this name."""


class RefError(ArgumentError):
    """A mutable array was used where it can't be: frozen, twice in one call, as a result."""


class DimensionError(ArgumentError, IndexError):
    """An array has no such dim. Both a ValueError and an IndexError, as NumPy's `AxisError` is."""


class PermutationError(ArgumentError, IndexError, AssertionError):
    """Pairs of positions are no permutation: one is out of range, or comes twice.

    JAX raises a ValueError, an IndexError or an AssertionError, as the map is.
    """


class IntegerRangeError(SpmdError, OverflowError, ValueError):
    """A Python integer does not fit the dtype that it should have."""


class IndexingError(SpmdError, IndexError, TypeError):
    """An array cannot be indexed like this."""


class PytreeError(SpmdError, ValueError, TypeError):
    """Two pytrees that must match do not."""


class AxisError(SpmdError, NameError, ValueError, AssertionError):
    """An axis name is unbound, bound twice, or of the wrong size.

    Within a map JAX raises an AssertionError for a name that is unbound, else a NameError.
    """


class ShardingError(SpmdError, ValueError):
    """A sharding, mesh or partition spec does not fit the array or the devices."""


class DuplicateSpecError(ShardingError):
    """A partition spec names a mesh axis more than once: `pspec`, over `mesh`."""

    mesh: Any = None
    pspec: Any = None


class IndivisibleError(ShardingError):
    """A dim is not a multiple of the number of its parts."""


class NoMeshError(ShardingError, RuntimeError):
    """A spec is over the mesh in scope, and there is none."""


class ShardingTypeError(ShardingError):
    """Along an `Explicit` mesh axis, operands do not say how a result is to be laid out."""


class VaryingTypeError(ShardingTypeError, TypeError):
    """Two types must agree and differ in layout or in the manual axes over which values vary."""


class ConstraintError(ShardingTypeError, AssertionError):
    """Along an `Explicit` mesh axis, a value is laid out otherwise than a constraint says."""


class ExpectationError(SpmdError, AssertionError):
    """A program does not move what its test expects."""


class DeviceError(SpmdError, RuntimeError, ValueError):
    """Too few devices, or values committed to devices that do not agree."""


class PlatformError(SpmdError, RuntimeError):
    """A platform is not available here; no argument is wrong, so this is no ValueError."""


class MutationError(SpmdError, TypeError):
    """An array was assigned to in place; arrays are immutable."""


class FrozenError(SpmdError, AttributeError, TypeError):
    """An attribute of an object that cannot be changed was assigned to."""


# ---- tracing -----------------------------------------------------------------------------------


class ConcretizationError(SpmdError, TypeError):
    """A traced value was used where Python needs its concrete value."""


class TracerBoolConversionError(ConcretizationError):
    """A traced value was used as a Python `bool`."""


class TracerIntegerConversionError(ConcretizationError):
    """A traced value was used as a Python index."""


class TracerArrayConversionError(ConcretizationError):
    """A traced value was converted to a NumPy array."""


class NonConcreteBooleanIndexError(ConcretizationError, IndexError):
    """A traced boolean mask was used as an index; the result's shape would depend on data."""


class UnexpectedTracerError(SpmdError, TypeError):
    """A tracer outlived the transformation that made it (a leak)."""


# ---- transformations ---------------------------------------------------------------------------


class KeyReuseError(SpmdError, TypeError):
    """A random key was used twice, under `debug_key_reuse`."""


class InconclusiveDimensionOperation(SpmdError, TypeError):
    """A comparison of symbolic sizes whose result depends on them."""


class RefusedError(ArgumentError, NotImplementedError):
    """A primitive has no such rule, or a parameter of JAX no meaning here; the text says why."""


class GradError(SpmdError, TypeError):
    """A function or argument cannot be differentiated as asked."""


class RuleError(GradError, ValueError):
    """A rule of its user's own returned something of another shape than it must."""


class ClosedOverError(GradError, UnexpectedTracerError):
    """A function with rules of its user's own closes over what only an argument may be."""


class FormatError(ArgumentError, IndexError, KeyError):
    """A format of `debug.print` names a value that the call does not give."""

    __str__ = Exception.__str__  # a KeyError would show the text between quotes


# ---- running -----------------------------------------------------------------------------------


class TracingError(SpmdError, RuntimeError):
    """A function would be traced, and `no_tracing` says that none is."""


class TimelineError(ArgumentError, RuntimeError):
    """A timeline would begin while another is under way, or end while none is."""


class MissingRuleError(ArgumentError, GradError, AttributeError):
    """A function with rules of its user's own is used before it was given one."""


class CollectiveError(SpmdError, RuntimeError):
    """Devices or ranks disagree about a collective; `diff` lists all differences that are known."""

    located = False

    def __init__(self, text: str = "", diff: str = "") -> None:
        super().__init__(text)
        self.diff = diff


class CollectiveWarning(UserWarning):
    """Devices may come to disagree about a collective, or to add up a gradient twice."""


class ReplicaError(SpmdError, AssertionError):
    """Values that must be equal on all devices or ranks are not."""

    located = False


class PeerError(SpmdError, RuntimeError):
    """Another rank failed; the message names it."""

    located = False


class LaunchError(SpmdError, RuntimeError):
    """The processes of a job were not started as they should be."""

    located = False


class CudaError(DeviceError):
    """A call of the CUDA driver failed, or a kernel touched what is not its own."""


class OutOfMemoryError(SpmdError, MemoryError, RuntimeError):
    """There is no memory left for an array, or for a program's work."""


class DeletedError(SpmdError, RuntimeError, ValueError):
    """A donated or deleted array was used."""


class OptionError(SpmdError, RuntimeError, ValueError):
    """The compiler, or a function, has no such option, or not this value of it."""


class InternalError(SpmdError, AssertionError):
    """An invariant of ours does not hold; never the user's mistake."""

    located = False


class JaxprTypeError(InternalError, TypeError):
    """An equation of a jaxpr breaks the rules for jaxprs."""


class UnfilteredStackTrace(Exception):
    """The cause of an exception without spmd's frames: it has the whole traceback."""


# Tracebacks, pickles and documents name them as users do, wherever this file lies.
for _value in list(globals().values()):
    if isinstance(_value, type) and _value.__module__ == __name__:
        _value.__module__ = "spmd.errors"
del _value
