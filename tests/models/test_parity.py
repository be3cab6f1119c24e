"""Every architecture against transformers in float32: prefill, ragged mixtures, chunks, trees, windows."""

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from forerun import LLM, SamplingParams
from forerun.errors import BadOption, PromptTooLong
from forerun.kv.cache import BlockCache
from forerun.models.loading import load_checkpoint
from forerun.models.opened import read_config
from forerun.models.runner import Run, Runner, pack
from forerun.ops import backend as backend_of, make as make_ops
from forerun.ops.torch import TorchModel
from ops.native_cases import path_to
from support import needs_native, runner_for

Raw = dict[str, Any]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
NATIVE = pytest.param("native", marks=needs_native)
QWEN_KINDS = ["full_attention", "sliding_attention"]

# model_type, keys of the architecture, rope type and its numbers
CASES: dict[str, tuple[str, Raw, str, Raw]] = {
    "llama": ("llama", {}, "default", {}),
    "llama-tied-biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, "default",
                          {}),
    "llama-linear": ("llama", {"pretraining_tp": 2}, "linear", {"factor": 4.0}),
    "llama-llama3": ("llama", {}, "llama3", LLAMA3),
    "mistral-window": ("mistral", {"sliding_window": 6}, "default", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}, "default", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "sliding_window": 5}, "default", {}),
    "qwen2-window": ("qwen2", QWEN_WINDOW, "default", {}),
    "qwen3": ("qwen3", {}, "default", {}),
    "qwen3-window-bias": ("qwen3", {**QWEN_WINDOW, "attention_bias": True}, "linear", {"factor": 2.0}),
}  # fmt: skip


# Families that are not like Llama, as a whole config.json each: a family is one line.
GEMMA = {"vocab_size": 97, "hidden_size": 60, "intermediate_size": 52, "num_attention_heads": 6, "head_dim": 8,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "query_pre_attn_scalar": 13, "sliding_window": 6,
         "model_type": "gemma3_text", "final_logit_softcapping": 3.0}  # fmt: skip
MOE = {"vocab_size": 97, "hidden_size": 60, "intermediate_size": 52, "num_attention_heads": 6, "head_dim": 8,
       "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts": 5, "num_experts_per_tok": 2,
       "moe_intermediate_size": 24, "num_hidden_layers": 2}  # fmt: skip
MIXTRAL = {**{key: value for key, value in MOE.items() if key not in ("num_experts", "moe_intermediate_size")},
           "model_type": "mixtral"}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 60, "n_layer": 2, "n_head": 6, "n_positions": 256}
SIZES = {"vocab_size": 97, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
         "pad_token_id": None}  # fmt: skip
PLAIN_SIZES = {key: value for key, value in SIZES.items() if key not in ("rms_norm_eps", "head_dim")}
NEOX = {"model_type": "gpt_neox", **{k: v for k, v in PLAIN_SIZES.items() if k != "num_key_value_heads"}}
YARN_OF_4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN = {**YARN_OF_4, "rope_theta": 1e3, "factor": 16.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4, "max_position_embeddings": 256}  # fmt: skip
GEMMA4 = {"model_type": "gemma4_text", "vocab_size": 97, "vocab_size_per_layer_input": 97, "hidden_size": 60,
          "intermediate_size": 52, "num_attention_heads": 6, "head_dim": 8, "num_key_value_heads": 3,
          "hidden_size_per_layer_input": 0, "max_position_embeddings": 256, "sliding_window": 6, "pad_token_id": None,
          "final_logit_softcapping": 3.0}  # fmt: skip
UNIFIED = {**{key: value for key, value in GEMMA4.items() if "per_layer_input" not in key}, "global_head_dim": 16,
           "model_type": "gemma4_unified_text"}  # fmt: skip
LOCAL, FULL, LINEAR, CONV = "sliding_attention", "full_attention", "linear_attention", "conv"
LFM2 = {**{key: value for key, value in SIZES.items() if key != "rms_norm_eps"}, "model_type": "lfm2",
        "num_hidden_layers": 3, "norm_eps": 1e-5, "block_multiple_of": 8}  # fmt: skip
