"""Shardings and layouts in XLA's words, for programs that read or make them."""
