"""The functions of the array API standard 2025.12: their signatures and what they do to dtypes.

Tests read the lines below. A signature is Python's, with the standard's names and defaults.
"""

from __future__ import annotations

SIGNATURES = """
abs(x, /)
acos(x, /)
acosh(x, /)
add(x1, x2, /)
all(x, /, *, axis=None, keepdims=False)
any(x, /, *, axis=None, keepdims=False)
arange(start, /, stop=None, step=1, *, dtype=None, device=None)
argmax(x, /, *, axis=None, keepdims=False)
argmin(x, /, *, axis=None, keepdims=False)
argsort(x, /, *, axis=-1, descending=False, stable=True)
asarray(obj, /, *, dtype=None, device=None, copy=None)
asin(x, /)
asinh(x, /)
astype(x, dtype, /, *, copy=True, device=None)
atan(x, /)
atan2(x1, x2, /)
atanh(x, /)
bitwise_and(x1, x2, /)
bitwise_invert(x, /)
bitwise_left_shift(x1, x2, /)
bitwise_or(x1, x2, /)
bitwise_right_shift(x1, x2, /)
bitwise_xor(x1, x2, /)
broadcast_arrays(*arrays)
broadcast_shapes(*shapes)
broadcast_to(x, /, shape)
can_cast(from_, to, /)
ceil(x, /)
clip(x, /, min=None, max=None)
concat(arrays, /, *, axis=0)
conj(x, /)
copysign(x1, x2, /)
cos(x, /)
cosh(x, /)
count_nonzero(x, /, *, axis=None, keepdims=False)
cumulative_prod(x, /, *, axis=None, dtype=None, include_initial=False)
cumulative_sum(x, /, *, axis=None, dtype=None, include_initial=False)
diff(x, /, *, axis=-1, n=1, prepend=None, append=None)
divide(x1, x2, /)
empty(shape, *, dtype=None, device=None)
empty_like(x, /, *, dtype=None, device=None)
equal(x1, x2, /)
exp(x, /)
expand_dims(x, /, axis)
expm1(x, /)
eye(n_rows, n_cols=None, /, *, k=0, dtype=None, device=None)
finfo(type, /)
flip(x, /, *, axis=None)
floor(x, /)
floor_divide(x1, x2, /)
from_dlpack(x, /, *, device=None, copy=None)
full(shape, fill_value, *, dtype=None, device=None)
full_like(x, /, fill_value, *, dtype=None, device=None)
greater(x1, x2, /)
greater_equal(x1, x2, /)
hypot(x1, x2, /)
iinfo(type, /)
imag(x, /)
isdtype(dtype, kind)
isfinite(x, /)
isin(x1, x2, /, *, invert=False)
isinf(x, /)
isnan(x, /)
less(x1, x2, /)
less_equal(x1, x2, /)
linspace(start, stop, /, num, *, dtype=None, device=None, endpoint=True)
log(x, /)
log10(x, /)
log1p(x, /)
log2(x, /)
logaddexp(x1, x2, /)
logical_and(x1, x2, /)
logical_not(x, /)
logical_or(x1, x2, /)
logical_xor(x1, x2, /)
matmul(x1, x2, /)
matrix_transpose(x, /)
max(x, /, *, axis=None, keepdims=False)
maximum(x1, x2, /)
mean(x, /, *, axis=None, keepdims=False)
meshgrid(*arrays, indexing='xy')
min(x, /, *, axis=None, keepdims=False)
minimum(x1, x2, /)
moveaxis(x, source, destination, /)
multiply(x1, x2, /)
negative(x, /)
nextafter(x1, x2, /)
nonzero(x, /)
not_equal(x1, x2, /)
ones(shape, *, dtype=None, device=None)
ones_like(x, /, *, dtype=None, device=None)
permute_dims(x, /, axes)
positive(x, /)
pow(x1, x2, /)
prod(x, /, *, axis=None, dtype=None, keepdims=False)
real(x, /)
reciprocal(x, /)
remainder(x1, x2, /)
repeat(x, repeats, /, *, axis=None)
reshape(x, /, shape, *, copy=None)
result_type(*arrays_and_dtypes)
roll(x, /, shift, *, axis=None)
round(x, /)
searchsorted(x1, x2, /, *, side='left', sorter=None)
sign(x, /)
signbit(x, /)
sin(x, /)
sinh(x, /)
sort(x, /, *, axis=-1, descending=False, stable=True)
sqrt(x, /)
square(x, /)
squeeze(x, /, axis)
stack(arrays, /, *, axis=0)
std(x, /, *, axis=None, correction=0.0, keepdims=False)
subtract(x1, x2, /)
sum(x, /, *, axis=None, dtype=None, keepdims=False)
take(x, indices, /, *, axis=None)
take_along_axis(x, indices, /, *, axis=-1)
tan(x, /)
tanh(x, /)
tensordot(x1, x2, /, *, axes=2)
tile(x, repetitions, /)
tril(x, /, *, k=0)
triu(x, /, *, k=0)
trunc(x, /)
unique_all(x, /)
unique_counts(x, /)
unique_inverse(x, /)
unique_values(x, /)
unstack(x, /, *, axis=0)
var(x, /, *, axis=None, correction=0.0, keepdims=False)
vecdot(x1, x2, /, *, axis=-1)
where(condition, x1, x2, /)
zeros(shape, *, dtype=None, device=None)
zeros_like(x, /, *, dtype=None, device=None)
linalg.cholesky(x, /, *, upper=False)
linalg.cross(x1, x2, /, *, axis=-1)
linalg.det(x, /)
linalg.diagonal(x, /, *, offset=0)
linalg.eig(x, /)
linalg.eigh(x, /)
linalg.eigvals(x, /)
linalg.eigvalsh(x, /)
linalg.inv(x, /)
linalg.matmul(x1, x2, /)
linalg.matrix_norm(x, /, *, keepdims=False, ord='fro')
linalg.matrix_power(x, n, /)
linalg.matrix_rank(x, /, *, rtol=None)
linalg.matrix_transpose(x, /)
linalg.outer(x1, x2, /)
linalg.pinv(x, /, *, rtol=None)
linalg.qr(x, /, *, mode='reduced')
linalg.slogdet(x, /)
linalg.solve(x1, x2, /)
linalg.svd(x, /, *, full_matrices=True)
linalg.svdvals(x, /)
linalg.tensordot(x1, x2, /, *, axes=2)
linalg.trace(x, /, *, offset=0, dtype=None)
linalg.vecdot(x1, x2, /, *, axis=-1)
linalg.vector_norm(x, /, *, axis=None, keepdims=False, ord=2)
fft.fft(x, /, *, n=None, axis=-1, norm='backward')
fft.fftfreq(n, /, *, d=1.0, dtype=None, device=None)
fft.fftn(x, /, *, s=None, axes=None, norm='backward')
fft.fftshift(x, /, *, axes=None)
fft.hfft(x, /, *, n=None, axis=-1, norm='backward')
fft.ifft(x, /, *, n=None, axis=-1, norm='backward')
fft.ifftn(x, /, *, s=None, axes=None, norm='backward')
fft.ifftshift(x, /, *, axes=None)
fft.ihfft(x, /, *, n=None, axis=-1, norm='backward')
fft.irfft(x, /, *, n=None, axis=-1, norm='backward')
fft.irfftn(x, /, *, s=None, axes=None, norm='backward')
fft.rfft(x, /, *, n=None, axis=-1, norm='backward')
fft.rfftfreq(n, /, *, d=1.0, dtype=None, device=None)
fft.rfftn(x, /, *, s=None, axes=None, norm='backward')
"""