STATES = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
          "linear_conv_kernel_dim": 4}  # fmt: skip
QWEN35 = {**SIZES, **STATES, "num_hidden_layers": 4, "model_type": "qwen3_5_text", "partial_rotary_factor": 0.5,
          "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5,
          "mrope_section": [1, 1, 0], "mrope_interleaved": True}}  # fmt: skip
MOE_SIZES = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LFM2_MOE = {**{key: value for key, value in LFM2.items() if not key.startswith("block_")}, **MOE_SIZES,
            "model_type": "lfm2_moe"}  # fmt: skip
NEXT = {**SIZES, **STATES, **MOE_SIZES, "model_type": "qwen3_next", "partial_rotary_factor": 0.5,
        "shared_expert_intermediate_size": 20}  # fmt: skip
WHOLE: dict[str, Raw] = {
    "gemma4": {**GEMMA4, "num_hidden_layers": 4, "layer_types": [LOCAL, FULL, LOCAL, FULL], "attention_k_eq_v": True,
               "global_head_dim": 16, "num_global_key_value_heads": 2},
    "gemma4-small": {**GEMMA4, "num_hidden_layers": 6, "layer_types": [LOCAL, LOCAL, FULL] * 2, "attention_bias": True,
                     "global_head_dim": 16, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 3,
                     "use_double_wide_mlp": True, "rope_parameters": {FULL: {"rope_type": "proportional", "rope_theta":
                     1e3, "partial_rotary_factor": 0.5, "factor": 2.0}, LOCAL: {"rope_type": "default",
                     "rope_theta": 1e2}}, "final_logit_softcapping": None},
    "gemma4-experts": {**GEMMA4, "num_hidden_layers": 3, "layer_types": [LOCAL, LOCAL, FULL], "enable_moe_block": True,
                       "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24, "attention_k_eq_v": True,
                       "per_layer_config": {"2": {"head_dim": 20, "num_key_value_heads": 1}}},
    "gemma4_unified": {**UNIFIED, "num_hidden_layers": 4, "layer_types": [LOCAL, FULL, LOCAL, FULL],
                       "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_unified-shared": {**UNIFIED, "num_hidden_layers": 6, "layer_types": [LOCAL, LOCAL, FULL] * 2,
                              "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "attention_bias": True},
    "gpt_oss": {**SIZES, "model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2,
                "tie_word_embeddings": False, "sliding_window": 6, "num_hidden_layers": 3, "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e3, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 32}},
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
    "mixtral": {**MIXTRAL, "num_local_experts": 5, "sliding_window": 7},
    "mixtral-all": {**MIXTRAL, "num_local_experts": 2},
    "gpt2-scales": {**GPT2, "n_inner": 71, "activation_function": "relu", "scale_attn_by_inverse_layer_idx": True},
    "phi3": {**SIZES, "model_type": "phi3", "sliding_window": 6, "original_max_position_embeddings": 128},
    "phi3-long": {**SIZES, "model_type": "phi3", "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75,
                  "tie_word_embeddings": True, "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.5],
                  "long_factor": [1.0, 2.0, 4.0]}, "full_attn_mod": 1, "interpolate_factor": 1},
    "phi3-5": {**SIZES, "model_type": "phi3", "original_max_position_embeddings": 64, "rope_parameters": {
               "rope_type": "longrope", "rope_theta": 1e3, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.3],
               "long_factor": [1.0, 2.0], "original_max_position_embeddings": 64, "attention_factor": 1.2}},
    "gemma2": {**GEMMA, "model_type": "gemma2", "num_hidden_layers": 3, "attn_logit_softcapping": 2.0,
               "rope_theta": 1e3, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2-5": {**GEMMA, "model_type": "gemma2", "num_hidden_layers": 2, "attention_bias": True,
                 "layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": False,
                 "attn_logit_softcapping": None, "final_logit_softcapping": None,
                 "rope_parameters": {"rope_theta": 1e5, "rope_type": "linear", "factor": 4.0}},
    "ministral3": {**SIZES, "model_type": "ministral3", "rope_parameters": YARN, "tie_word_embeddings": True},
    "ministral3-window": {**SIZES, "model_type": "ministral3", "sliding_window": 7, "rope_parameters": {
                          **YARN, "truncate": False, "mscale": 0.7, "mscale_all_dim": None, "beta_fast": 2.0,
                          "beta_slow": 0.1, "attention_factor": 1.3}},
    "granite": {**SIZES, "model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.31,
                "residual_multiplier": 0.22, "logits_scaling": 7.0, "tie_word_embeddings": True},
    "granite-biases": {**SIZES, "model_type": "granite", "attention_bias": True, "mlp_bias": True, "rope_parameters":
                       {"rope_theta": 1e3, **YARN_OF_4}},
    "smollm3": {**SIZES, "model_type": "smollm3", "num_hidden_layers": 5, "rope_theta": 5e3, "pretraining_tp": 2,
                "max_window_layers": 28, "use_sliding_window": False, "no_rope_layers": [1, 1, 1, 0, 1]},
    "smollm3-window": {**SIZES, "model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layer_interval": 2,
                       "use_sliding_window": True, "sliding_window": 6, "tie_word_embeddings": False,
                       "attention_bias": True, "mlp_bias": True, "rope_theta": 1e3},
    "olmo2": {**SIZES, "model_type": "olmo2", "rope_theta": 1e3},
    "olmo2-biases": {**SIZES, "model_type": "olmo2", "attention_bias": True, "tie_word_embeddings": True,
                     "rope_scaling": {"type": "linear", "factor": 2.0}},
    "glm4": {**SIZES, "model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4-5": {**SIZES, "model_type": "glm4", "attention_bias": False, "tie_word_embeddings": True,
               "rope_parameters": {"rope_theta": 1e3, "rope_type": "default", "partial_rotary_factor": 0.75}},
    "starcoder2": {**PLAIN_SIZES, "model_type": "starcoder2", "sliding_window": 6, "use_bias": True,
                   "norm_epsilon": 1e-4, "mlp_type": "default", "scale_attn_weights": True},
    "starcoder2-no-biases": {**PLAIN_SIZES, "model_type": "starcoder2", "use_bias": False, "hidden_act": "gelu",
                             "tie_word_embeddings": False, "rope_theta": 1e3},
    "gpt_neox": {**NEOX, "rotary_pct": 0.4, "rotary_emb_base": 1000},
    "gpt_neox-in-turn": {**NEOX, "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast",
                         "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e3, "rope_type": "linear",
                         "factor": 2.0, "partial_rotary_factor": 1.0}},
    "lfm2": {**LFM2, "layer_types": [CONV, FULL, CONV]},
    "lfm2-biases": {**LFM2, "full_attn_idxs": [0, 3], "num_hidden_layers": 4, "conv_L_cache": 4, "conv_bias": True,
                    "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 16, "tie_word_embeddings": False},
    "lfm2_moe": {**LFM2_MOE, "layer_types": [CONV, FULL, CONV], "num_dense_layers": 1, "norm_topk_prob": True},
    "lfm2_moe-all": {**LFM2_MOE, "layer_types": [FULL, CONV, CONV], "num_dense_layers": 0, "use_expert_bias": False,
                     "norm_topk_prob": False, "routed_scaling_factor": 1.7, "num_experts_per_tok": 3},
    "qwen3_next": {**NEXT, "num_hidden_layers": 5, "mlp_only_layers": [1], "decoder_sparse_step": 2, "rope_theta": 1e3,
                   "norm_topk_prob": False},
    "qwen3_next-all": {**NEXT, "layer_types": [LINEAR, FULL], "num_hidden_layers": 2, "partial_rotary_factor": 1.0},
    "qwen3_5": QWEN35,
    "qwen3_5_moe": {**QWEN35, **MOE_SIZES, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 20},
    "qwen3_5-biases": {**QWEN35, "attention_bias": True, "tie_word_embeddings": True, "linear_num_value_heads": 2,
                       "layer_types": [FULL, LINEAR, LINEAR], "linear_conv_kernel_dim": 2, "num_hidden_layers": 3,
                       "rope_parameters": {"rope_theta": 1e3, **YARN_OF_4, "partial_rotary_factor": 0.5}},
}  # fmt: skip

# What holds more than a text model, which is compared beside it.
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14}  # fmt: skip
LOOKING = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 60, "patch_size":
           4, "fullatt_block_indexes": [1], "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
NO_ENDS = {"bos_token_id": None, "eos_token_id": None}
QWEN2_VL = {**PLAIN_SIZES, **NO_ENDS, "rms_norm_eps": 1e-5, "rope_theta": 1e3}
QWEN3_VL = {**SIZES, **NO_ENDS, "rope_theta": 1e3, "rope_scaling": {
            "rope_type": "default", "mrope_section": [1, 2, 1], "mrope_interleaved": True}}  # fmt: skip
QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 60,
             "patch_size": 14, "num_position_embeddings": 4}  # fmt: skip
