"""Native code that CPython calls: entry points of programs, and walks over pytrees."""
