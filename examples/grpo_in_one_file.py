"""GRPO in one file: a language model learns arithmetic by trying, on a CPU, in minutes.

    python examples/grpo_in_one_file.py --steps 30

One step of group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300):

1. Sample a group of answers to each problem.
2. Score every answer with a program: 1 if the number is right, else 0.
3. The advantage of an answer is how much better it is than the others of its group. There is no value network and no
   reward model.
4. Make the tokens of better answers more likely and those of worse answers less likely, in small steps.

Read it from the end: `train` is the loop, `compute_loss` and `compute_advantages` are the algorithm, and everything
else is a plain Llama. It needs torch, safetensors and tokenizers. Of the cohort package it uses only the files of the
`tiny` model. A test checks that the package computes the same log-probabilities, advantages, loss and gradients.

Letters: B sequences, T tokens, V vocabulary, d hidden size, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

MODEL = Path(__file__).resolve().parents[1] / "src" / "cohort" / "models" / "tiny"
# <|im_end|>, the token with which the model ends its answer.
END = 2
# The relative change of a token's probability beyond which the token has no gradient any more.
CLIP = 0.2

# ---- the model: a Llama. Modules have the names of the weight file, so that weights can be loaded by name.

Cache = dict[int, tuple[Tensor, Tensor]]
"""Layer -> keys and values of all tokens so far, [B, K, T, D] each."""


def rotate(x: Tensor, start: int, theta: float) -> Tensor:
    """Returns x [B, heads, T, D] with rotary position embedding. Its first token is at position `start`."""
    T, D = x.shape[-2:]
    # Angles are float32 for every type of weights, because the models were trained like that.
    freq = 1 / (theta ** (torch.arange(0, D, 2, dtype=torch.float64) / D)).float()  # [D/2]
    angle = torch.arange(start, start + T).float()[:, None] * freq  # [T, D/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # the two halves are the coordinates that turn
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key-value head."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.H = c["num_attention_heads"]
        self.K = c["num_key_value_heads"]
        self.D = c["head_dim"]
        self.theta = c["rope_theta"]
        self.q_proj = nn.Linear(c["hidden_size"], self.H * self.D, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], self.K * self.D, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], self.K * self.D, bias=False)
        self.o_proj = nn.Linear(self.H * self.D, c["hidden_size"], bias=False)

    def forward(self, x: Tensor, cache: Cache, layer: int) -> Tensor:
        """Returns the output [B, T, d] for x [B, T, d]. Adds the keys and values of x to the cache of this layer."""
        B, T, _ = x.shape
        # The number of tokens in the cache, which come before those of x.
        start = cache[layer][0].shape[2] if layer in cache else 0
        q = self.q_proj(x).view(B, T, self.H, self.D).transpose(1, 2)  # [B, H, T, D]
        k = self.k_proj(x).view(B, T, self.K, self.D).transpose(1, 2)  # [B, K, T, D]
        v = self.v_proj(x).view(B, T, self.K, self.D).transpose(1, 2)
        q, k = rotate(q, start, self.theta), rotate(k, start, self.theta)
        if layer in cache:
            k, v = (torch.cat(pair, dim=2) for pair in zip(cache[layer], (k, v), strict=True))  # [B, K, start + T, D]
        cache[layer] = k, v
        shared = self.H // self.K  # query heads that read the same keys and values
        scores = q @ k.repeat_interleave(shared, dim=1).transpose(-1, -2) / math.sqrt(self.D)
        future = torch.ones(T, start + T, dtype=torch.bool).triu(start + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)  # [B, H, T, start + T]
        mixed = weights @ v.repeat_interleave(shared, dim=1)  # [B, H, T, D]
        return self.o_proj(mixed.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [B, T, d] for x [B, T, d]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The modules of one layer. `Llama.forward` calls them."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.mlp = FeedForward(c)


class Llama(nn.Module):
    """A Llama whose output matrix is its embedding."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Returns the logits [B, T, V] of the token after each of `tokens` [B, T]. The tokens continue the cache."""
        cache = {} if cache is None else cache
        x = self.embed_tokens(tokens)  # [B, T, d]
        for i, layer in enumerate(self.layers):
            x = x + layer.self_attn(layer.input_layernorm(x), cache, i)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return F.linear(self.norm(x), self.embed_tokens.weight)


