"""Continuous batching on the learner's own weights."""

from cohort.engines.native.engine import NativeEngine

__all__ = ["NativeEngine"]
