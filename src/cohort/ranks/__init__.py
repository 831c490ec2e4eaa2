"""Several processes that train together: starting and joining them, moving groups among them, leading and following."""
