"""Batches: plain arrays of samples, packed into microbatches, and tensors as bytes."""
