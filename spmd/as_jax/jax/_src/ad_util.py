"""`jax._src.ad_util`: zeros of tangents, sums of cotangents."""

from spmd.core.primitive import Zero
from spmd.core.structural import add_any as add_jaxvals
from spmd.core.structural import add_any_p as add_jaxvals_p
from spmd.core.structural import zeros_like_aval
from spmd.lax.convert import stop_gradient_p

add_any_p = add_jaxvals_p

__all__ = [
    "Zero",
    "add_any_p",
    "add_jaxvals",
    "add_jaxvals_p",
    "stop_gradient_p",
    "zeros_like_aval",
]
