"""The program in an answer."""

from __future__ import annotations

import pytest

from cohort.tasks.code.programs import MAX_CHARS, find_program

FOUND = [
    ("```python\nx = 1\n```", "x = 1\n"),
    ("```py\nx = 1\n```", "x = 1\n"),
    ("```Python\nx = 1\n```", "x = 1\n"),
    ("```\nx = 1\n```", "x = 1\n"),
    ("~~~python\nx = 1\n~~~", "x = 1\n"),
    ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
    ("First:\n```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```\nDone.", "x = 2\n"),
    ("```python\nx = 1\n```\nIt prints:\n```\n1\n```", "x = 1\n"),
    ("```python\nx = 1\n```\n```bash\nrun\n```", "x = 1\n"),
    ("```python\nx = 1\n```\n```python\nx = 2", "x = 1\n"),
    ("def f():\n    return 1", "def f():\n    return 1"),
    ("<think>```python\nx = 1\n```</think>```python\nx = 2\n```", "x = 2\n"),
    ('```python title="a"\nx = 1\n```', "x = 1\n"),
]


@pytest.mark.parametrize(("text", "source"), FOUND)
def test_found(text: str, source: str) -> None:
    assert find_program(text).source == source and not find_program(text).reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no program"),
        ("   \n", "no program"),
        ("```python\n```", "no program"),
        ("```python\nx = 1", "does not end"),
        ("```bash\nls\n```", "in bash"),
        ("<think>so ```python\nx = 1\n```", "thoughts do not end"),
        ("```python\n" + "x = 1\n" * MAX_CHARS + "```", "longer than"),
    ],
)
def test_not_found(text: str, reason: str) -> None:
    found = find_program(text)
    assert not found.source and reason in found.reason


def test_long_hostile_text_takes_little_time() -> None:
    for text in ("```" * 300_000, "```python\n" * 100_000, "`" * 10**6, "\n" * 10**6, "```a\n```\n" * 100_000):
        find_program(text)
