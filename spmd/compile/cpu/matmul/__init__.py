"""Matrix products and contractions over windows, as LLVM IR text and assembly."""
