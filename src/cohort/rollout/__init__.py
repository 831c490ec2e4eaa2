"""Prompts into scored groups: see `producer`. Engines are seen only through `engines.base`."""