UNCAPPED = {key: value for key, value in GEMMA.items() if key != "final_logit_softcapping"}
SEEING: dict[str, Raw] = {
    "qwen3_5_moe": {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": WHOLE["qwen3_5_moe"],
                    "vision_config": {**QWEN_EYES, "model_type": "qwen3_5_moe_vision"}},
    "qwen3_5": {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": QWEN35, "vision_config":
                {**QWEN_EYES, "model_type": "qwen3_5_vision"}},
    "gemma4": {"model_type": "gemma4", "text_config": {**WHOLE["gemma4-small"], "pad_token_id": 0}, "vision_config":
               {**EYES, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8,
               "position_embedding_size": 16}, "audio_config": None},
    "gemma4_unified": {"model_type": "gemma4_unified", "text_config": {**WHOLE["gemma4_unified"], "pad_token_id": 0},
                       "vision_config": {"mm_embed_dim": 60, "mm_posemb_size": 8, "output_proj_dims": 60, "patch_size":
                       2, "pooling_kernel_size": 1}, "audio_config": {"audio_embed_dim": 20}},
    "qwen2_vl": {**QWEN2_VL, "model_type": "qwen2_vl", "tie_word_embeddings": True, "rope_scaling": {
                 "type": "mrope", "mrope_section": [2, 1, 2]}, "vision_config": {
                 "depth": 1, "embed_dim": 16, "hidden_size": 60, "num_heads": 2, "patch_size": 4}},
    "qwen2_5_vl": {**QWEN2_VL, "model_type": "qwen2_5_vl", "tie_word_embeddings": False, "use_sliding_window": True,
                   "sliding_window": 5, "max_window_layers": 1, "rope_scaling": {
                   "mrope_section": [0, 2, 3], **YARN_OF_4}, "vision_config": LOOKING},
    "qwen3_vl": {"model_type": "qwen3_vl", "tie_word_embeddings": True, "vision_config": LOOKING, "text_config": {
                 **QWEN3_VL, "model_type": "qwen3_vl_text", "tie_word_embeddings": True, "attention_bias": True}},
    "qwen3_vl_moe": {"model_type": "qwen3_vl_moe", "tie_word_embeddings": False, "vision_config": LOOKING,
                     "text_config": {**QWEN3_VL, **MOE, "model_type": "qwen3_vl_moe_text", "num_hidden_layers": 3,
                     "decoder_sparse_step": 1, "mlp_only_layers": [1], "norm_topk_prob": True}},
    "mistral3": {"model_type": "mistral3", "tie_word_embeddings": False, "text_config": WHOLE["ministral3"],
                 "vision_config": {**EYES, "model_type": "pixtral", "head_dim": 8}, "spatial_merge_size": 2},
    "gemma3": {"model_type": "gemma3", "mm_tokens_per_image": 1, "vision_config":
               {**EYES, "model_type": "siglip_vision_model"}, "text_config": {**UNCAPPED, "num_hidden_layers": 3,
               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}},
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


def oracle_of(folder: Path) -> Any:
    """The model of a folder as transformers computes it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits_of(model: Any, tokens: list[int], max_seq_len: int = 64) -> Tensor:
    """Of all rows of a text, in one pass."""
    runner = runner_for(model, max_seq_len=max_seq_len)
    runner.cache.open(0)
    return torch.from_numpy(runner.forward([Run(0, tokens)]).logits[0])


def check_likeliest(oracle: Any, prompt: list[int], text: list[int]) -> None:
    """The oracle says of each token of a text that none is likelier."""
    with torch.inference_mode():
        logits = oracle(input_ids=torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() <= 1e-4 * logits.abs().max()


class Pair:
    """One checkpoint, loaded twice."""

    def __init__(self, folder: Path) -> None:
        self.model: TorchModel = load_checkpoint(folder).model
        self.oracle = oracle_of(folder)
        # Sums over all tokens before: steps and chunks of transformers differ from each other by as much.
        has_states = any(block.recurrence is not None for block in self.model.config.blocks)
        self.tolerance = 5e-5 if has_states else 1e-5

    def expect(self, tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            return self.oracle(torch.tensor([tokens])).logits[0]

    def cache(self, backend: str) -> BlockCache:
        return BlockCache.of(self.model, backend, max_batch_size=4, max_seq_len=64)  # type: ignore[arg-type]

    def run(self, cache: BlockCache, runs: dict[int, list[int]], parents: Seq[list[int] | None] = ()) -> list[Tensor]:
        """One pass; logits of every row, by run. parents: per run, -1 = the cached context, None = a chain."""
        for slot, run in runs.items():
            cache.reserve(slot, len(run))
        trees = zip(runs.items(), parents or [None] * len(runs), strict=True)
        batch = pack([Run(slot, run, parents=tree) for (slot, run), tree in trees], cache)
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch, cache).hidden)
        return [logits[batch.run_starts[b] : batch.run_starts[b + 1]] for b in range(len(runs))]


@pytest.fixture(params=[*(f"{case}/{generation}" for case in CASES for generation in (4, 5)), *WHOLE])
def pair(request: pytest.FixtureRequest, write_checkpoint: Any, llama_raw: Raw) -> Pair:
    case, _, generation = request.param.partition("/")
    return Pair(write_checkpoint(WHOLE[case] if case in WHOLE else spell(case, int(generation), llama_raw)))


def tokens_of(num: int, seed: int) -> list[int]:
    return torch.randint(97, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max() + 1e-6


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
                assert_close(logits, expected[slot][start : start + len(run)], pair.tolerance)
                cache.keep({slot: range(len(run))})
        assert pair.run(cache, {}) == []  # a step may have nothing to run
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
        assert_close(scores.taps[k], expected[k][0], pair.tolerance)
    assert_close(pair.model.norm(scores.taps[num_layers]), expected[num_layers][0], pair.tolerance)


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
    assert_close(chain, pair.expect(context + plain)[-3:], pair.tolerance)
    for node in range(len(tree)):
        path = path_to(node, parents)
        assert_close(found[path], pair.expect(context + [tree[i] for i in path])[len(context) :], pair.tolerance)
    kept = path_to(6, parents)
    cache.keep({1: kept})
    text = context + [tree[i] for i in kept]
    (after,) = pair.run(cache, {1: [42, 43]})
    assert_close(after, pair.expect([*text, 42, 43])[-2:], pair.tolerance)


@pytest.mark.parametrize("case", SEEING)
def test_the_text_model_of_one_that_sees(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    """As transformers writes the whole, under the names of both its generations; what runs is said in a line."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SEEING[case])
    oracle = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            weight.copy_(torch.randn(weight.shape) * 0.15 + ("norm" in name and case != "gemma3"))
    oracle.save_pretrained(tmp_path / "now")
    tokens = tokens_of(30, 1)
    tolerance = 5e-5 if case.startswith("qwen") else 1e-5
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([tokens])).logits[0]
    found = load_file(tmp_path / "now" / "model.safetensors")
    if case.startswith("qwen3_5"):  # published files have what transformers leaves out, of further tokens
        found |= {"mtp.fc.weight": torch.ones(60, 120), "mtp.layers.0.mlp.gate.weight": torch.ones(5, 60)}
    assert any(part in name for name in found for part in ("vision_tower", "visual", "vision_embedder"))
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "config.json").write_text(json.dumps(SEEING[case]))
    save_file(_otherwise(found, case), tmp_path / "before" / "model.safetensors")
    for folder in ("now", "before"):
        assert_close(logits_of(load_checkpoint(tmp_path / folder).model, tokens), expected, tolerance)
        assert f"{tmp_path / folder} is a {case}, of which the text model runs alone, a " in caplog.text
        prompts = [tokens_of(3 + 4 * seed, seed) for seed in range(3)]
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        llm = LLM(str(tmp_path / folder), draft="lookup", pacing="fixed", dtype="float32", max_seq_len=64)
        for prompt, out in zip(prompts, llm.generate(prompts, params), strict=True):
            check_likeliest(oracle, prompt, out.token_ids)


