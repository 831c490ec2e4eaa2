"""What Cohort adds to the workers of vLLM: a repair of new weights on a CPU.

vLLM's servers import this file alone, by its own name, in an environment that need not have Cohort. So it imports
nothing but the standard library.
"""

from __future__ import annotations

from typing import Any


def pack_tied_head(worker: Any) -> None:
    """Makes vLLM's packed copy of a head again that is the embedding itself, in the process of a vLLM worker.

    On a CPU vLLM computes with packed copies of its matrices. With new weights it packs those that it loads, and it
    loads no tied head: that would stay as it was. Elsewhere there are no such copies, and nothing is done.
    """
    head = getattr(worker.get_model(), "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


class Extension:
    """Methods that vLLM gives to its workers (`--worker-extension-cls cohort_worker.Extension`)."""

    def pack_tied_head(self) -> None:
        """Packs a tied head again: see the function of this name."""
        pack_tied_head(self)
