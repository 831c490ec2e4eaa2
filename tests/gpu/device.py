"""Where Triton kernels are tested: on a GPU, or without one in Triton's interpreter. Import this before any kernel."""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="the GPU engine needs Triton: make test-kernels installs it")

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# The interpreter multiplies bf16 as if it were integers and rounds to it by cutting off.
HALF = torch.bfloat16 if HAS_GPU else torch.float16
only_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: graphs, bf16 products and memory are CUDA's own")
