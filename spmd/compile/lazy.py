"""The back half of the compiler, imported when the first program is compiled.

Lowering, kernels, the renderer and the runtime are half of what `import spmd` would load, and a
program that only asks for its rank needs none of it. The modules of the front half
(`dispatch/`) reach the back half through the objects here, and in no other way. What makes
programs is apart from what loads and runs them: `pipeline` (the passes) and `build` (the rest)
are imported by the first program that no earlier process left on the disk.
"""

from __future__ import annotations

from spmd.base.lazy_import import Deferred

elementwise = Deferred("spmd.compile.expressions.scalar_ops")
build = Deferred("spmd.compile.executable.build")
warm_up = Deferred("spmd.compile.cpu.assemble.warm_up")
executable = Deferred("spmd.compile.executable.executable")
eager_kernels = Deferred("spmd.compile.dispatch.eager_kernels")
mesh_fast_call = Deferred("spmd.compile.dispatch.mesh_fast_call")
select = Deferred("spmd.compile.executable.select")
fast_call = Deferred("spmd.compile.dispatch.fast_call")
mesh_executable = Deferred("spmd.compile.executable.mesh_executable")
merge_shard_maps = Deferred("spmd.compile.passes.merge_shard_maps")
pipeline = Deferred("spmd.compile.passes.pipeline")
memory_analysis = Deferred("spmd.compile.executable.memory_analysis")
cost_model = Deferred("spmd.compile.schedule.cost_model")
