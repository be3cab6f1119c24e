"""A model of transformers with a cache of its own serves as target and as draft model: KVCache asks for no tables.

Its greedy text is that of generate() of transformers, whichever drafter it has.
"""

import copy
from collections.abc import Collection, Mapping, Sequence as Seq

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from engine.load import caches, run
from forerun import pacing
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.engine.engine import Engine
from forerun.errors import CapacityError, InternalError
from forerun.host_tensor import dtype_name
from forerun.kv import KVCache, Room
from forerun.kv.cache import CacheShape
from forerun.models.runner import Run, Runner
from forerun.ops.passes import Passed
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch_tensors import TorchRows
from forerun.types import RaggedBatch, SamplingParams
from support import VOCAB, drafter_for

CAPACITY_TOKENS = 160


class ForeignCache:
    """One DynamicCache for each slot; only chains. Memory is counted in blocks of one token."""

    block_tokens = 1

    def __init__(self, num_tokens: int = CAPACITY_TOKENS) -> None:
        self.num_blocks = num_tokens
        self.caches: dict[int, DynamicCache] = {}
        self._lengths: dict[int, int] = {}
        self._reserved: dict[int, int] = {}  # rows, the kept ones included

    def open(self, slot: int, tokens: Seq[int] = (), salt: str | None = None) -> int:
        self.caches[slot], self._lengths[slot], self._reserved[slot] = DynamicCache(), 0, 0
        return 0

    def fork(self, slot: int, new_slot: int) -> None:
        self.truncate_to(slot, self.length(slot))
        if self.length(slot) > self.free_tokens():
            raise CapacityError("no room for a copy")
        for of_slots in (self.caches, self._lengths, self._reserved):
            of_slots[new_slot] = copy.deepcopy(of_slots[slot])  # type: ignore[attr-defined, index]

    def publish(self, slot: int, tokens: Seq[int]) -> None:
        """Nothing is shared."""

    def release(self, slot: int) -> None:
        for of_slots in (self.caches, self._lengths, self._reserved):
            of_slots.pop(slot, None)  # type: ignore[attr-defined]

    def length(self, slot: int) -> int:
        return self._lengths.get(slot, 0)

    def pending(self, slot: int) -> Seq[int]:
        return ()

    def room(self, slot: int) -> Room:
        return Room(self._lengths[slot], self._reserved[slot] - self._lengths[slot], 1)

    def free_tokens(self, without: Collection[int] = ()) -> int:
        return self.num_blocks - sum(num for slot, num in self._reserved.items() if slot not in without)

    def missing_blocks(self, slot: int, num_tokens: int) -> int:
        return max(0, self._lengths[slot] + num_tokens - self._reserved[slot])

    def reserve(self, slot: int, num_tokens: int) -> None:
        missing = self.missing_blocks(slot, num_tokens)
        if missing > self.free_tokens():
            raise CapacityError("the cache is full")
        self._reserved[slot] += missing

    def keep(self, kept: Mapping[int, Seq[int]]) -> list[int]:
        for slot, rows in kept.items():
            assert list(rows) == list(range(len(rows)))
            self._cut(slot, self._lengths[slot] + len(rows))
        return []

    def hold(self, slot: int, parents: Seq[int]) -> None:
        raise InternalError("this cache has no pending rows")

    def truncate_to(self, slot: int, length: int) -> int:
        assert length <= self._lengths[slot]
        self._cut(slot, length)
        return length

    def _cut(self, slot: int, length: int) -> None:
        self._lengths[slot] = self._reserved[slot] = length
        if surplus := self.caches[slot].get_seq_length() - length:
            self.caches[slot].crop(-surplus)

    def check_integrity(self) -> None:
        assert all(cache.get_seq_length() == self._lengths[slot] for slot, cache in self.caches.items())


