"""Keyed randomness against the same arithmetic in Python's unlimited integers."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from cohort.engines.native.random import derive_random_stream, draw_uniforms
from cohort.types import Key

KEY = Key(seed=0, purpose="train", task="t", prompt_id="7", visit=0, sample=3)
WORD = (1 << 64) - 1


def reference_mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def reference_uniform(stream: int, position: int) -> float:
    bits = reference_mix((stream & WORD) ^ reference_mix((position + 0x9E3779B97F4A7C15) & WORD))
    return (bits >> 11) / (1 << 53)


def test_uniforms_equal_big_integers():
    streams = [
        0,
        1,
        -1,
        (1 << 63) - 1,
        -(1 << 63),
        derive_random_stream(KEY),
        derive_random_stream(replace(KEY, sample=4)),
    ]
    positions = [0, 1, 2, 1000, (1 << 31) + 7]
    pairs = [(s, p) for s in streams for p in positions]
    got = draw_uniforms(torch.tensor([s for s, _ in pairs]), torch.tensor([p for _, p in pairs]))
    assert got.dtype == torch.float64
    assert got.tolist() == [reference_uniform(s, p) for s, p in pairs]


def test_known_mix_value():
    # the finaliser of splitmix64: its first output for seed 0, as published with the generator
    assert reference_mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_stream_is_the_hash_of_the_written_fields():
    text = b'[0,"train","t","7",0,3]'
    digest = hashlib.blake2b(text, digest_size=8, person=b"cohort-stream").digest()
    assert derive_random_stream(KEY) == int.from_bytes(digest, "little", signed=True)


def test_every_field_of_the_key_matters():
    changed = [
        replace(KEY, seed=1),
        replace(KEY, purpose="eval"),
        replace(KEY, task="u"),
        replace(KEY, prompt_id="8"),
        replace(KEY, visit=1),
        replace(KEY, sample=4),
        replace(KEY, task='t","7', prompt_id=""),  # the encoding cannot be tricked by quotes
        replace(KEY, prompt_id="\ud800"),  # nor broken by text that is no valid unicode
    ]
    assert len({derive_random_stream(k) for k in [KEY, *changed]}) == len(changed) + 1


def test_uniforms_are_uniform_along_positions_and_streams():
    n, bins = 100_000, 100
    along = draw_uniforms(torch.full((n,), derive_random_stream(KEY)), torch.arange(n))
    across = draw_uniforms(torch.arange(n), torch.full((n,), 5))  # the worst streams: consecutive integers
    for u in (along, across):
        assert u.min() >= 0 and u.max() < 1
        counts = torch.histc(u, bins=bins, min=0, max=1)
        chi2 = ((counts - n / bins) ** 2 / (n / bins)).sum().item()
        assert chi2 < 149  # 99.9% quantile of chi-square with 99 degrees of freedom is 148.2
        following = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1].item()
        assert abs(following) < 4 / n**0.5