# JAX's defaults where they are written differently and mean the same: (name, parameter).
OTHER_DEFAULTS = {
    ("arange", "step"): "None is 1",
    ("argmax", "keepdims"): "None is False",
    ("argmin", "keepdims"): "None is False",
    ("astype", "copy"): "arrays are immutable: whether one is copied cannot be seen",
    ("std", "correction"): "None is 0",
    ("var", "correction"): "None is 0",
    **{
        (f"fft.{name}", "norm"): "None is 'backward'"
        for name in "fft fftn hfft ifft ifftn ihfft irfft irfftn rfft rfftn".split()
    },
}

CONSTANTS = "e inf nan newaxis pi"
DTYPES = """bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64
complex128"""

ATTRIBUTES = "dtype device mT ndim shape size T"
METHODS = """
__abs__ __add__ __and__ __array_namespace__ __bool__ __complex__ __dlpack__ __dlpack_device__
__eq__ __float__ __floordiv__ __ge__ __getitem__ __gt__ __index__ __int__ __invert__ __le__
__lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __rshift__
__setitem__ __sub__ __truediv__ __xor__ __radd__ __rand__ __rfloordiv__ __rlshift__ __rmatmul__
__rmod__ __rmul__ __ror__ __rpow__ __rrshift__ __rsub__ __rtruediv__ __rxor__ to_device
"""

