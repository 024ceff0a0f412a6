"""A GPU without a GPU: the PTX that NVRTC makes, translated to LLVM IR and run on the CPU."""
