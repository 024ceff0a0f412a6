"""The words of random programs: names of functions, constants, dtypes and special points.

All names are JAX's; a program finds them in both libraries: `np` is `numpy` of the library, `j` the
library itself, `special` its `scipy.special`, `sparse` its `scipy.sparse.linalg`.
"""

from __future__ import annotations

# Without (log_)softmax: those of JAX subtract unsigned integers, which wrap.
ELEMENTWISE = """
np.sin np.cos np.tan np.tanh np.exp np.exp2 np.expm1 np.log np.log1p np.log2 np.log10 np.sqrt
np.abs np.cbrt np.sign np.floor np.ceil np.round np.rint np.trunc np.square np.reciprocal
np.negative np.isnan np.isfinite np.isinf np.isposinf np.isneginf np.signbit np.spacing np.i0
np.sinc np.arctan np.arcsin np.arccos np.arcsinh np.arccosh np.arctanh np.sinh np.cosh np.deg2rad
np.degrees np.nan_to_num np.conj np.real np.imag np.angle np.logical_not np.invert np.fabs
np.positive np.iscomplex np.isreal np.bitwise_count np.unwrap np.fix
special.i0 special.i0e special.i1 special.i1e special.gammaln special.gamma special.digamma
special.erf special.erfc special.erfinv special.expit special.logit special.log_ndtr special.ndtr
special.ndtri special.entr special.expi special.exp1 special.spence special.factorial
special.expit special.expit
nn.relu nn.relu6 nn.softplus nn.gelu nn.silu nn.elu nn.selu nn.celu nn.leaky_relu nn.hard_tanh
nn.sigmoid nn.log_sigmoid nn.soft_sign nn.hard_sigmoid nn.hard_silu nn.mish nn.squareplus
nn.relu nn.relu nn.standardize nn.sparse_plus
lax.rsqrt lax.logistic lax.is_finite lax.population_count lax.clz lax.sign lax.erf_inv lax.cbrt
lax.round lax.bessel_i0e lax.bessel_i1e lax.lgamma lax.digamma lax.erf lax.exp2 lax.tan
lax.stop_gradient lax.neg
""".split()

# JAX's derivatives of these are NaN or 0 at poles, ends of domains and infinities; ours are limits.
ROUGH = """
special.gammaln special.gamma special.digamma special.logit special.ndtri special.entr special.expi
special.exp1 special.spence special.factorial special.erfinv lax.erf_inv lax.lgamma lax.digamma
special.i1 special.i1e lax.bessel_i1e special.i0 special.i0e np.i0 lax.bessel_i0e
""".split()

# Without nextafter: JAX takes floats that are too small to be normal for 0.
BINARY = """
np.add np.subtract np.multiply np.divide np.true_divide np.maximum np.minimum np.fmax np.fmin
np.remainder np.mod np.fmod np.floor_divide np.arctan2 np.hypot np.copysign
np.logaddexp np.logaddexp2 np.power np.float_power np.heaviside np.ldexp np.gcd np.lcm
np.bitwise_and np.bitwise_or np.bitwise_xor np.left_shift np.right_shift np.logical_and
np.logical_or np.logical_xor np.equal np.not_equal np.less np.greater_equal np.isclose
special.xlogy special.xlog1py special.rel_entr special.kl_div special.betaln special.gammainc
special.gammaincc special.poch special.zeta lax.rem lax.max lax.atan2 lax.pow
lax.shift_right_logical
""".split()

# JAX's are NaN at a first parameter of 0, and numbers at infinities and below 1; SciPy's and ours
# are the other way round.
INSIDE_THEIR_DOMAIN = """
special.gammainc special.gammaincc special.zeta special.poch special.betaln
""".split()

# The remainder decides what is rounded down: that is a matter of the last bit.
INSIDE_BODIES = "+ - * / % ** + -".split()

INFIX = "+ - * / // % ** + - * % // < > <= == != & | ^ << >>".split()

# Bodies of maps and loops stay bounded.
SMOOTH = "np.sin np.cos np.tanh np.arctan np.abs np.square nn.sigmoid nn.relu np.negative".split()

REDUCTIONS = """
np.sum np.mean np.prod np.max np.min np.any np.all np.std np.var np.argmax np.argmin np.median
np.nanmax np.nansum np.nanmean np.ptp np.count_nonzero special.logsumexp nn.logsumexp
np.nanargmax np.nanmedian np.linalg.norm np.average
""".split()

RUNNING = """
np.cumsum np.cumprod lax.cumsum lax.cumprod lax.cummax lax.cummin lax.cumlogsumexp np.sort
np.argsort np.nancumsum np.diff np.flip np.gradient
""".split()

DTYPES = "float32 bfloat16 float16 int32 int8 uint8 uint16 int16 uint32 bool".split()
WIDE_DTYPES = "float64 int64 uint64 float32 int32 float16".split()

LITERALS = "0 1 2 3 -1 5 0.0 1.0 2.5 0.5 .25 -1.0 1e-3 70000 True False np.pi 1.001".split()

# Rank 0, made while tracing: strong and weak types, and numbers at the ends of their ranges.
CONSTANTS = """
np.ones((),'int32') np.zeros((),'int8') np.ones((),'bfloat16') np.full((),3) np.full((),2.5)
np.zeros(()) np.float32(2.5) np.int8(3) np.uint8(200) np.float16(0.5) np.bool_(True)
np.uint32(2**31) np.uint32(2998342421) np.array(4294967295,dtype='uint32') np.asarray(2.5)
lax.convert_element_type(4294967295,np.uint32) np.array(65535,'uint16') np.array(3) np.array(True)
np.bfloat16(1.5) np.ones((),'float16') np.arange(3)[1] np.full((),7,'uint8') np.asarray(2)
np.array(-128,'int8') np.zeros((),bool) np.ones((1,)).reshape(()) np.array([2.5,1.5])[1]
""".split()
WIDE_CONSTANTS = ["np.uint64(2**63)", "np.array(2**40)", "np.float64(0.1)", "np.asarray(2**62)"]

# Where functions are tied, have kinks, poles, ends of their domains, or remainders of 0.
POINTS = [0.0, 0.0, 1.0, -1.0, 0.5, -0.5, 0.25, 2.0, -2.0, 1.5, 3.0, -0.0]
EXTREMES = [float("inf"), float("-inf"), float("nan")]

SAMPLERS = """
normal uniform laplace cauchy logistic gumbel exponential rademacher maxwell double_sided_maxwell
""".split()

# JAX's own pmax over devices ignores NaNs, under vmap it does not.
COLLECTIVES = """
lax.psum(E,"i") lax.pmean(E,"i") lax.pmax(np.nan_to_num(E),"i") lax.pmin(np.nan_to_num(E),"i")
lax.axis_index("i") lax.all_gather(E,"i").sum(0) lax.psum(1,"i")
lax.ppermute(E,"i",[(0,1),(1,0)]) lax.all_gather(E,"i")[1]
""".split()