def load_model(dtype: torch.dtype = torch.float32) -> Llama:
    """Returns the bundled model with its weights."""
    model = Llama(json.loads((MODEL / "config.json").read_text(encoding="utf-8")))
    weights = load_file(MODEL / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
    return model.to(dtype)


# ---- the task: an expression of two or three numbers, and a program that decides whether an answer is right

PHRASINGS = ("What is {}?", "Compute {}.", "Calculate {}.", "Find {}.", "{} = ?")


def make_problem(rng: random.Random) -> tuple[str, int]:
    """Returns a question and its answer, for example ("What is 12+7*3?", 33)."""
    while True:
        numbers = [rng.choice([rng.randint(1, 9), rng.randint(10, 99)]) for _ in range(rng.randint(2, 3))]
        text = str(numbers[0])
        terms = [numbers[0]]
        for number in numbers[1:]:
            operator = rng.choice("+-*")
            text += f"{operator}{number}"
            # A product is part of the term before it: products come before sums.
            if operator == "*":
                terms[-1] *= number
            else:
                terms.append(number if operator == "+" else -number)
        if abs(sum(terms)) <= 999:
            return rng.choice(PHRASINGS).format(text), sum(terms)


def encode_prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    """Returns the tokens of a question in the chat format of the model, up to where the model begins to write."""
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text, add_special_tokens=False).ids


def grade(text: str, answer: int) -> float:
    """Returns 1 if the last <answer>...</answer> in `text` is the number `answer`, else 0. Thoughts do not count."""
    answers = re.findall(r"<answer>([^<]*)</answer>", text)
    return float(bool(answers) and answers[-1].strip() == str(answer))


# ---- sampling: one group at a time. All its samples begin with the same prompt, so no padding is needed.


@dataclass
class Group:
    """A prompt, n completions of it and their rewards."""

    prompt: list[int]
    # n lists of token ids, with the end token.
    completions: list[list[int]]
    # The log-probabilities [n, T] of these tokens when they were sampled.
    sampler_logprobs: Tensor
    rewards: list[float]
    # The same, computed by `add_gradients` before the first update. They differ from the sampler's by rounding.
    old_logprobs: Tensor | None = None


def make_token_mask(completions: list[list[int]]) -> Tensor:
    """Returns True [n, T] where a completion has a token. T is the longest completion; shorter ones end before."""
    lengths = torch.tensor([len(c) for c in completions])
    return torch.arange(int(lengths.max())) < lengths[:, None]


@torch.no_grad()
def sample_completions(model: Llama, prompt: list[int], n: int, max_tokens: int) -> tuple[list[list[int]], Tensor]:
    """Samples at temperature 1. Returns (n completions, log-probabilities [n, T] of their tokens, 0 after the end)."""
    tokens = torch.tensor([prompt] * n)  # [n, prompt]
    cache: Cache = {}
    drawn: list[Tensor] = []
    logprobs: list[Tensor] = []
    ended = torch.zeros(n, dtype=torch.bool)
    while len(drawn) < max_tokens and not ended.all():
        logp = F.log_softmax(model(tokens, cache)[:, -1], dim=-1)  # [n, V]
        tokens = torch.multinomial(logp.exp(), 1)  # [n, 1]
        drawn.append(tokens)
        logprobs.append(logp.gather(1, tokens))
        ended |= tokens[:, 0] == END
    rows = torch.cat(drawn, dim=1).tolist()
    # A sample that ended before the others of its group has further tokens after its end. They are cut off.
    completions = [row[: row.index(END) + 1] if END in row else row for row in rows]
    return completions, torch.cat(logprobs, dim=1).masked_fill(~make_token_mask(completions), 0.0)


def sample_group(model: Llama, tokenizer: Tokenizer, problem: tuple[str, int], n: int, max_tokens: int) -> Group:
    """Returns n completions of a problem (question, answer) with their rewards."""
    question, answer = problem
    prompt = encode_prompt(tokenizer, question)
    completions, logprobs = sample_completions(model, prompt, n, max_tokens)
    return Group(prompt, completions, logprobs, [grade(tokenizer.decode(c), answer) for c in completions])


# ---- the algorithm


