"""Collectives between GPUs: of one process by copies and kernels, of several ranks by NCCL."""
