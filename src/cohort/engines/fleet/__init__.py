"""Engines outside this process: replicas with weights of their own, which a `Fleet` makes one engine of."""
