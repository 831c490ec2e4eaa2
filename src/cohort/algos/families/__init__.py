"""The algorithms, one module per family. Importing this package registers all of them."""

from cohort.algos.families import cispo, clipped, gmpo, gspo, pass_at_k, reinforce, sapo

__all__ = ["cispo", "clipped", "gmpo", "gspo", "pass_at_k", "reinforce", "sapo"]
