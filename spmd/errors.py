"""The exceptions that spmd raises: `except spmd.errors.ShapeError`, `from spmd.errors import ...`.

Each derives from `SpmdError` and from the built-in exception that Python programmers expect. Where
`jax.errors` has the class it has the same name here, `ConcretizationTypeError` beside ours.
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
    ExpectationError,
    GradError,
    IndexingError,
    IntegerRangeError,
    InternalError,
    KeyReuseError,
    LaunchError,
    MissingRuleError,
    MutationError,
    NonConcreteBooleanIndexError,
    OptionError,
    PeerError,
    PytreeError,
    RefError,
    RefusedError,
    ReplicaError,
    SettingError,
    ShapeError,
    ShardingError,
    ShardingTypeError,
    SpmdError,
    TracerArrayConversionError,
    TracerBoolConversionError,
    TracerIntegerConversionError,
    TracingError,
    TypePromotionError,
    UnexpectedTracerError,
)

# What a program fails with: all errors here that come while one runs are RuntimeErrors.
JaxRuntimeError = RuntimeError
ConcretizationTypeError = ConcretizationError
JAXTypeError = TypeError
JAXIndexError = IndexError
