"""spmdrun: starts a program on many ranks, watches over it, and says what went wrong.

Installed as `spmd_launch`. The launcher itself needs the standard library only, so it works (and
reports) whatever state the program's environment is in; `selftest` runs spmd's transports.
"""
