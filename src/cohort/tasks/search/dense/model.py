"""A sentence model: a BERT whose vectors for the tokens of a text become one vector for the text.

It is computed with numpy, for one text at a time and without padding, so that the vector of a text does not depend on
the texts around it. Scoring workers then need no torch, and a query takes about ten milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from cohort.errors import CohortError, TaskError
from cohort.tasks.search.dense.folder import FLAG, WEIGHTS, Kind, describe_model
from cohort.text.encoder import load_encoder

Array = np.ndarray
# The error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26): 1 - erf(z) = (a1 t + ... + a5 t^5) exp(-z^2),
# t = 1 / (1 + p z), for z >= 0.
_ERF_P = np.float32(0.3275911)
_ERF_A = [np.float32(a) for a in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)]
_HALF = np.float32(0.5)
_SQRT_HALF = np.float32(0.5**0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A matrix, as it is multiplied from the right, and what is added."""

    weight: Array  # [inputs, outputs]
    bias: Array  # [outputs]

    def apply(self, x: Array) -> Array:
        """Returns x W + b, of shape [tokens, outputs]."""
        out: Array = x @ self.weight
        out += self.bias
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """What scales and moves the normalised columns of a token."""

    weight: Array  # [width]
    bias: Array  # [width]
    epsilon: float

    def apply(self, x: Array) -> Array:
        """Returns x, of shape [tokens, width], with mean 0 and variance 1 per token, then scaled and moved."""
        centred = x - x.mean(axis=1, keepdims=True)
        variance = np.einsum("ij,ij->i", centred, centred) / np.float32(x.shape[1])  # [tokens]
        centred *= (1 / np.sqrt(variance + np.float32(self.epsilon)))[:, None]
        centred *= self.weight
        centred += self.bias
        return centred


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The weights of one layer."""

    attend: Linear  # [width, 3 width]: queries, keys and values
    attended: Linear
    attention_norm: Norm
    widen: Linear
    narrow: Linear
    output_norm: Norm


class SentenceModel:
    """Turns a text into a vector of length 1. For one thread only."""

    def __init__(self, folder: Path) -> None:
        """Reads the model in a folder. Raises TaskError if its files do not make up a model that can be computed."""
        self.about = describe_model(folder)
        try:
            self._encode = load_encoder(folder, self.about.max_tokens)
        except CohortError as error:
            raise TaskError(f"the sentence model in {folder} cannot be used: {error}") from error
        weights = _Weights(folder, self.about.epsilon)
        width, inner = self.about.width, self.about.inner_width
        self._words = weights.read_tensor("embeddings.word_embeddings.weight", None, width)
        positions = weights.read_tensor("embeddings.position_embeddings.weight", None, width)
        if len(positions) < self.about.max_tokens:
            raise TaskError(f"{folder / WEIGHTS} has {len(positions)} positions, fewer than config.json says")
        # Every token of a single text is of the first type.
        self._places = positions + weights.read_tensor("embeddings.token_type_embeddings.weight", None, width)[0]
        self._norm = weights.read_norm("embeddings.LayerNorm", width)
        self._layers = [
            weights.read_layer(f"encoder.layer.{number}", width, inner) for number in range(self.about.num_layers)
        ]

    def embed(self, text: str, kind: Kind) -> Array:
        """Returns the vector of a text, of shape [width], in float32 and of length 1."""
        ids = self._encode(self.about.prefixes[kind] + text)
        if max(ids) >= len(self._words):
            raise TaskError(
                f"tokenizer.json has the token {max(ids)}, for which {WEIGHTS} has no vector; correct {FLAG}"
            )
        x = self._norm.apply(self._words[ids] + self._places[: len(ids)])  # [tokens, width]
        for layer in self._layers:
            x = layer.attention_norm.apply(layer.attended.apply(self._attend(layer.attend.apply(x))) + x)
            x = layer.output_norm.apply(layer.narrow.apply(compute_gelu(layer.widen.apply(x))) + x)
        vector: Array = x.mean(axis=0) if self.about.pooling == "mean" else x[0]  # [width]
        return vector / np.sqrt(vector @ vector)

    def _attend(self, joined: Array) -> Array:
        """Returns what each token gathers from all tokens, [tokens, width], from its queries, keys and values."""
        num_tokens = len(joined)
        parts = joined.reshape(num_tokens, 3, self.about.num_heads, -1)  # [tokens, 3, heads, columns]
        queries, keys, values = parts.transpose(1, 2, 0, 3)  # each [heads, tokens, columns]
        scores = queries @ keys.transpose(0, 2, 1)  # [heads, tokens, tokens]
        scores *= np.float32(queries.shape[-1] ** -0.5)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return (scores @ values).transpose(1, 0, 2).reshape(num_tokens, -1)


def compute_gelu(x: Array) -> Array:
    """Returns x times the probability that a normal variable is below x, per element, in float32. Changes `x`.

    >>> compute_gelu(np.array([-1.0, 0.0, 1.0], np.float32)).round(4).tolist()
    [-0.1587..., 0.0, 0.841...]
    """
    size = np.abs(x)
    z = size * _SQRT_HALF
    t = 1 / (1 + _ERF_P * z)
    tail = t * _ERF_A[-1]
    for factor in reversed(_ERF_A[:-1]):
        tail += factor
        tail *= t
    z *= z
    np.negative(z, out=z)
    np.exp(z, out=z)
    # Now the probability of being above |x|.
    tail *= z
    tail *= _HALF
    tail *= size
    np.maximum(x, 0, out=x)
    x -= tail
    return x


class _Weights:
    """The tensors of a weight file, with their shapes checked when they are read."""

    def __init__(self, folder: Path, epsilon: float) -> None:
        self._file = folder / WEIGHTS
        self._epsilon = epsilon
        try:
            # Some files have the encoder as a part of a larger model.
            self._tensors = {name.removeprefix("bert."): value for name, value in load_file(self._file).items()}
        # TypeError, AttributeError: types that numpy does not have, such as bfloat16.
        except (OSError, SafetensorError, TypeError, AttributeError, KeyError) as error:
            raise TaskError(
                f"{self._file} cannot be read ({error}); restore the file, with weights in float32 or float16"
            ) from error

    def read_tensor(self, name: str, *shape: int | None) -> Array:
        """Returns a tensor in float32. None in `shape` stands for any number. Raises TaskError for another shape."""
        found = self._tensors.get(name)
        has_shape = found is not None and len(found.shape) == len(shape)
        if found is None or not has_shape or any(w not in (None, n) for w, n in zip(shape, found.shape, strict=True)):
            told = "x".join("N" if n is None else str(n) for n in shape)
            there = "none" if found is None else f"one of {'x'.join(map(str, found.shape))}"
            raise TaskError(
                f"{self._file} needs a tensor {name} of {told} numbers, as config.json says, and has {there}; "
                f"name the folder of a whole BERT with {FLAG}"
            )
        return found.astype(np.float32)

    def read_linear(self, names: list[str], num_inputs: int, num_outputs: int) -> Linear:
        """Returns matrices with the same inputs as one, with their outputs beside each other."""
        matrices = [self.read_tensor(f"{name}.weight", num_outputs, num_inputs) for name in names]
        biases = [self.read_tensor(f"{name}.bias", num_outputs) for name in names]
        return Linear(weight=np.ascontiguousarray(np.concatenate(matrices).T), bias=np.concatenate(biases))

    def read_norm(self, name: str, width: int) -> Norm:
        """Returns a normalisation."""
        weight, bias = self.read_tensor(f"{name}.weight", width), self.read_tensor(f"{name}.bias", width)
        return Norm(weight=weight, bias=bias, epsilon=self._epsilon)

    def read_layer(self, name: str, width: int, inner: int) -> Layer:
        """Returns the weights of a layer."""
        parts = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        return Layer(
            attend=self.read_linear(parts, width, width),
            attended=self.read_linear([f"{name}.attention.output.dense"], width, width),
            attention_norm=self.read_norm(f"{name}.attention.output.LayerNorm", width),
            widen=self.read_linear([f"{name}.intermediate.dense"], width, inner),
            narrow=self.read_linear([f"{name}.output.dense"], inner, width),
            output_norm=self.read_norm(f"{name}.output.LayerNorm", width),
        )
