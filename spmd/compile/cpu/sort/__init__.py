"""Sorting as native code."""
