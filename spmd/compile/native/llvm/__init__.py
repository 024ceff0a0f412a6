"""From LLVM IR text to addresses: builders, modules, compiler, linker, object cache."""