class ForeignModel:
    """A model of transformers as a Runner runs it; config is its own face to the engine."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model, self.config = model, self
        self.device = "cpu"
        self.ops = ReferenceOps()
        self.rows = TorchRows("cpu", model.dtype)
        self.weight_dtype = self.activation_dtype = self.cache_dtype = dtype_name(model.dtype)
        self.vocab_size, self.max_positions = model.config.vocab_size, model.config.max_position_embeddings
        self.hidden_size = model.config.hidden_size
        self.cache_shape = CacheShape(2, 2, 8)
        self.encoder, self.has_experts, self.num_slots = None, False, 1

    def forward(
        self,
        batch: RaggedBatch,
        cache: ForeignCache,
        layers: Seq[int] | None = None,
        hidden: Tensor | None = None,
        taps: Seq[int] = (),
    ) -> Passed:
        if batch.ancestors or layers is not None:
            raise InternalError("this model runs chains only, through all of its layers")
        inputs = self.embed(batch.ids()[0]) if hidden is None else hidden
        found = []
        for b, slot in enumerate(batch.slots):
            cache.truncate_to(slot, batch.cached[b])  # what an interrupted step left
            rows = inputs[list(batch.run(b))][None]
            found.append(
                self.model.model(inputs_embeds=rows, past_key_values=cache.caches[slot], output_hidden_states=True)
            )
        inner = {k: torch.cat([run.hidden_states[k][0] for run in found]).float() for k in taps}
        return Passed(torch.cat([run.last_hidden_state[0] for run in found]), inner)

    def embed(self, ids: Seq[int]) -> Tensor:
        return self.model.model.embed_tokens(torch.tensor(ids))

    def norm(self, hidden: Tensor) -> Tensor:
        return self.model.model.norm(hidden)

    def wait(self) -> None:
        """Everything is computed when a call returns."""

    def logits(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        return self.model.lm_head(hidden)[:, :num_ids]


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **heads)).double().eval()


TARGET = llama(0)
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 9, 8, 9, 8, 30, 31, 32, 33, 34]]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def expected(prompt: list[int]) -> list[int]:
    ids = TARGET.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    return ids[0, len(prompt) :].tolist()


def runner_of(model: LlamaForCausalLM) -> Runner:
    stands_behind: KVCache = ForeignCache()
    return Runner(ForeignModel(model), stands_behind)


@pytest.mark.once("asks for its own drafters, and for fixed lengths")
@pytest.mark.parametrize("draft", ["none", "lookup", "model"])
def test_the_engine_says_what_generate_says(draft: str) -> None:
    """Three requests in one batch, prompts in chunks; the draft model is the target's like, with another cache."""
    runner = runner_of(TARGET)
    if draft == "model":
        near = copy.deepcopy(TARGET)
        near.lm_head.weight.data += 0.05 * torch.randn(near.lm_head.weight.shape, dtype=torch.float64)
        drafter = ModelDrafter(runner_of(near))
    else:
        drafter = drafter_for(draft, runner.model)
    engine = Engine(runner, drafter, pacing.make("fixed", 4), max_seq_len=128, prefill_chunk_tokens=4)
    requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    assert run(engine, requests) == [expected(prompt) for prompt in PROMPTS]
    assert (sum(request.report.num_accepted for request in requests) > 0) == (draft != "none")
    assert [c.free_tokens() for c in caches(engine)] == [CAPACITY_TOKENS] * (2 if draft == "model" else 1)


@pytest.mark.once("no engine runs")
@torch.inference_mode()
def test_a_fork_goes_on_alone() -> None:
    runner = runner_of(TARGET)
    cache = runner.cache
    cache.open(0)
    runner.forward([Run(0, PROMPTS[2])])
    cache.keep({0: range(6)})
    cache.fork(0, 1)
    for slot, found in enumerate([runner.forward([Run(slot, [slot + 1])]).logits[0] for slot in (0, 1)]):
        whole = TARGET(torch.tensor([[*PROMPTS[2][:6], slot + 1]])).logits[0, -1:]
        assert torch.allclose(torch.from_numpy(found), whole, atol=1e-10)
    with pytest.raises(InternalError, match="chains only"):
        runner.forward([Run(0, [1, 2, 3], parents=[-1, 0, 0])])


def test_its_inner_layers_are_shown_and_vectors_stand_for_tokens() -> None:
    """Taps are the hidden states of transformers; an embedding in place of its token changes nothing."""
    model, tokens = ForeignModel(TARGET), PROMPTS[2]
    with torch.inference_mode():
        expected = TARGET.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        vectors = {3: model.embed(tokens)[3]}
    for one in (Run(0, tokens), Run(0, [*tokens[:3], 0, *tokens[4:]], vectors=vectors)):
        cache = ForeignCache()
        cache.open(0)
        scores = Runner(model, cache, taps=(0, 1)).forward([one])
        for k in (0, 1):
            assert torch.allclose(scores.taps[k], expected[k][0].float())
        assert torch.allclose(scores.hidden, expected[2][0])
