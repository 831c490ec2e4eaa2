"""The learner: it turns batches into better weights. `base` has the protocol, `local` the implementation."""