# Elementwise functions by the dtypes that they take (b i u f c, `*` all) and give: `same`, `bool`,
# or `real` (that of a complex number's parts).
ELEMENTWISE = """
iufc same  add multiply negative positive pow sign square subtract
iuf  same  ceil floor floor_divide maximum minimum remainder round trunc
iu   same  bitwise_left_shift bitwise_right_shift
biu  same  bitwise_and bitwise_invert bitwise_or bitwise_xor
fc   same  acos acosh asin asinh atan atanh cos cosh divide exp expm1 log log10 log1p log2
fc   same  reciprocal sin sinh sqrt tan tanh
f    same  atan2 copysign hypot logaddexp nextafter
iufc same  conj
iufc real  abs real
c    real  imag
*    bool  equal not_equal
iuf  bool  greater greater_equal less less_equal
iufc bool  isfinite isinf isnan
f    bool  signbit
b    bool  logical_and logical_not logical_or logical_xor
"""

# Promotion within a kind and between signed and unsigned integers, and from real to complex:
# rows and columns in this order. `-` is not defined by the standard.
PROMOTION = """
      b  i1 i2 i4 i8 u1 u2 u4 u8 f4 f8 c8 c16
b     b  -  -  -  -  -  -  -  -  -  -  -  -
i1    -  i1 i2 i4 i8 i2 i4 i8 -  -  -  -  -
i2    -  i2 i2 i4 i8 i2 i4 i8 -  -  -  -  -
i4    -  i4 i4 i4 i8 i4 i4 i8 -  -  -  -  -
i8    -  i8 i8 i8 i8 i8 i8 i8 -  -  -  -  -
u1    -  i2 i2 i4 i8 u1 u2 u4 u8 -  -  -  -
u2    -  i4 i4 i4 i8 u2 u2 u4 u8 -  -  -  -
u4    -  i8 i8 i8 i8 u4 u4 u4 u8 -  -  -  -
u8    -  -  -  -  -  u8 u8 u8 u8 -  -  -  -
f4    -  -  -  -  -  -  -  -  -  f4 f8 c8 c16
f8    -  -  -  -  -  -  -  -  -  f8 f8 c16 c16
c8    -  -  -  -  -  -  -  -  -  c8 c16 c8 c16
c16   -  -  -  -  -  -  -  -  -  c16 c16 c16 c16
"""

# Reductions: the dtypes that they take, and what they give. `wide` is the default dtype of the
# kind if that has more bits; `index` is the default dtype of integers.
REDUCTIONS = """
iufc wide  sum prod cumulative_sum cumulative_prod
iuf  same  max min
fc   same  mean
f    same  std var
*    bool  all any
iuf  index argmax argmin
*    index count_nonzero
"""
