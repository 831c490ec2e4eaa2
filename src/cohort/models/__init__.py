"""Models: the decoder, its adapters and kernels, and finding, fetching, reading and converting model files."""
