"""The device on which Triton kernels are tested: a GPU, or without one the CPU with Triton's interpreter.

Import this module before any kernel, because it turns the interpreter on.
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="the GPU engine needs Triton: make test-kernels installs it")

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# The interpreter multiplies bf16 numbers as if they were integers, and truncates where it should round to bf16.
HALF = torch.bfloat16 if HAS_GPU else torch.float16
only_gpu = pytest.mark.skipif(
    not HAS_GPU, reason="needs a GPU: the interpreter has no graphs, bf16 products or GPU memory"
)
