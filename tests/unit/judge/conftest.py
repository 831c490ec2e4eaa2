"""A stand-in server, a clock that does not wait, and a cache folder of its own for every test of judges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cohort.judge import service
from tests.helpers.fake_server import FakeServer, serving
from tests.helpers.judge_server import FakeClock, grades


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        fake.behaviours = [grades()]
        yield fake


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeClock]:
    """The clock of all judges in the test. The services of other tests are forgotten."""
    made = FakeClock()
    monkeypatch.setattr(service, "Clock", lambda: made)
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    service.get_service.cache_clear()
    yield made
    service.get_service.cache_clear()
