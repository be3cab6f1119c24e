"""The kernels of samplers that tests ask for: those of each instruction set, with numpy's or without."""

from typing import Any

import pytest

from sampling.samplers import BY_NUMPY, ISAS, sampler


@pytest.fixture(scope="session", params=ISAS)
def native(request: pytest.FixtureRequest) -> Any:
    """The native sampler of one instruction set after the other."""
    return sampler(request.param)


@pytest.fixture(scope="session", params=["numpy", *ISAS])
def kernels(request: pytest.FixtureRequest) -> Any:
    """What numpy computes, then the native sampler of one instruction set after the other."""
    return BY_NUMPY if request.param == "numpy" else sampler(request.param)
