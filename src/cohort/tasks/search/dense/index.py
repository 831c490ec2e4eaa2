"""A search that compares vectors of a sentence model: alone, or together with the words.

Together, a passage counts its BM25 for the words as a share of that of the best passage, from 0 to 1, plus WEIGHT times
the cosine between its vector and that of the query. Both say how much better a passage is than another, which its place
in two rankings would not (arXiv:2210.11934 compares the two ways).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from cohort.tasks.search.dense.folder import locate_model
from cohort.tasks.search.dense.model import Array
from cohort.tasks.search.dense.processes import QueryEmbedder, open_embedder
from cohort.tasks.search.dense.vectors import open_vectors
from cohort.tasks.search.index import MAX_QUERY, Passage, PassageIndex, make_expression, open_index

# Chosen on the training questions of SQuAD (`benchmarks/search_recall.py`), from 0.5, 0.7, 1, 1.25, 1.5 and 2.
WEIGHT = 1.25


class DenseIndex:
    """An open index of passages with their vectors. Threads may share it."""

    def __init__(self, words: PassageIndex, vectors: Array, embedder: QueryEmbedder, with_words: bool) -> None:
        self._words = words
        self._vectors = vectors  # [passages, width]
        self._embedder = embedder
        self._with_words = with_words  # whether words count too

    def search(self, query: str, limit: int) -> list[Passage]:
        """Returns the `limit` passages that fit the query best, the best first; equally good ones in their order.

        The query is any text. The result is empty if it has no words.
        """
        if not make_expression(query):
            return []
        # Not a product of matrices: these would use several threads, and add up equal rows differently.
        vector = self._embedder.embed_query(query[:MAX_QUERY])
        scores = np.einsum("ij,j->i", self._vectors, vector)  # [passages]
        if self._with_words:
            scores = add_words(scores, self._words.rank(query))
        return self._words.fetch([int(place) + 1 for place in select_best(scores, limit)])

    def __len__(self) -> int:
        return len(self._vectors)


def add_words(cosines: Array, ranks: Mapping[int, float]) -> Array:
    """Returns the scores of all passages for their vectors and words together, of shape [passages].

    `cosines` are between the query and the passages. `ranks` has the BM25 of the passages that have any of its words,
    by their number, which begins with 1; the best is the smallest, and below 0.

    >>> add_words(np.array([0.5, 0.4, 0.2]), {2: -8.0, 3: -4.0}).tolist()
    [0.625, 1.5, 0.75]
    """
    scores: Array = WEIGHT * cosines
    best = min(ranks.values(), default=0.0)
    if best < 0:
        numbers = np.fromiter(ranks.keys(), np.int64, len(ranks))
        scores[numbers - 1] += np.fromiter(ranks.values(), scores.dtype, len(ranks)) / scores.dtype.type(best)
    return scores


def select_best(scores: Array, limit: int) -> Array:
    """Returns the places of the `limit` largest scores, the largest first, and equal ones in their order.

    >>> select_best(np.array([1.0, 3.0, 3.0, 2.0, 3.0]), 2).tolist()
    [1, 2]
    """
    if limit < len(scores):
        least = np.partition(scores, -limit)[-limit]
        # All that equal the least: which of them belong to the result is decided by their order.
        candidates = np.flatnonzero(scores >= least)
    else:
        candidates = np.arange(len(scores))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:limit]


@lru_cache(maxsize=8)
def open_dense_index(
    names: tuple[str, ...], columns: tuple[tuple[str, str], ...], embedder: str, with_words: bool
) -> DenseIndex:
    """Returns the index of all passages in some sources, with their vectors, which are made if the cache has none.

    `names` and `columns` are those of `open_index`, `embedder` is the folder of the sentence model, or "" for that of
    the package. Each call with the same arguments returns the same open index. Raises TaskError if the sources or the
    model cannot be used.
    """
    # What is missing is said before anything is computed.
    folder = locate_model(embedder)
    words = open_index(names, columns)
    vectors = open_vectors(words.list_texts(), folder)
    return DenseIndex(words, vectors, open_embedder(folder), with_words)
