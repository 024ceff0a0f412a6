"""The CUDA renderer: kernels of the kernel IR as CUDA C++, compiled by NVRTC; nothing is launched.

It shares the IR, the fusion pass and the lowering table with the CPU, and never imports `cpu`.
"""
