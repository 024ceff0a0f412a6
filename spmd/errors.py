"""The exceptions that spmd raises: `except spmd.errors.ShapeError`, `from spmd.errors import ...`.

Each derives from `SpmdError` and from the built-in exception that Python programmers expect. The
classes of `jax.errors` have the same names here, `ConcretizationTypeError` beside ours.
"""

# ruff: noqa: F401

from spmd.base.errors import (
    ArgumentError,
    AxisError,
    CollectiveError,
    CollectiveWarning,
    ConcretizationError,
    DeletedError,
    DeviceError,
    DimensionError,
    DtypeError,
    DuplicateSpecError,
    ExpectationError,
    GradError,
    InconclusiveDimensionOperation,
    IndexingError,
    IndivisibleError,
    IntegerRangeError,
    InternalError,
    JaxprTypeError,
    KeyOperationError,
    KeyReuseError,
    LaunchError,
    MissingRuleError,
    MutationError,
    NonConcreteBooleanIndexError,
    OptionError,
    PeerError,
    PlatformError,
    PytreeError,
    RefError,
    RefusedError,
    ReplicaError,
    SettingError,
    ShapeError,
    ShardingError,
    ShardingTypeError,
    SpmdError,
    TimelineError,
    TracerArrayConversionError,
    TracerBoolConversionError,
    TracerIntegerConversionError,
    TracingError,
    TypePromotionError,
    UnexpectedTracerError,
    UnfilteredStackTrace,
    VaryingTypeError,
)

# The class of a failing program: all errors here that are raised while one runs are RuntimeErrors.
JaxRuntimeError = RuntimeError
ConcretizationTypeError = ConcretizationError
JAXTypeError = TypeError
JAXIndexError = IndexError
