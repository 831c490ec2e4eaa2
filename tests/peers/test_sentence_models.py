"""Our vectors of texts against those of transformers and sentence-transformers, with the model of the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers

from cohort.tasks.search.dense.folder import locate_model
from cohort.tasks.search.dense.model import SentenceModel
from cohort.tasks.search.dense.processes import EmbeddingProcess
from cohort.tasks.search.task import SearchQA
from tests.helpers.sentence_models import write_model

TEXTS = (
    "In what country is Normandy located?",
    "Normans\nThe Normans were the people who in the 10th and 11th centuries gave their name to Normandy.",
    "?",
    "La Marca de Satanás, 東京 and Țerova\u0301 \0 \ud800",
    "one [SEP] two ##ing",
    "river " * 1000,
)


def clean(text: str) -> str:
    """The text as Rust takes it: half characters are question marks."""
    return text.encode("utf-8", "replace").decode()


def compute_with_transformers(folder: Path, text: str, max_tokens: int) -> np.ndarray:
    """The mean of the last layer, of length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer(clean(text), return_tensors="pt", truncation=True, max_length=max_tokens)
    with torch.inference_mode():
        vector = model(**inputs).last_hidden_state[0].mean(dim=0).numpy()
    return vector / np.linalg.norm(vector)


def test_the_vectors_are_those_of_transformers() -> None:
    folder = locate_model("")
    model = SentenceModel(folder)
    assert (model.about.num_layers, model.about.width, model.about.max_tokens) == (6, 384, 256)
    for text in TEXTS:
        wanted = compute_with_transformers(folder, text, 256)
        np.testing.assert_allclose(model.embed(text, "passage"), wanted, atol=2e-6, err_msg=text[:40])


def test_the_vectors_are_those_of_sentence_transformers() -> None:
    folder = locate_model("")
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    model = SentenceModel(folder)
    for text in TEXTS:
        wanted = theirs.encode(clean(text), normalize_embeddings=True)
        np.testing.assert_allclose(model.embed(text, "query"), wanted, atol=2e-6, err_msg=text[:40])


@pytest.mark.parametrize("mode", ["cls", "mean"])
def test_prompts_pooling_and_length_are_read_as_sentence_transformers_reads_them(tmp_path: Path, mode: str) -> None:
    """A folder that sentence-transformers itself saved, with what E5 and BGE have."""
    folder = write_model(tmp_path / "bert", files={"tokenizer_config.json": {"tokenizer_class": "BertTokenizerFast"}})
    words = sentence_transformers.models.Transformer(str(folder), max_seq_length=12)
    pooling = sentence_transformers.models.Pooling(words.get_embedding_dimension(), pooling_mode=mode)
    prompts = {"query": "query: ", "document": "passage: "}
    whole = sentence_transformers.SentenceTransformer(modules=[words, pooling], prompts=prompts, device="cpu")
    whole.save(str(tmp_path / "saved"))
    model = SentenceModel(tmp_path / "saved")
    assert model.about.pooling == mode and model.about.max_tokens == 12
    for text in ("the river", "who named the town", "tea ink " * 20):
        wanted = whole.encode_query(text, normalize_embeddings=True)
        np.testing.assert_allclose(model.embed(text, "query"), wanted, atol=2e-6)
        wanted = whole.encode_document(text, normalize_embeddings=True)
        np.testing.assert_allclose(model.embed(text, "passage"), wanted, atol=2e-6)


def test_a_process_of_its_own_gives_the_same_vectors_as_one_with_many_threads() -> None:
    folder = locate_model("")
    process = EmbeddingProcess(folder)
    model = SentenceModel(folder)
    for text in TEXTS:
        np.testing.assert_allclose(process.embed_query(text), model.embed(text, "query"), atol=1e-6)
        assert (process.embed_query(text) == process.embed([text], "query")[0]).all()
    process.close()


def test_meanings_are_found_where_no_word_is_in_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path))
    (tmp_path / "p.jsonl").write_text(
        '{"id": 1, "text": "The physician cured her illness."}\n{"id": 2, "text": "Trains depart from the station."}\n'
    )
    for match in ("dense", "both"):
        task = SearchQA(passages=(str(tmp_path / "p.jsonl"),), context="tool", match=match, top_k=1)
        assert "physician" in task.search("a doctor healed a sick woman")
    assert "No passage" in SearchQA(passages=(str(tmp_path / "p.jsonl"),)).search("a doctor healed a sick woman")
