"""Every architecture against transformers in float32: prefill, ragged mixtures, chunks, trees, windows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forerun import LLM, SamplingParams, native
from forerun.kv.cache import BlockCache
from forerun.models.loading import load_checkpoint
from forerun.models.runner import Run, Runner, pack
from forerun.ops.torch import TorchModel

Raw = dict[str, Any]
NATIVE = pytest.mark.skipif(native.isa() == "reference", reason="the native operators are not there, or off")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
QWEN_KINDS = ["full_attention", "sliding_attention"]

# model_type, keys of the architecture, rope type and its numbers
CASES: dict[str, tuple[str, Raw, str, Raw]] = {
    "llama": ("llama", {}, "default", {}),
    "llama-tied-biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        "default",
        {},
    ),
    "llama-linear": ("llama", {"pretraining_tp": 2}, "linear", {"factor": 4.0}),
    "llama-llama3": ("llama", {}, "llama3", LLAMA3),
    "mistral-window": ("mistral", {"sliding_window": 6}, "default", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}, "default", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "sliding_window": 5}, "default", {}),
    "qwen2-window": ("qwen2", QWEN_WINDOW, "default", {}),
    "qwen3": ("qwen3", {}, "default", {}),
    "qwen3-window-bias": ("qwen3", {**QWEN_WINDOW, "attention_bias": True}, "linear", {"factor": 2.0}),
}


# Families that are not like Llama, as a whole config.json each: a family is one line.
GEMMA = {"vocab_size": 97, "hidden_size": 60, "intermediate_size": 52, "num_attention_heads": 6, "head_dim": 8,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "query_pre_attn_scalar": 13, "sliding_window": 6,
         "model_type": "gemma3_text", "final_logit_softcapping": 3.0}  # fmt: skip
MOE = {"vocab_size": 97, "hidden_size": 60, "intermediate_size": 52, "num_attention_heads": 6, "head_dim": 8,
       "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts": 5, "num_experts_per_tok": 2,
       "moe_intermediate_size": 24, "num_hidden_layers": 2}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 60, "n_layer": 2, "n_head": 6, "n_positions": 256}
WHOLE: dict[str, Raw] = {
    "gemma3": {**GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 2, "rope_theta": 1e5,
               "rope_local_base_freq": 1e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3-5": {**GEMMA, "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
                 "tie_word_embeddings": False, "final_logit_softcapping": None, "attention_bias": True,
                 "rope_parameters": {"full_attention": {"rope_theta": 1e5, "rope_type": "linear", "factor": 4.0},
                 "sliding_attention": {"rope_theta": 1e3, "rope_type": "default"}}},
    "gpt2": GPT2,
    "qwen3_moe": {**MOE, "model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3_moe-dense": {**MOE, "model_type": "qwen3_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2,
                        "mlp_only_layers": [1], "sliding_window": 5, "use_sliding_window": True},
    "qwen2_moe": {**MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 20},
    "mixtral": {**{key: value for key, value in MOE.items() if key not in ("num_experts", "moe_intermediate_size")},
                "model_type": "mixtral", "num_local_experts": 5, "sliding_window": 7},
    "gpt2-scales": {**GPT2, "n_inner": 71, "activation_function": "relu", "scale_attn_by_inverse_layer_idx": True},
}  # fmt: skip


def spell(case: str, generation: int, base: Raw) -> Raw:
    """config.json as transformers of that generation wrote it."""
    model_type, keys, kind, numbers = CASES[case]
    raw = {**base, "model_type": model_type, **keys, "hidden_act": "silu", "attention_dropout": 0.0}
    theta = raw.pop("rope_theta") * 3
    if generation == 4:
        name = "type" if kind == "linear" else "rope_type"
        scaling = None if kind == "default" else {name: kind, **numbers}
        return {**raw, "rope_theta": theta, "rope_scaling": scaling, "torch_dtype": "float32", "use_cache": True}
    raw |= {"rope_parameters": {"rope_theta": theta, "rope_type": kind, **numbers}, "dtype": "float32"}
    if model_type.startswith("qwen"):
        raw["layer_types"] = QWEN_KINDS if raw.get("use_sliding_window") else ["full_attention"] * 2
    return raw


class Pair:
    """One checkpoint, loaded twice."""

    def __init__(self, folder: Path) -> None:
        self.model: TorchModel = load_checkpoint(folder).model
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.oracle = oracle.eval()

    def expect(self, tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            return self.oracle(torch.tensor([tokens])).logits[0]

    def cache(self, backend: str) -> BlockCache:
        shape = self.model.config.cache_shape
        return BlockCache.create(shape, backend, max_batch_size=4, max_seq_len=64)  # type: ignore[arg-type]

    def run(self, cache: BlockCache, runs: dict[int, list[int]], parents: Seq[list[int] | None] = ()) -> list[Tensor]:
        """One pass; logits of every row, by run. parents: per run, -1 = the cached context, None = a chain."""
        for slot, run in runs.items():
            cache.reserve(slot, len(run))
        trees = zip(runs.items(), parents or [None] * len(runs), strict=True)
        batch = pack([Run(slot, run, parents=tree) for (slot, run), tree in trees], cache)
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch, cache))
        return [logits[batch.run_starts[b] : batch.run_starts[b + 1]] for b in range(len(runs))]


@pytest.fixture(params=[*(f"{case}/{generation}" for case in CASES for generation in (4, 5)), *WHOLE])
def pair(request: pytest.FixtureRequest, write_checkpoint: Any, llama_raw: Raw) -> Pair:
    case, _, generation = request.param.partition("/")
    if case in WHOLE:
        return Pair(write_checkpoint(WHOLE[case]))
    return Pair(write_checkpoint(spell(case, int(generation), llama_raw)))


def tokens_of(num: int, seed: int) -> list[int]:
    return torch.randint(97, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-6


def test_prefill_chunks_and_ragged_mixtures_agree(pair: Pair) -> None:
    texts = {7: tokens_of(40, 1), 3: tokens_of(29, 2), 5: tokens_of(12, 3)}
    expected = {slot: pair.expect(tokens) for slot, tokens in texts.items()}
    # How many tokens each slot contributes to each pass: prefill, decode rows and verification rows side by side.
    plans = {
        "paged": [{7: 17, 3: 5}, {3: 1, 7: 20, 5: 1}, {5: 6, 7: 1, 3: 4}, {7: 1}, {3: 19, 5: 5, 7: 1}],
        "contiguous": [{7: 40, 5: 12}, {3: 1}, {3: 1}, {3: 27}],
    }
    for backend, plan in plans.items():
        cache = pair.cache(backend)
        for slot in texts:
            cache.open(slot)
        for counts in plan:
            runs = {slot: texts[slot][cache.length(slot) :][:n] for slot, n in counts.items()}
            for (slot, run), logits in zip(runs.items(), pair.run(cache, runs), strict=True):
                start = cache.length(slot)
                assert_close(logits, expected[slot][start : start + len(run)])
                cache.keep({slot: range(len(run))})
        cache.check_integrity()
        assert all(cache.length(slot) == len(tokens) for slot, tokens in texts.items())


def test_taps_are_the_hidden_states_of_transformers(pair: Pair) -> None:
    """Of every layer; the last of theirs comes after the final norm."""
    tokens, num_layers = tokens_of(23, 8), pair.model.config.num_layers
    with torch.inference_mode():
        expected = pair.oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    cache = pair.cache("paged")
    cache.open(0)
    scores = Runner(pair.model, cache, taps=range(num_layers + 1)).forward([Run(0, tokens, "none")])
    for k in range(num_layers):
        assert_close(scores.taps[k], expected[k][0])
    assert_close(pair.model.norm(scores.taps[num_layers]), expected[num_layers][0])


def test_tree_rows_are_the_chain_rows_over_each_path(pair: Pair) -> None:
    context = tokens_of(15, 4)
    tree, parents = tokens_of(9, 5), [-1, 0, 0, 1, 2, 1, 4, -1, 7]
    cache = pair.cache("paged")
    for slot in (1, 2):
        cache.open(slot)
        pair.run(cache, {slot: context})
        cache.keep({slot: range(len(context))})
    plain = tokens_of(3, 6)
    found, chain = pair.run(cache, {1: tree, 2: plain}, [parents, None])
    assert_close(chain, pair.expect(context + plain)[-3:])
    for node in range(len(tree)):
        path = path_to(node, parents)
        expected = pair.expect(context + [tree[i] for i in path])
        assert_close(found[path], expected[len(context) :])
    kept = path_to(6, parents)
    cache.keep({1: kept})
    text = context + [tree[i] for i in kept]
    (after,) = pair.run(cache, {1: [42, 43]})
    assert_close(after, pair.expect([*text, 42, 43])[-2:])


def path_to(node: int, parents: list[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize("ops", ["reference", pytest.param("native", marks=NATIVE)])
@pytest.mark.parametrize("case", WHOLE)
def test_greedy_texts_are_those_of_transformers(write_checkpoint: Any, case: str, ops: str) -> None:
    """Of 20 prompts, in float32; where two texts part, the oracle says that both tokens are as likely.

    They are drafted for too, which changes nothing.
    """
    folder = write_checkpoint(WHOLE[case])
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = [tokens_of(3 + seed, seed) for seed in range(20)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "ops": ops, "max_seq_len": 64}
    texts = [out.token_ids for out in LLM(str(folder), draft="none", **options).generate(prompts, params)]
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() <= 1e-4 * logits.abs().max()
    if ops == "native":
        drafted = LLM(str(folder), draft="lookup", pacing="fixed", **options).generate(prompts, params)
        assert [out.token_ids for out in drafted] == texts
        assert sum(out.report.num_drafted for out in drafted) > 0
