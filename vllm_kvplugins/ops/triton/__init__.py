"""Triton kernels; imported only where tensors lie on a GPU."""
