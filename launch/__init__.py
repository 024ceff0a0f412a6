"""spmdrun: starts a program on many ranks, watches over it, and reports failures.

Installed as `spmd_launch`. The launcher itself needs the standard library only, so it works (and
reports) whatever state the program's environment is in; `selftest` runs spmd's transports.
"""
