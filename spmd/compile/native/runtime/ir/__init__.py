"""The native code of the runtime, as LLVM IR text."""
