"""The native engine on a GPU: whole decode steps as CUDA graphs over Triton kernels."""
