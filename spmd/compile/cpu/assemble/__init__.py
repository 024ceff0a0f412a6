"""From a schedule of steps to a program of native code."""
