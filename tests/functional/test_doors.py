"""What the functions refuse, in one sentence and before anything runs; and what they print and cut."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import processes
from forerun.errors import BadOption, NotFound, PromptTooLong, UserError, VocabularyMismatch
from forerun.functional import (
    GreedyProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    autoregressive_generate,
    beam_search_generate,
    max_fn,
    printing,
    prune_cache,
    prune_dynamic_cache,
    prune_tuple_cache,
    speculative_generate,
)
from forerun.models.toy import ToyModel, ToyTable
from functional.modules import PROMPT, ToyModule, module_of
from refusals import refusal

TARGET = ToyModule(ToyModel(7, 1))
BART = module_of("bart")


@pytest.mark.parametrize(
    ("error", "sentence", "options"),
    [
        (BadOption, "gamma=0 is not possible", {"gamma": 0}),
        (BadOption, "gamma=65", {"gamma": 65}),
        (BadOption, "gamma_min=6", {"use_egag": True, "gamma_min": 6}),
        (BadOption, "ema_beta", {"use_egag": True, "egag_ema_beta": 1.0}),
        (BadOption, "max_gen_len=-1", {"max_gen_len": -1}),
        (BadOption, "inputs has no tokens", {"inputs": []}),
        (BadOption, "inputs has no tokens", {"inputs": [[1], []]}),
        (BadOption, "inputs holds 7, but the ids of the target are 0 .. 6", {"inputs": [1, 7]}),
        (BadOption, "inputs='abc'", {"inputs": "abc"}),
        (PromptTooLong, "65 tokens, and the target has 64 positions", {"inputs": [1] * 65}),
        (VocabularyMismatch, "the drafter has 5 ids and the target 7", {"drafter": ToyModule(ToyModel(5, 1))}),
        (BadOption, "one of one kind|two of one kind", {"drafter": BART}),
        (BadOption, "training mode", {"target": ToyModule(ToyModel(7, 1)).train()}),
        (BadOption, "no config.vocab_size", {"target": torch.nn.Linear(2, 2)}),
        (BadOption, "eos_tokens_id=7", {"eos_tokens_id": [1, 7]}),
        (BadOption, "no LogitsProcessor", {"logits_processor": torch.softmax}),
    ],
)
def test_refused(error: type[UserError], sentence: str, options: dict[str, Any]) -> None:
    given = {"inputs": [1], "drafter": TARGET, "target": TARGET, **options}
    TARGET.calls.clear()
    with pytest.raises(error, match=sentence):
        speculative_generate(**given)
    assert not TARGET.calls


@pytest.mark.parametrize(
    ("sentence", "options"),
    [
        ("draft_beams=4 belongs to a drafter", {"draft_beams": 4}),
        ("num_return_sequences=5 is not in 1 .. num_beams=4", {"num_return_sequences": 5}),
        ("num_beams=65", {"num_beams": 65}),
        ("early_stopping=2", {"early_stopping": 2}),
        ("length_penalty=17", {"length_penalty": 17}),
        ("draft_beams=3 is not possible: it must be at least num_beams=4", {"drafter": TARGET, "draft_beams": 3}),
        ("gamma=0", {"gamma": 0}),
    ],
)
def test_beam_search_refuses(sentence: str, options: dict[str, Any]) -> None:
    TARGET.calls.clear()
    assert sentence in refusal(BadOption, beam_search_generate, [1], TARGET, **options)
    assert not TARGET.calls


def test_an_input_too_long_for_an_encoder_is_refused() -> None:
    with pytest.raises(PromptTooLong, match="65 tokens and the encoder of the model takes 64"):
        autoregressive_generate([5] * 65, BART)


def test_a_state_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(BadOption, match=r"mamba.*use_cache=False"):
        autoregressive_generate(PROMPT, module_of("mamba"), use_cache=True)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in refusal(NotFound, autoregressive_generate, PROMPT, BART, use_cache=True)


def test_processors_refuse_what_the_pipeline_refuses() -> None:
    assert "has the temperature 0.0" in refusal(BadOption, MultinomialProcessor, 0.0)
    assert "temperature=-1.0" in refusal(BadOption, MultinomialProcessor, -1.0)
    assert "top_p=0.0" in refusal(BadOption, NucleusProcessor, 1.0, 0.0)


def test_a_processor_must_keep_the_shape() -> None:
    class Short(GreedyProcessor):
        def _process(self, logits: torch.Tensor) -> torch.Tensor:
            return logits[..., :3]

    assert "must keep the shape" in refusal(BadOption, autoregressive_generate, [1], TARGET, logits_processor=Short())


def test_a_processor_without_a_temperature_is_refused() -> None:
    class Bare(GreedyProcessor):
        def __init__(self) -> None:
            """Forget the temperature."""

    assert "super().__init__" in refusal(BadOption, autoregressive_generate, [1], TARGET, logits_processor=Bare())


def test_transformers_is_imported_by_those_who_use_it() -> None:
    code = "import sys, forerun.functional; print('transformers' in sys.modules)"
    done = processes.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "False\n"


def test_a_drafter_that_raises_is_heard() -> None:
    class Broken(ToyModule):
        def forward(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        speculative_generate([1, 2], Broken(ToyModel(7, 1)), TARGET)


# ------------------------------------------------------------------------------------------------------------- padding


class Named:
    """A tokenizer of seven ids."""

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(7)}

    def decode(self, ids: list[int]) -> str:
        return "".join(f"t{i} " for i in ids).strip()


class Padded(ToyModule):
    """Has two more rows than ids, of which the first has the largest logit."""

    def __init__(self, toy: ToyModel) -> None:
        super().__init__(toy)
        self.config.vocab_size += 2

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        found = super().forward(input_ids, past_key_values, use_cache)
        padding = torch.tensor([50.0, 0.0], dtype=torch.float64).expand(*found.logits.shape[:2], 2)
        return SimpleNamespace(logits=torch.cat([found.logits, padding], -1), past_key_values=found.past_key_values)


def test_a_tokenizer_tells_padding() -> None:
    target = Padded(TARGET.toy)
    alone = autoregressive_generate([1], TARGET, eos_tokens_id=None)
    ids, rate = speculative_generate([1], TARGET, target, Named(), eos_tokens_id=None, use_cache=True)
    assert (ids, rate) == (alone, 1.0)
    assert "tokenizer" in refusal(VocabularyMismatch, speculative_generate, [1], TARGET, target)


# --------------------------------------------------------------------------------------------------- caches, residuals


def layers(num: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.arange(20.0).reshape(1, 2, 5, 2) + i for i in range(num))


@pytest.mark.parametrize("num", [0, 2, 5])
def test_tuples_are_cut_at_the_end_and_the_encoder_stays(num: int) -> None:
    cache = (layers(2), None, layers(4))
    cut = prune_cache(cache, num)
    lengths = [None if layer is None else [t.shape[2] for t in layer] for layer in cut]
    assert lengths == [[5 - num] * 2, None, [5 - num, 5 - num, 5, 5]]
    assert torch.equal(cut[0][0], cache[0][0][:, :, : 5 - num])
    assert cache[0][0].shape[2] == 5


@pytest.mark.parametrize("num", [0, 3])
def test_dynamic_caches_are_cut_in_place(num: int) -> None:
    cache = DynamicCache()
    for layer in range(2):
        cache.update(*layers(2), layer)
    assert prune_cache(cache, num) is cache
    assert cache.get_seq_length() == 5 - num
    assert torch.equal(cache.layers[1].keys, layers(2)[0][:, :, : 5 - num])


def test_what_cannot_be_cut() -> None:
    assert (prune_cache(None, 3), prune_tuple_cache(None, 3), prune_dynamic_cache(None, 3)) == (None, None, None)
    for num in (-1, 6):
        assert "the cache holds 5 tokens" in refusal(BadOption, prune_cache, (layers(2),), num)
    assert "use_cache=False" in refusal(BadOption, prune_cache, "state", 1)


def test_max_fn() -> None:
    x = torch.tensor([[[0.3, -0.3, 0.1], [0.0, -1.0, 0.5]]])
    assert torch.allclose(max_fn(x), torch.tensor([[[0.75, 0.0, 0.25], [0.0, 0.0, 1.0]]]))
    assert "nothing to normalise" in refusal(BadOption, max_fn, torch.tensor([[0.5, 0.0], [0.0, -1.0]]))
    assert torch.allclose(max_fn(torch.tensor([[1, 3, -3]])).float(), torch.tensor([[0.25, 0.75, 0.0]]))


# --------------------------------------------------------------------------------------------------------------- debug


def test_rounds_are_printed_with_the_right_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    near = ToyModel(7, 4, ToyTable(distance=1.5), near=TARGET.toy)
    options = {"gamma": 3, "max_gen_len": 12, "eos_tokens_id": None, "debug": True}
    torch.manual_seed(1)
    ids, rate = speculative_generate(
        [1, 2], ToyModule(near), TARGET, Named(), logits_processor=MultinomialProcessor(), **options
    )
    printed = capsys.readouterr().out
    rounds = printed.split(" Speculative Step ")[1:]
    assert rounds[0].split("\n")[1] == "Position: 2, Gamma: 0, Accepted: 0"
    num_drafted = num_accepted = 0
    position = 2
    for text in rounds:
        head = re.search(r"Position: (\d+), Gamma: (\d+), Accepted: (\d+)", text)
        assert head is not None
        at, gamma, accepted = map(int, head.groups())
        drafts = re.findall(r"  \[(\d+)\]: \"(t\d)\" \(q=[\d.e-]+\) (✓|✗|-)", text)
        assert at == position
        assert [int(number) for number, *_ in drafts] == list(range(at + 1, at + 1 + gamma))
        assert sum(mark == "✓" for *_, mark in drafts) == accepted
        last = re.search(r"Final Sample:\n  \[(\d+)\]: \"(t\d)\" \((.+)\)", text)
        assert last is not None
        assert int(last[1]) == at + accepted + 1
        kinds = {True: "target's own" if not gamma else "bonus", False: "adjusted distribution"}
        assert last[3] == kinds[accepted == gamma]
        for coin, ratio in re.findall(r"rejected: r=(\S+) > p/q=(\S+?)\)", text):
            assert float(coin) >= float(ratio)
        position += accepted + 1
        num_drafted, num_accepted = num_drafted + gamma, num_accepted + accepted
    assert f'Generated: "{Named().decode(ids)}"' in rounds[-1]
    assert rate == num_accepted / num_drafted
    assert "✗ (rejected: r=" in printed
    assert "(not tested)" in printed


def test_small_probabilities_are_printed_as_what_they_are() -> None:
    """Two digits behind the point would say 0 of what was drawn."""
    assert [printing._prob(q) for q in (0.0, 0.25, 0.005, 0.0012, 3e-7)] == ["0.00", "0.25", "0.01", "0.0012", "3e-07"]


def test_entropy_is_printed_and_nothing_is_without_debug(capsys: pytest.CaptureFixture[str]) -> None:
    speculative_generate([1], TARGET, TARGET, use_egag=True, debug=True, max_gen_len=4)
    assert "entropy_normalized: " in capsys.readouterr().out
    speculative_generate([1], TARGET, TARGET)
    assert capsys.readouterr().out == ""
