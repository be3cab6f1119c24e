"""Probes of the memory are small here: what a large buffer shows is no test's business, and takes seconds of each."""

from pathlib import Path

import pytest

from forerun.bench import bandwidth
from tiny import write_tiny


@pytest.fixture(autouse=True)
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read 16 MiB for each thread, in this process."""
    monkeypatch.setattr(bandwidth, "MIN_BYTES", 1 << 24)
    monkeypatch.setattr(bandwidth, "MIN_BYTES_PER_THREAD", 1 << 24)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, which no test changes."""
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")
