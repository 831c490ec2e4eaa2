"""Engines: they turn requests into samples. `base` has the protocol, `factory` makes an engine from its settings."""
