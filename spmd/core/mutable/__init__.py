"""Mutable arrays: cells that hold a value, and functions that read and write them as pure ones."""
