"""Elementary functions on vectors, as LLVM IR text."""
