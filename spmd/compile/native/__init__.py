"""What executes programs on the host, whatever computes their kernels."""
