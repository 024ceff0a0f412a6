"""Elementwise groups as expressions: scalar operations, index maps, and the kernel."""
