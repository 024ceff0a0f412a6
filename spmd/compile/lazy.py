"""Modules of the compiler that are imported when they are first used: all of them in one table.

Lowering, kernels, the renderer and the runtime are half of what `import spmd` would load, and a
program that only asks for its rank needs none of it. `from spmd.compile.lazy import pipeline` gives
an object that imports the module when one of its attributes is asked for.
"""

from __future__ import annotations

from spmd.base.lazy_import import Deferred

# From the front half (`dispatch/`) to the back half: imported by the first program.
argument_checks = Deferred("spmd.compile.dispatch.argument_checks")
compiler = Deferred("spmd.compile.native.llvm.compiler")
elementwise = Deferred("spmd.compile.expressions.scalar_ops")
executable = Deferred("spmd.compile.executable.executable")
device_orders = Deferred("spmd.compile.executable.device_orders")
eager_kernels = Deferred("spmd.compile.dispatch.eager_kernels")
fast_call = Deferred("spmd.compile.dispatch.fast_call")
key_uses = Deferred("spmd.lax.keys.calls")
mesh_executable = Deferred("spmd.compile.executable.mesh_executable")
mesh_fast_call = Deferred("spmd.compile.dispatch.mesh_fast_call")
redistribute = Deferred("spmd.compile.executable.redistribute")
select = Deferred("spmd.compile.executable.select")
stateful = Deferred("spmd.compile.dispatch.stateful")

# Modules that make programs: imported by the first program that is not on the disk.
build = Deferred("spmd.compile.executable.build")
cpu_assemble = Deferred("spmd.compile.cpu.assemble.assemble")
cuda_assemble = Deferred("spmd.compile.cuda.assemble")
cuda_backend = Deferred("spmd.compile.executable.cuda_backend")
cuda_exchange = Deferred("spmd.compile.cuda.collectives.rank_exchange")
cuda_fast_call = Deferred("spmd.compile.dispatch.cuda_fast_call")
cuda_driver = Deferred("spmd.compile.cuda.driver")
cuda_kernel = Deferred("spmd.compile.cuda.kernel")
cuda_moves = Deferred("spmd.compile.executable.cuda_moves")
cuda_numbers = Deferred("spmd.compile.cuda.collectives.rank_numbers")
cuda_nvrtc = Deferred("spmd.compile.cuda.nvrtc")
cuda_sharing = Deferred("spmd.compile.executable.cuda_sharing")
definitions = Deferred("spmd.compile.definitions.all")
encode = Deferred("spmd.compile.native.program.encode")
fourier = Deferred("spmd.compile.definitions.fourier")
factor_plan = Deferred("spmd.compile.cpu.linalg.plan")
factor_rules = Deferred("spmd.compile.lower.linalg")
fourier_plan = Deferred("spmd.compile.cpu.fourier.plan")
lapack = Deferred("spmd.lax.linalg.lapack")
partition = Deferred("spmd.partition.write")
process_program = Deferred("spmd.compile.executable.process_program")
unasked = Deferred("spmd.partition.unasked")
lowering = Deferred("spmd.compile.lower.lowering")
maps = Deferred("spmd.compile.passes.vectorize_maps")
series = Deferred("spmd.compile.definitions.series")
small_matrices = Deferred("spmd.compile.definitions.small_matrices")
pipeline = Deferred("spmd.compile.passes.pipeline")
widen_small = Deferred("spmd.compile.passes.widen_small")

# Modules that compile code, and write the text of the runtime: for the first process on a machine.
background_compile = Deferred("spmd.compile.native.llvm.background_compile")
sharing = Deferred("spmd.compile.native.llvm.modules")
entry_point_ir = Deferred("spmd.compile.native.cpython.ir.entry_point")
runtime_ir = Deferred("spmd.compile.native.runtime.ir.modules")
tree_walks_ir = Deferred("spmd.compile.native.cpython.ir.tree_unflatten")

# Drivers of GPUs: CuPy's, and the emulator with its translator, for kernels whose native code is
# not on the disk.
cuda_cupy = Deferred("spmd.compile.cuda.driver_cupy")
cuda_emulator = Deferred("spmd.compile.cuda.emulator.driver")
read_ptx = Deferred("spmd.compile.cuda.emulator.ptx")
translate_ptx = Deferred("spmd.compile.cuda.emulator.translate")

# Modules that look into programs.
allocator = Deferred("spmd.compile.native.runtime.allocator")
async_queue = Deferred("spmd.compile.native.runtime.async_queue")
cost_model = Deferred("spmd.compile.schedule.cost_model")
replicas = Deferred("spmd.collectives.replicas")
memory_check = Deferred("spmd.compile.schedule.memory_check")
memory_analysis = Deferred("spmd.compile.executable.memory_analysis")
