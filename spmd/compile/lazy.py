"""The back half of the compiler, imported when the first program is compiled.

Lowering, kernels, the renderer and the runtime are half of what `import spmd` would load, and a
program that only asks for its rank needs none of it. The modules of the front half (`jit`,
`dispatch`, `stages`) reach the back half through the objects here, and in no other way. What makes
programs is apart from what loads and runs them: `pipeline` (the passes) and `building` (the rest)
are imported by the first program that no earlier process left on the disk.
"""

from __future__ import annotations

from spmd.core.deferred import Deferred

elementwise = Deferred("spmd.compile.lower.elementwise")
building = Deferred("spmd.compile.building")
expected = Deferred("spmd.compile.expected")
executable = Deferred("spmd.compile.executable")
flat = Deferred("spmd.compile.flat")
mapcall = Deferred("spmd.compile.mapcall")
meshprogram = Deferred("spmd.compile.meshprogram")
nativecall = Deferred("spmd.compile.nativecall")
multidevice = Deferred("spmd.compile.multidevice")
onemap = Deferred("spmd.compile.onemap")
pipeline = Deferred("spmd.compile.pipeline")
usage = Deferred("spmd.compile.usage")
cost = Deferred("spmd.compile.cost")
