"""The native code of entry points and pytree walks, as LLVM IR text."""