def compute_advantages(rewards: list[float]) -> list[float]:
    """Returns how much better each sample is than the mean of its group, in standard deviations of the group."""
    # Equal rewards teach nothing. Their computed deviation is not always 0: rounding can make it 1e-17.
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    # With 1e-4, rewards that differ only by rounding give tiny advantages.
    return [c / (std + 1e-4) for c in centred]


def compute_logprobs(model: Llama, group: Group) -> Tensor:
    """Returns the log-probabilities [n, T] of a group's completions, 0 after their ends."""
    mask = make_token_mask(group.completions)
    start = len(group.prompt)
    # Padding on the right changes nothing, because no token sees those after it.
    rows = [group.prompt + c + [END] * (mask.shape[1] - len(c)) for c in group.completions]
    tokens = torch.tensor(rows)  # [n, prompt + T]
    # A token is predicted at the position of the token before it.
    logits = model(tokens[:, :-1])[:, start - 1 :]  # [n, T, V]
    logprobs = F.log_softmax(logits, dim=-1).gather(2, tokens[:, start:, None])[..., 0]
    return logprobs.masked_fill(~mask, 0.0)


def compute_loss(logprobs: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, num_samples: int) -> Tensor:
    """Returns the part of one group in the loss, which is the mean over all samples of the mean over their tokens.

    logprobs, old and mask are [n, T], advantage is [n], and num_samples counts the samples of all groups. The minimum
    removes the gradient of a token whose probability has already changed by CLIP in the desired direction.
    """
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    terms = -torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    means = (terms * mask).sum(dim=1) / mask.sum(dim=1)  # [n]
    return means.sum() / num_samples


def add_gradients(model: Llama, groups: list[Group]) -> float:
    """Adds the gradients of the loss to the parameters, one group in memory at a time. Returns the loss."""
    # Groups without a gradient count too: their part of the mean is 0.
    num_samples = sum(len(g.rewards) for g in groups)
    total = 0.0
    for group in groups:
        # All right or all wrong: the gradient is exactly 0.
        if not any(compute_advantages(group.rewards)):
            continue
        logprobs = compute_logprobs(model, group)
        # In the first update on a group the ratio is exactly 1.
        if group.old_logprobs is None:
            group.old_logprobs = logprobs.detach()
        advantage = torch.tensor(compute_advantages(group.rewards), dtype=logprobs.dtype)
        loss = compute_loss(logprobs, group.old_logprobs, advantage, make_token_mask(group.completions), num_samples)
        loss.backward()
        total += loss.item()
    return total


def train(steps: int, prompts: int, samples: int, max_tokens: int, epochs: int, lr: float, seed: int) -> list[float]:
    """Trains the bundled model and prints one line per step. Returns the mean reward of each step."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    history: list[float] = []
    model = load_model()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 3))
    for step in range(1, steps + 1):
        began = time.perf_counter()
        problems = [make_problem(rng) for _ in range(prompts)]
        groups = [sample_group(model, tokenizer, problem, samples, max_tokens) for problem in problems]
        # After the first epoch the ratio is no longer 1, and the clip has an effect.
        for _ in range(epochs):
            optimizer.zero_grad()
            add_gradients(model, groups)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            # Parameters without a gradient stay unchanged, so a step without any signal changes nothing.
            optimizer.step()
            warmup.step()
        rewards = [r for g in groups for r in g.rewards]
        history.append(sum(rewards) / len(rewards))
        trained = [g for g in groups if g.old_logprobs is not None]
        gap = max((float((g.old_logprobs - g.sampler_logprobs).abs().max()) for g in trained), default=math.nan)
        bar = "#" * round(40 * history[-1])
        seconds = time.perf_counter() - began
        line = f"step {step:3}  reward {history[-1]:.3f} {bar:40}  groups with signal {len(trained):2}/{prompts}"
        print(f"{line}  sampler gap {gap:.0e}  {seconds:.1f}s", flush=True)
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the bundled model on arithmetic with GRPO.")
    parser.add_argument("--steps", type=int, default=30, help="training steps (%(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="problems per step (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="answers to each problem: the group (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer (%(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="updates on each step's answers (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of problems and samples (%(default)s)")
    train(**vars(parser.parse_args()))
