"""A compiled program that takes and gives arrays, on one device or over a mesh."""