def _otherwise(weights: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    """The same weights as the other generation of transformers writes them."""
    if "_vl" not in case:
        return {_other_name(name): weight for name, weight in weights.items()}
    names = {"model.language_model.": "model.", "model.visual.": "visual."}
    if not case.startswith("qwen3"):
        names = {before: now for now, before in names.items()}
    other = {}
    for name, weight in weights.items():
        start = next((start for start in names if name.startswith(start)), "")
        is_turned = ".mlp.experts." in name  # published as inputs x outputs
        other[names.get(start, "") + name.removeprefix(start)] = weight.mT.contiguous() if is_turned else weight
    return other


def _other_name(name: str) -> str:
    """What the other generation of transformers calls a tensor."""
    if name.startswith("language_model.model."):
        return "model." + name.replace("language_model.model.", "language_model.")
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.")
    return {"lm_head.weight": "language_model.lm_head.weight", "language_model.lm_head.weight": "lm_head.weight"}.get(
        name, name.removeprefix("model.")
    )


def test_layers_that_read_the_keys_of_others(write_checkpoint: Any) -> None:
    """Published files have keys and values of theirs all the same; what drafts with them needs the other layer, too."""
    folder = write_checkpoint(WHOLE["gemma4-small"])
    expected = Pair(folder).expect(tokens_of(20, 1))
    found = load_file(folder / "model.safetensors")
    more = {name.replace(".2.", ".5."): w * 7 for name, w in found.items() if ".2.self_attn.k_" in name}
    assert len(more) == 3
    save_file({**found, **more}, folder / "model.safetensors")
    model = load_checkpoint(folder).model
    cache = BlockCache.of(model, "paged", max_batch_size=1, max_seq_len=64)
    assert [pool.keys.shape[1:] for pool in cache.pools] == [(3, 8), (3, 8), (3, 16)]
    assert cache.shape.bytes_per_token("float32") == 4 * 2 * 3 * (8 + 8 + 16)
    assert_close(logits_of(model, tokens_of(20, 1)), expected)
    with pytest.raises(BadOption, match="layer 5 reads the keys of layer 2, which is not among them"):
        LLM(str(folder), draft="early_exit:skip=2", ops="reference")


@needs_native
@pytest.mark.parametrize("case", ["gpt_oss", *(case for case in WHOLE if case.startswith("gemma4"))])
def test_drafts_for_layers_of_several_kinds_change_nothing(write_checkpoint: Any, case: str) -> None:
    """In bfloat16, and with matrices of 8 bits: chains, trees, the first layers alone, and a shared beginning."""
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    sizes |= {"hidden_size_per_layer_input": 16} if WHOLE[case].get("hidden_size_per_layer_input") else {}
    folder = write_checkpoint({**WHOLE[case], **sizes})
    shared = tokens_of(40, 5)
    prompts = [shared[:33] + tokens_of(3 + seed, seed) * 2 for seed in range(4)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    for more in ({}, {"quantization": "int8:group=16"}) if "experts" not in case else ({},):
        options: dict[str, Any] = {"dtype": "bfloat16", "ops": "native", "max_seq_len": 96, "pacing": "fixed", **more}
        texts: list[list[list[int]]] = []
        for draft in ("none", "lookup", "random", "recycle", "early_exit"):
            outs = LLM(str(folder), draft=draft, **options).generate(prompts, params)
            texts.append([out.token_ids for out in outs])
            assert (sum(out.report.num_drafted for out in outs) > 0) == (draft != "none")
        assert texts[1:] == texts[:1] * 4


@pytest.mark.parametrize("ops", ["reference", NATIVE])
def test_gates_beyond_their_bounds(write_checkpoint: Any, weights_of: Any, ops: str) -> None:
    """Of gpt-oss, whose gates are bounded at 7: here they are some ten times as large."""
    weights = weights_of(WHOLE["gpt_oss"])
    large = {name: w * 30 for name, w in weights.items() if name.endswith(("gate_proj.weight", "up_proj.weight"))}
    folder, tokens = write_checkpoint(WHOLE["gpt_oss"], weights | large), tokens_of(20, 1)
    model = load_checkpoint(folder, ops=make_ops(ops, "cpu"), dtype="float32").model
    assert_close(logits_of(model, tokens), Pair(folder).expect(tokens))


@pytest.mark.parametrize("ops", ["reference", NATIVE])
def test_longrope_has_one_list_of_factors_for_all_texts(write_checkpoint: Any, ops: str) -> None:
    """The long one where a text may be longer than those of training, as transformers has it for such a text."""
    folder = write_checkpoint(WHOLE["phi3-long"] | {"original_max_position_embeddings": 16})
    oracle = oracle_of(folder)
    assert load_checkpoint(folder).model.config.max_positions == 16
    for longest, tokens in ((16, tokens_of(16, 1)), (17, tokens_of(17, 2)), (64, tokens_of(50, 3))):
        model = load_checkpoint(folder, ops=make_ops(ops, "cpu"), max_seq_len=longest, dtype="float32").model
        with torch.inference_mode():
            assert_close(logits_of(model, tokens, longest), oracle(torch.tensor([tokens])).logits[0])
    options: Raw = {"draft": "none", "dtype": "float32", "ops": ops}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    (out,) = LLM(str(folder), max_seq_len=64, **options).generate([tokens_of(20, 4)], params)
    check_likeliest(oracle, tokens_of(20, 4), out.token_ids)
    with pytest.raises(PromptTooLong):
        LLM(str(folder), **options).generate([tokens_of(20, 4)], params)


@pytest.mark.parametrize("ops", [pytest.param("reference", marks=pytest.mark.parity), NATIVE])
@pytest.mark.parametrize("case", WHOLE)
def test_greedy_texts_are_those_of_transformers(write_checkpoint: Any, case: str, ops: str) -> None:
    """Of 20 prompts, in float32; where two texts part, the oracle says that both tokens are as likely.

    They are drafted for too, which changes nothing.
    """
    folder = write_checkpoint(WHOLE[case])
    if ops == "native" and (reason := backend_of("native").supports(read_config(WHOLE[case]))) is not None:
        pytest.skip(reason)
    oracle = oracle_of(folder)
    prompts = [tokens_of(3 + seed, seed) for seed in range(20)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "ops": ops, "max_seq_len": 64}
    texts = [out.token_ids for out in LLM(str(folder), draft="none", **options).generate(prompts, params)]
    for prompt, text in zip(prompts, texts, strict=True):
        check_likeliest(oracle, prompt, text)
    if ops == "native":
        drafted = LLM(str(folder), draft="lookup", pacing="fixed", **options).generate(prompts, params)
        assert [out.token_ids for out in drafted] == texts
        assert sum(out.report.num_drafted for out in drafted) > 0
