"""Instruction sets and types of weights that a test asks for, and which tests of the CUDA kernels run without a card.

Triton's interpreter takes seconds for each pass. All of them run on a card, and with `make parity`.
"""

from typing import Any

import pytest
import torch

from ops.native_cases import DTYPES, ISAS


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Any:
    """A test that takes an instruction set runs on each that this processor has."""
    return request.param


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> Any:
    """A test that takes a type of weights and names none runs with each."""
    return request.param


# By test, the cases that each run of the tests has. Tests that are not named run whole.
EVERY_TIME = {
    "test_rows_of_a_model_are_those_of_torch_and_their_bits_those_of_rows_alone": (
        "float32-gemma3",
        "bfloat16-gpt_oss, experts",
    ),
    "test_a_pass_of_64_rows_has_the_bits_of_passes_of_fewer": ("gemma3",),
    "test_experts_are_those_of_torch": ("float32-experts 2", "bfloat16-experts 0", "float32-in parts of K 0"),
    "test_packed_experts_are_what_their_codes_stand_for": ("int4:group=32",),
    "test_a_rounded_model_is_what_its_codes_stand_for": ("int4",),
    "test_a_product_is_that_of_what_codes_stand_for": ("q4_k", "q6_k", "gptq", "zeros of levels"),
    "test_groups_of_all_sizes_and_rows_of_all_tiles": ("int4, group 32", "int8, group 128"),
    "test_a_draw_has_the_bits_of_the_host": ("temperature top_k top_p min_p-300-128", "none-4997-4096"),
    "test_an_engine_says_what_it_says_where_rows_come_to_the_host": ("MODEL-ratio-filters2", "lookup-ratio-filters4"),
    "test_drafts_without_ids_that_are_never_written_are_those_of_the_host": ("ratio",),
    "test_logits_are_those_of_transformers": ("t5 1.1",),
    "test_a_rows_bits_are_its_own": ("t5gemma",),
    "test_kernels_compile_for_a_card_and_fit_it": ("90",),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other cases to `make parity`."""
    if torch.cuda.is_available():
        return
    for item in items:
        name, _, case = item.name.partition("[")
        if item.path.name.startswith("test_cuda") and case.rstrip("]") not in EVERY_TIME.get(name, (case.rstrip("]"),)):
            item.add_marker(pytest.mark.parity)
