"""Images at other sizes: `resize` and `scale_and_translate`, by any kernel of interpolation.

Each dim that changes is one product with a matrix of weights, so that derivatives, batching and
partitioning are those of a product. An image is an array of any rank; which dims hold pixels is
told by the shapes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd import numpy as snp
from spmd.api.compiled import jit
from spmd.base.errors import ArgumentError, DimensionError, ShapeError
from spmd.base.source import current_source
from spmd.core.aval import typeof
from spmd.numpy.promotion import as_array, promote_dtypes_inexact

if TYPE_CHECKING:
    from spmd.sharding.array import Array

__all__ = ["ResizeMethod", "resize", "scale_and_translate"]


class ResizeMethod(enum.Enum):
    """How pixels between pixels get their values.

    NEAREST takes the pixel that covers the place. LINEAR, CUBIC (Keys' kernel), LANCZOS3 and
    LANCZOS5 weigh the pixels around it. CUBIC_PYTORCH is PyTorch's: as CUBIC, but without
    antialias by another kernel, and edges go on. AREA averages what an output pixel covers.
    """

    NEAREST = 0
    LINEAR = 1
    LANCZOS3 = 2
    LANCZOS5 = 3
    CUBIC = 4
    CUBIC_PYTORCH = 5
    AREA = 6

    @staticmethod
    def from_string(s: str) -> ResizeMethod:
        """Return the method of a name: "bilinear" and "triangle" are LINEAR too.

        Raises `ArgumentError` for a name that is unknown.

        >>> spmd.image.ResizeMethod.from_string("bicubic")
        <ResizeMethod.CUBIC: 4>
        """
        found = _NAMES.get(s)
        if found is None:
            raise ArgumentError(
                f"{current_source()}: unknown resize method {s!r}; use one of {', '.join(_NAMES)}"
            )
        return found


_NAMES = {
    "nearest": ResizeMethod.NEAREST,
    **dict.fromkeys(("linear", "bilinear", "trilinear", "triangle"), ResizeMethod.LINEAR),
    "lanczos3": ResizeMethod.LANCZOS3,
    "lanczos5": ResizeMethod.LANCZOS5,
    **dict.fromkeys(("cubic", "bicubic", "tricubic"), ResizeMethod.CUBIC),
    **dict.fromkeys(("cubic-pytorch", "bicubic-pytorch"), ResizeMethod.CUBIC_PYTORCH),
    "area": ResizeMethod.AREA,
}


# ---- kernels: the weight of a pixel at a distance, in pixels -----------------------------------


def _triangle(x: Any) -> Any:
    return snp.maximum(0, 1 - x)


def _lanczos(radius: float) -> Callable[[Any], Any]:
    def kernel(x: Any) -> Any:
        near = x <= 1e-3
        apart = snp.where(near, 1.0, x)  # no division by 0, whose derivative would be NaN
        wave = radius * snp.sin(np.pi * apart) * snp.sin(np.pi * apart / radius)
        return snp.where(x > radius, 0.0, snp.where(near, 1.0, wave / (np.pi * apart) ** 2))

    return kernel


def _cubic(a: float) -> Callable[[Any], Any]:
    """Keys' family of cubic kernels: two cubics, with slope `a` where they meet, at 1."""

    def kernel(x: Any) -> Any:
        inner = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
        outer = ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
        return snp.where(x >= 2.0, 0.0, snp.where(x >= 1.0, outer, inner))

    return kernel


_KERNELS: dict[ResizeMethod, Callable[[Any], Any]] = {
    ResizeMethod.LINEAR: _triangle,
    ResizeMethod.LANCZOS3: _lanczos(3.0),
    ResizeMethod.LANCZOS5: _lanczos(5.0),
    ResizeMethod.CUBIC: _cubic(-0.5),
    ResizeMethod.CUBIC_PYTORCH: _cubic(-0.75),
}


# ---- weights: (pixels of the input, pixels of the output) --------------------------------------


def _weights(
    method: ResizeMethod, size: int, out_size: int, scale: Any, shift: Any, antialias: bool
) -> Any:
    """The share of each input pixel in each output pixel, along one dim."""
    dtype = typeof(scale).dtype
    inverse = 1.0 / scale
    left = snp.arange(out_size, dtype=dtype) * inverse - shift * inverse
    center = (snp.arange(out_size, dtype=dtype) + 0.5) * inverse - shift * inverse - 0.5
    if method is ResizeMethod.AREA:
        shares = _overlap(left, left + inverse, snp.arange(size, dtype=dtype))
    elif method is ResizeMethod.CUBIC_PYTORCH:
        # Pixels beyond the edges have the values of the edges: their shares belong to those.
        around = snp.arange(-2, size + 2, dtype=dtype)
        shares = _KERNELS[method](abs(center[None, :] - around[:, None]))
        edge = np.clip(np.arange(-2, size + 2), 0, size - 1)
        shares = snp.zeros((size, out_size), dtype).at[edge].add(shares)
    else:
        # A pixel of a smaller image is the average of the pixels that become one.
        widen = snp.maximum(inverse, 1.0) if antialias else 1.0
        apart = abs(center[None, :] - snp.arange(size, dtype=dtype)[:, None])
        shares = _KERNELS[method](apart / widen)
    whole = snp.sum(shares, axis=0, keepdims=True)
    some = abs(whole) > 1000.0 * float(np.finfo(np.float32).eps)
    shares = snp.where(some, shares / snp.where(whole != 0, whole, 1), 0)
    if method is ResizeMethod.CUBIC_PYTORCH:
        return shares
    inside = (center >= -0.5) & (center <= size - 0.5)
    return snp.where(inside[None, :], shares, 0)


def _overlap(start: Any, stop: Any, pixels: Any) -> Any:
    """The length that each of the intervals from `start` to `stop` has within each pixel."""
    top = snp.minimum(stop[None, :], pixels[:, None] + 1.0)
    return snp.maximum(0.0, top - snp.maximum(start[None, :], pixels[:, None]))


def _resample(
    image: Any,
    shape: tuple[int, ...],
    dims: Sequence[int],
    scale: Sequence[Any],
    shift: Sequence[Any],
    method: ResizeMethod,
    antialias: bool,
    precision: Any,
) -> Any:
    if not dims:
        return image
    if method is ResizeMethod.CUBIC_PYTORCH and antialias:
        method = ResizeMethod.CUBIC
    results = list(range(image.ndim))
    operands: list[Any] = [image, list(range(image.ndim))]
    for k, dim in enumerate(dims):
        weights = _weights(method, image.shape[dim], shape[dim], scale[k], shift[k], antialias)
        results[dim] = image.ndim + k
        operands += [weights.astype(image.dtype), [dim, results[dim]]]
    return snp.einsum(*operands, results, precision=precision)


def _nearest(image: Any, shape: tuple[int, ...]) -> Any:
    for dim, (size, out_size) in enumerate(zip(image.shape, shape, strict=True)):
        if size != out_size:
            # In float32, whatever the image is: the pixels that JAX takes.
            place = (np.arange(out_size, dtype=np.float32) + np.float32(0.5)) * np.float32(size)
            chosen = np.floor(place / np.float32(out_size)).astype(np.int32)
            image = snp.take(image, chosen, axis=dim, mode="clip")
    return image


# ---- for users ---------------------------------------------------------------------------------


def _read(
    what: str, image: Any, shape: Sequence[int], method: Any
) -> tuple[Any, tuple[int, ...], ResizeMethod]:
    """Arguments as the functions below want them; raises the user's errors."""
    image = as_array(image)
    try:
        sizes = tuple(int(d) for d in shape)
    except TypeError:
        raise ArgumentError(
            f"{current_source()}: {what}: shape must be a sequence of sizes, got {shape!r}"
        ) from None
    if len(sizes) != image.ndim:
        raise ShapeError(
            f"{current_source()}: {what}: shape={sizes} must have a size for each of the "
            f"{image.ndim} dims of {typeof(image)}; repeat the sizes that do not change"
        )
    if not isinstance(method, ResizeMethod):
        if not isinstance(method, str):
            raise ArgumentError(
                f"{current_source()}: {what}: method must be a ResizeMethod or its name, got "
                f"{method!r}"
            )
        method = ResizeMethod.from_string(method)
    return image, sizes, method


def resize(
    image: Any,
    shape: Sequence[int],
    method: str | ResizeMethod,
    antialias: bool = True,
    precision: Any = lax.Precision.HIGHEST,
) -> Array:
    """Return the image at another size.

    `image` is an array of any shape, and `shape` the shape of the result: dims of one size in both,
    such as a batch or channels, are left alone. `method` is a `ResizeMethod` or its name. With
    `antialias`, an image that becomes smaller is averaged over the pixels that become one.
    `precision` is that of the products. The result is floating, but for NEAREST, which keeps the
    dtype. Raises `ShapeError` if the number of dims differs, `ArgumentError` for another method.

    >>> spmd.image.resize(np.array([0.0, 2.0, 4.0, 6.0]), (2,), "area")
    Array([1., 5.], dtype=float32)
    >>> spmd.image.resize(np.array([0.0, 2.0]), (4,), "nearest")
    Array([0., 0., 2., 2.], dtype=float32)
    """
    image, sizes, method = _read("image.resize", image, shape, method)
    return _resize(image, sizes, method, bool(antialias), precision)


def _resize_whole(
    image: Any, shape: tuple[int, ...], method: ResizeMethod, antialias: bool, precision: Any
) -> Any:
    if method is ResizeMethod.NEAREST:
        return _nearest(image, shape)
    (image,) = promote_dtypes_inexact(image)
    dims = [k for k in range(image.ndim) if image.shape[k] != shape[k]]
    scale = [snp.asarray(shape[k] / image.shape[k] if shape[k] else 1.0) for k in dims]
    shift = [snp.zeros(()) for _ in dims]
    return _resample(image, shape, dims, scale, shift, method, antialias, precision)


_resize = jit(_resize_whole, static_argnums=(1, 2, 3, 4))


def scale_and_translate(
    image: Any,
    shape: Sequence[int],
    spatial_dims: Sequence[int],
    scale: Any,
    translation: Any,
    method: str | ResizeMethod,
    antialias: bool = True,
    precision: Any = lax.Precision.HIGHEST,
) -> Array:
    """Return the image scaled and moved: the place `x` of a dim comes to `x * scale + translation`.

    `image` is an array of any shape, and `shape` that of the result. `scale` and `translation` have
    a number for each of `spatial_dims`, and derivatives; places are those of the centers of pixels,
    0.5 for the first. Elements from outside of the image are 0. `method`, `antialias` and
    `precision` are those of `resize`. The result is floating. Raises `ShapeError` if the number of
    dims differs, `DimensionError` for dims that the image has not, and `ArgumentError` for NEAREST.

    >>> x = np.array([1.0, 2.0, 3.0])
    >>> spmd.image.scale_and_translate(x, (3,), (0,), np.ones(1), np.ones(1), "linear")
    Array([0., 1., 2.], dtype=float32)
    """
    what = "image.scale_and_translate"
    image, sizes, method = _read(what, image, shape, method)
    if method is ResizeMethod.NEAREST:
        raise ArgumentError(f"{current_source()}: {what}: has no NEAREST; resize has")
    (image,) = promote_dtypes_inexact(image)
    scale, translation = promote_dtypes_inexact(scale, translation)
    dims = [_dim(what, d, image) for d in spatial_dims]
    for name, given in (("scale", scale), ("translation", translation)):
        if given.shape != (len(dims),):
            raise ShapeError(
                f"{current_source()}: {what}: {name} is {typeof(given)}, and spatial_dims has "
                f"{len(dims)} dims: it must be a vector of as many numbers"
            )
    return _resample(image, sizes, dims, scale, translation, method, antialias, precision)


def _dim(what: str, dim: int, image: Any) -> int:
    if not -image.ndim <= dim < image.ndim:
        raise DimensionError(
            f"{current_source()}: {what}: spatial_dims has {dim}, and {typeof(image)} has "
            f"{image.ndim} dims"
        )
    return dim % image.ndim
