"""What comparable engines call their options, and what does the same here: the answer to a peer's option name.

docs/coming-from.md shows the table, and a test holds the two together. A row says how a peer spells an option, on its
command line or as a keyword, and which options of ours do its work: a name (of EngineConfig, SamplingParams or a
command's parameter), a name with the value to give, or a command; none where there is nothing here. The spellings were
read in the peers' own sources and documentation of 2025 and 2026, options that were since removed included.

Longer than 400 lines: it is one table. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"
TRANSFORMERS, OPENVINO, OPENAI = "transformers", "OpenVINO GenAI", "the OpenAI API"
DOCUMENT = "docs/coming-from.md"
ENGINE_OPTION = "engine"  # the help panel of a flag that a variable FORERUN_<NAME> and the --config file know, too


@dataclass(frozen=True)
class PeerOption:
    """theirs: spellings of one option. ours: what to use here, () = nothing. note: what differs; may be empty."""

    peer: str
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    note: str


def _rows(peer: str, *rows: tuple[str, str, str]) -> list[PeerOption]:
    """Rows of one peer: spellings with spaces between them, ours with commas, note."""
    return [PeerOption(peer, tuple(a.split()), tuple(filter(None, b.split(", "))), c) for a, b, c in rows]


# Notes that several rows share: peers with the same answer are named together.
_CHUNKED = "long prompts always run in pieces, of this many tokens a step"
_CONTEXT = "prompt and output together"
_FILTERS = "the filters are temperature, top-k, top-p and min-p"
_FRACTION = "memory is asked for in tokens, not as a share of the device (forerun plan shows the bytes)"
_GRAMMAR = "output cannot be held to a grammar or schema yet"
_GREEDY = "0 is greedy (do_sample=False), above 0 draws"
_HUB = "a folder, or a hub id with the revision behind an @"
_HUB_FOLDER = "set the variable HF_HOME to the folder for what is downloaded"
_HUB_TOKEN = "set the variable HF_TOKEN"
_KV_DTYPE = "the KV cache has the model's type"
_LEN_OUTPUT = "ours counts the output alone, not the prompt"
_LORA = "there are no adapters, so merge them into the weights first"
_LOSSLESS = "acceptance is always exact, and no option trades the model's distribution for speed"
_NO_BEAMS = "there is no beam search"
_NO_CODE = "a checkpoint's own code is never run, and unknown architectures are refused"
_NO_GRAPHS = "operators always run eagerly, and there are no CUDA graphs"
_PREFIX = "on, unless it is switched off; for the paged cache"
_NO_SERVER = "there is no server yet, but forerun batch answers a file of requests"
_NO_STOP_TEXT = "a stop text is always cut from the output"
_NO_TREES = "drafts are chains, not trees yet"
_ONE_DEVICE = "a model runs in one process on one device"
_OUTPUTS = "the outputs of one prompt follow each other"
_OWN_DRAFT_DEVICE = "the draft model runs where the target runs"
_UNLIKELY = (
    "nothing stops a draft that looks unlikely; pacing=auto sets the length before a draft, from what was accepted"
)
_PROMPT_LOGPROBS = "log-probabilities are of the output alone"
_QUANTIZED = "weights are read in float32, float16 and bfloat16, quantised ones not yet"
_SHARED_VOCABULARY = "draft and target must share one vocabulary"
_SPECIAL = "special tokens are always left out of the text, and token_ids has them"
_TEMPLATE_FILE = "a file, not the name or the text of a template"
_STEP_TOKENS = "all rows of a pass; prefill_chunk_tokens bounds the prompt tokens among them"

_VLLM = _rows(
    VLLM,
    ("--model", "target", "a folder or a hub id"),
    (
        "--speculative-config",
        "draft, spec_length",
        "LLM(speculative_config={...}) works too, and its method ngram is lookup here",
    ),
    ("--num-speculative-tokens", "spec_length", "works as a keyword of LLM too"),
    ("--speculative-model", "draft", "a folder, a hub id, or a method such as lookup"),
    ("--ngram-prompt-lookup-max prompt_lookup_max", "draft=lookup:max_n=N", ""),
    ("--ngram-prompt-lookup-min prompt_lookup_min", "draft=lookup:min_n=N", ""),
    ("--spec-decoding-acceptance-method", "acceptance", "rejection_sampler is ratio; typical acceptance is not exact"),
    ("rejection_sample_method", "acceptance", "standard is ratio; block and synthetic are not there"),
    (
        "draft_sample_method",
        "draft=model:path=FOLDER,draft_temperature=0",
        "that is greedy; drafts are drawn as probabilistic does",
    ),
    (
        "--speculative-disable-by-batch-size num_speculative_tokens_per_batch_size",
        "",
        "spec_length does not change with the load",
    ),
    ("use_heterogeneous_vocab", "", _SHARED_VOCABULARY),
    ("parallel_drafting", "", "the drafters are listed by forerun drafters"),
    ("--speculative-draft-tensor-parallel-size draft_tensor_parallel_size", "", _ONE_DEVICE),
    ("--max-model-len", "max_seq_len", ""),
    ("--max-num-seqs", "max_batch_size", "sequences that run together"),
    ("--max-num-batched-tokens", "max_num_batched_tokens", _STEP_TOKENS),
    ("--enable-chunked-prefill", "prefill_chunk_tokens", _CHUNKED),
    ("--gpu-memory-utilization", "kv_cache_tokens", _FRACTION),
    ("--kv-cache-memory-bytes", "kv_cache_tokens", "in tokens of all sequences together"),
    ("--num-gpu-blocks-override", "kv_cache_tokens", "in tokens; a block holds 16"),
    ("--block-size", "", "a block of the paged cache holds 16 tokens"),
    ("--kv-cache-dtype", "", _KV_DTYPE),
    ("--enable-prefix-caching", "prefix_caching", _PREFIX),
    ("--swap-space --cpu-offload-gb", "", "neither cache nor weights move between devices"),
    ("--tensor-parallel-size -tp", "", _ONE_DEVICE),
    ("--pipeline-parallel-size -pp", "", _ONE_DEVICE),
    ("--data-parallel-size -dp", "", _ONE_DEVICE),
    ("--distributed-executor-backend", "", _ONE_DEVICE),
    ("--enforce-eager", "", _NO_GRAPHS),
    ("--compilation-config -O", "", "nothing is compiled when a model is loaded"),
    ("--quantization -q", "", _QUANTIZED),
    ("--load-format", "", "weights are read from safetensors only"),
    ("--generation-config", "generation_config", "none or model, where their auto is model and their vllm is none"),
    ("--override-generation-config", "", "give the values as options, such as --temperature"),
    ("--chat-template", "chat_template", _TEMPLATE_FILE),
    ("--revision", "target=ORG/NAME@REVISION", _HUB),
    ("--trust-remote-code", "", _NO_CODE),
    ("--hf-token", "", _HUB_TOKEN),
    ("--download-dir", "", _HUB_FOLDER),
    ("--hf-overrides --rope-scaling", "", "the checkpoint's config.json decides; change it there"),
    ("--tokenizer", "", "the tokenizer is tokenizer.json beside the weights"),
    ("--enable-lora --lora-modules", "", _LORA),
    ("--host --port --api-key --served-model-name", "", _NO_SERVER),
    ("n", "n", _OUTPUTS),
    ("prompt_logprobs", "", _PROMPT_LOGPROBS),
    ("structured_outputs", "", _GRAMMAR),
    ("allowed_token_ids", "", "logit_bias raises or bans single ids"),
    ("include_stop_str_in_output", "", _NO_STOP_TEXT),
    ("skip_special_tokens", "", _SPECIAL),
)

_SGLANG = _rows(
    SGLANG,
    ("--model-path --model", "target", "a folder or a hub id"),
    (
        "--speculative-algorithm",
        "draft",
        "STANDALONE is a draft model's folder, NGRAM is nearest to lookup; no EAGLE yet",
    ),
    ("--speculative-draft-model-path --speculative-draft-model", "draft", "a folder or a hub id"),
    ("--speculative-draft-model-revision", "draft=ORG/NAME@REVISION", _HUB),
    ("--speculative-num-steps", "spec_length", ""),
    ("--speculative-num-draft-tokens", "spec_length", "of a chain theirs is one more, since it counts the bonus token"),
    ("--speculative-eagle-topk", "", _NO_TREES),
    ("--speculative-use-rejection-sampling", "acceptance=ratio", "the default without a seed"),
    ("--speculative-accept-threshold-single --speculative-accept-threshold-acc", "", _LOSSLESS),
    ("--speculative-adaptive", "pacing=auto", "on, where no spec_length is given"),
    ("--speculative-token-map", "", _SHARED_VOCABULARY),
    ("--speculative-ngram-max-match-window-size", "draft=lookup:max_n=N", ""),
    ("--speculative-ngram-min-match-window-size", "draft=lookup:min_n=N", ""),
    ("--speculative-ngram-max-trie-depth", "draft=lookup:max_n=N", "lookup keeps no trie, it searches the text so far"),
    ("--speculative-ngram-min-bfs-breadth --speculative-ngram-max-bfs-breadth", "", _NO_TREES),
    ("--speculative-ngram-capacity", "", "lookup keeps no trie, it searches the text so far"),
    ("--speculative-draft-model-quantization", "", _QUANTIZED),
    ("--context-length", "max_seq_len", _CONTEXT),
    ("--max-running-requests", "max_batch_size", "sequences that run together"),
    ("--max-total-tokens", "kv_cache_tokens", ""),
    ("--mem-fraction-static", "kv_cache_tokens", _FRACTION),
    ("--chunked-prefill-size", "prefill_chunk_tokens", _CHUNKED),
    ("--max-prefill-tokens", "prefill_chunk_tokens", "prompt tokens of a step, of all sequences together"),
    ("--page-size", "", "a block of the paged cache holds 16 tokens"),
    ("--kv-cache-dtype", "", _KV_DTYPE),
    ("--disable-radix-cache", "prefix_caching", _PREFIX),
    ("--disable-cuda-graph", "", _NO_GRAPHS),
    ("--attention-backend", "ops", "which operators compute, attention among them"),
    (
        "--enable-deterministic-inference",
        "ops=native",
        "the same bits in any batch; the default on a CPU (elsewhere reference_row_by_row, slow)",
    ),
    ("--tensor-parallel-size --tp-size --tp", "", _ONE_DEVICE),
    ("--pipeline-parallel-size --pp-size", "", _ONE_DEVICE),
    ("--data-parallel-size --dp-size", "", _ONE_DEVICE),
    ("--quantization", "", _QUANTIZED),
    ("--load-format", "", "weights are read from safetensors only"),
    ("--random-seed", "seed", "of a request; without one a seed is drawn and shown"),
    ("--sampling-defaults", "generation_config", "model is the same, openai is none"),
    ("--chat-template", "chat_template", _TEMPLATE_FILE),
    ("--revision", "target=ORG/NAME@REVISION", _HUB),
    ("--trust-remote-code", "", _NO_CODE),
    ("--download-dir", "", _HUB_FOLDER),
    ("--json-model-override-args", "", "the checkpoint's config.json decides; change it there"),
    ("--tokenizer-path", "", "the tokenizer is tokenizer.json beside the weights"),
    ("--enable-lora --lora-paths", "", _LORA),
    ("--host --port --api-key --served-model-name", "", _NO_SERVER),
    ("text input_ids", "prompt", "a text or ids"),
    ("max_new_tokens", "max_tokens", ""),
    ("min_new_tokens", "min_tokens", ""),
    ("return_logprob top_logprobs_num", "logprobs", "0 is the token's own, N adds the N likeliest"),
    ("n", "n", _OUTPUTS),
    ("json_schema regex ebnf structural_tag", "", _GRAMMAR),
    ("no_stop_trim", "", _NO_STOP_TEXT),
    ("skip_special_tokens", "", _SPECIAL),
)

_LLAMA_CPP = _rows(
    LLAMA_CPP,
    ("-m --model", "target", "a folder with safetensors (GGUF files are not read)"),
    ("-md --model-draft --spec-draft-model", "draft", "a folder with safetensors (GGUF files are not read)"),
    ("-hf -hfr --hf-repo", "target=ORG/NAME", "a repository with safetensors (GGUF files are not read)"),
    ("-hfd -hfrd --hf-repo-draft --spec-draft-hf", "draft=ORG/NAME", "with safetensors (GGUF files are not read)"),
    ("-hff --hf-file", "", "a checkpoint is read whole (GGUF files are not read)"),
    ("-hft --hf-token", "", _HUB_TOKEN),
    ("--offline", "", "set the variable HF_HUB_OFFLINE=1"),
    (
        "--spec-type",
        "draft",
        "draft-simple is a draft model's folder, ngram-simple is lookup; the others are not there",
    ),
    ("--spec-draft-n-max --draft-max --draft-n", "spec_length", "--draft names the drafter"),
    ("--spec-draft-n-min --draft-min --draft-n-min", "", "a draft is never too short to be used"),
    ("--spec-draft-p-min --draft-p-min", "", _UNLIKELY),
    ("--spec-draft-p-split --draft-p-split", "", _NO_TREES),
    (
        "--spec-draft-sampling",
        "draft=model:path=FOLDER,draft_temperature=0",
        "that is greedy; drafts are drawn as probabilistic does",
    ),
    ("--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft", "", _OWN_DRAFT_DEVICE),
    ("--spec-draft-device -devd --device-draft", "", _OWN_DRAFT_DEVICE),
    (
        "--spec-ngram-simple-size-n --spec-ngram-size-n",
        "draft=lookup:max_n=N",
        "shorter matches count too, down to min_n",
    ),
    ("--spec-ngram-simple-size-m --spec-ngram-size-m", "spec_length", ""),
    ("--spec-ngram-simple-min-hits --spec-ngram-min-hits", "", "lookup takes the last occurrence, however rare"),
    (
        "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic",
        "",
        "lookup searches the text so far and keeps no files",
    ),
    ("-c --ctx-size", "max_seq_len", _CONTEXT),
    ("-n --predict --n-predict", "max_tokens", "tokens of the output, and -1 is not taken"),
    ("-p --prompt", "prompt", ""),
    ("-f --file", "prompt_file", "a text; or .jsonl with one prompt per line"),
    ("--temp", "temperature", "1 unless given, theirs is 0.8"),
    ("-s", "seed", "leave it out for a random one"),
    ("-l", "logit_bias", "ID=VALUE instead of ID+VALUE"),
    ("--repeat-penalty", "repetition_penalty", "over the whole prompt and output"),
    ("--repeat-last-n", "", "penalties look at the whole prompt or output"),
    ("-r --reverse-prompt", "stop", "the text is cut from the output"),
    ("--typical --typical-p", "", _FILTERS),
    ("--top-nsigma --top-n-sigma", "", _FILTERS),
    ("--xtc-probability --xtc-threshold", "", _FILTERS),
    ("--dry-multiplier", "", "penalties are repetition, presence and frequency"),
    ("--mirostat --mirostat-lr --mirostat-ent --dynatemp-range", "", _FILTERS),
    ("--samplers --sampling-seq --sampler-seq", "", "the order is fixed, penalties, temperature, top-k, min-p, top-p"),
    ("--grammar --grammar-file -j --json-schema -jf --json-schema-file", "", _GRAMMAR),
    ("-t --threads -tb --threads-batch", "", "set the variable FORERUN_NUM_THREADS"),
    (
        "-ngl --gpu-layers --n-gpu-layers",
        "device",
        "cuda takes the whole model and cpu none of it, layers are not split",
    ),
    ("-dev", "device", "auto, cpu or cuda"),
    ("-sm --split-mode -ts --tensor-split -mg --main-gpu", "", _ONE_DEVICE),
    ("-b --batch-size -ub --ubatch-size", "prefill_chunk_tokens", _CHUNKED),
    ("-np --parallel", "max_batch_size", "sequences that run together"),
    ("-ctk --cache-type-k -ctv --cache-type-v", "", _KV_DTYPE),
    ("-fa --flash-attn", "", "attention is the operators' own matter"),
    ("--keep --context-shift", "", "nothing is dropped from the context, a request ends at max_seq_len"),
    ("--prompt-cache --cache-prompt --cache-reuse", "prefix_caching", _PREFIX),
    ("--lora --lora-scaled", "", _LORA),
    ("-cnv --conversation -i --interactive -if --interactive-first", "forerun chat", ""),
    ("-no-cnv --no-conversation", "forerun generate", ""),
    ("-sys --system-prompt", "system", ""),
    ("--jinja", "", "chat templates are always Jinja"),
    ("--chat-template-file", "chat_template", ""),
    ("--chat-template", "chat_template", _TEMPLATE_FILE),
    ("--no-display-prompt", "", "the prompt is never printed"),
    ("--host --port --api-key", "", _NO_SERVER),
)

_TRANSFORMERS = _rows(
    TRANSFORMERS,
    ("pretrained_model_name_or_path", "target", "a folder or a hub id"),
    ("assistant_model", "draft", "a folder or a hub id"),
    ("assistant_tokenizer assistant_lookbehind target_lookbehind", "", _SHARED_VOCABULARY),
    ("assistant_early_exit", "", "the target's own layers do not draft yet"),
    ("assistant_ensemble_weight", "", _LOSSLESS),
    ("num_assistant_tokens", "spec_length", ""),
    ("num_assistant_tokens_schedule", "pacing", "fixed is their constant; there is no heuristic"),
    ("assistant_confidence_threshold", "", _UNLIKELY),
    ("prompt_lookup_num_tokens", "draft=lookup, spec_length", ""),
    ("max_matching_ngram_size", "draft=lookup:max_n=N", ""),
    ("use_mtp speculation_type", "", "the drafters are listed by forerun drafters"),
    ("max_new_tokens", "max_tokens", ""),
    ("min_new_tokens", "min_tokens", ""),
    ("max_length", "max_tokens", _LEN_OUTPUT),
    ("min_length", "min_tokens", _LEN_OUTPUT),
    ("do_sample", "temperature", _GREEDY),
    ("num_beams early_stopping length_penalty num_beam_groups diversity_penalty", "", _NO_BEAMS),
    ("num_return_sequences", "n", _OUTPUTS),
    ("no_repeat_ngram_size", "", "penalties are repetition, presence and frequency"),
    ("typical_p epsilon_cutoff eta_cutoff top_h", "", _FILTERS),
    ("stop_strings", "stop", "the text is cut from the output"),
    ("eos_token_id", "stop_token_ids", "besides the ids that the checkpoint names"),
    ("bad_words_ids", "bad_words", "texts, not ids"),
    ("sequence_bias", "logit_bias", "of single ids"),
    ("suppress_tokens", "logit_bias", "ids to -inf"),
    ("output_scores output_logits", "logprobs", "of the model's own distribution, before temperature and penalties"),
    ("return_dict_in_generate", "", "LLM.generate always returns RequestOutput"),
    ("streamer", "LLM.stream", ""),
    ("logits_processor", "", _FILTERS),
    ("stopping_criteria max_time", "", "stop, stop_token_ids and max_tokens end an output"),
    ("guidance_scale", "", "there is no guidance"),
    ("use_cache", "", "the cache is always used"),
    ("cache_implementation", "kv_cache_backend", "paged or contiguous"),
    ("pad_token_id", "", "nothing is padded"),
    ("torch_dtype", "dtype", "auto, float32 or bfloat16"),
    ("device_map", "device", "auto, cpu or cuda, for the whole model"),
    ("attn_implementation", "ops", "which operators compute, attention among them"),
    ("quantization_config load_in_4bit load_in_8bit", "", _QUANTIZED),
    ("revision", "target=ORG/NAME@REVISION", _HUB),
    ("trust_remote_code", "", _NO_CODE),
    ("token", "", _HUB_TOKEN),
    ("cache_dir", "", _HUB_FOLDER),
    ("local_files_only", "", "set the variable HF_HUB_OFFLINE=1"),
)

_OPENVINO = _rows(
    OPENVINO,
    ("models_path", "target", "a folder with safetensors (OpenVINO's own format is not read)"),
    ("draft_model", "draft", "a folder or a hub id; works as a keyword of LLM too"),
    ("prompt_lookup", "draft=lookup", ""),
    ("num_assistant_tokens", "spec_length", ""),
    ("assistant_confidence_threshold", "", _UNLIKELY),
    ("max_ngram_size", "draft=lookup:max_n=N", ""),
    ("branching_factor tree_depth", "", _NO_TREES),
    ("max_new_tokens", "max_tokens", ""),
    ("min_new_tokens", "min_tokens", ""),
    ("max_length", "max_tokens", _LEN_OUTPUT),
    ("do_sample", "temperature", _GREEDY),
    ("rng_seed", "seed", "without one a seed is drawn and shown"),
    ("num_beams num_beam_groups diversity_penalty length_penalty", "", _NO_BEAMS),
    ("num_return_sequences", "n", _OUTPUTS),
    ("no_repeat_ngram_size", "", "penalties are repetition, presence and frequency"),
    ("stop_strings", "stop", "the text is cut from the output"),
    ("include_stop_str_in_output", "", _NO_STOP_TEXT),
    ("eos_token_id", "stop_token_ids", "besides the ids that the checkpoint names"),
    ("echo", "", "the prompt is never part of the text"),
    ("structured_output_config", "", _GRAMMAR),
    ("adapters", "", _LORA),
    ("apply_chat_template", "LLM.chat", "LLM.generate takes a prompt as it is"),
    ("scheduler_config", "kv_cache_tokens, max_batch_size, prefill_chunk_tokens", "options of the engine itself"),
    ("cache_size", "kv_cache_tokens", "in tokens, not in GB"),
    ("num_kv_blocks", "kv_cache_tokens", "in tokens; a block holds 16"),
    ("max_num_seqs", "max_batch_size", "sequences that run together"),
    ("max_num_batched_tokens", "max_num_batched_tokens", _STEP_TOKENS),
    ("dynamic_split_fuse", "prefill_chunk_tokens", _CHUNKED),
    ("enable_prefix_caching", "prefix_caching", _PREFIX),
    (
        "use_cache_eviction cache_eviction_config",
        "",
        "nothing is dropped from the cache, which would change the output",
    ),
    ("use_sparse_attention", "", "attention is never approximated"),
)

_OPENAI = _rows(
    OPENAI,
    ("max_completion_tokens", "max_tokens", ""),
    ("top_logprobs", "logprobs", "0 is the token's own, N adds the N likeliest"),
    ("n", "n", _OUTPUTS),
    ("response_format", "", _GRAMMAR),
    ("stream stream_options", "LLM.stream", "on the command line a single prompt is always streamed"),
)

TABLE: tuple[PeerOption, ...] = (*_VLLM, *_SGLANG, *_LLAMA_CPP, *_TRANSFORMERS, *_OPENVINO, *_OPENAI)

# Values of options that are called the same here: the option, a pattern of peers' values, what to do instead.
_LISTED = "there is no such drafter yet, and forerun drafters lists those there are"
VALUES = (
    (
        "draft",
        r"\[?ngram\]?|ngram[-_].*|prompt[-_]lookup",
        "what looks up n-grams is lookup here, with options as in lookup:max_n=3",
    ),
    ("draft", r"draft[-_](model|simple)|standalone", "name the draft model itself, by its folder or hub id"),
    ("draft", r"(draft[-_])?(eagle3?|medusa|nextn|mlp_speculator|hydra|suffix|dflash|pard)|([\w-]+[-_])?mtp", _LISTED),
    (
        "draft",
        r"\d+",
        "it names the drafter, and llama.cpp's number of tokens is spec_length here (--spec-length {value})",
    ),
    ("generation_config", "auto", "vLLM's auto is model here"),
    ("generation_config", "vllm", "vLLM's vllm is none here"),
    ("generation_config", "openai", "SGLang's openai is none here"),
    ("dtype", "bf16", "write bfloat16"),
    ("dtype", "fp32|f32|float", "write float32"),
    (
        "dtype",
        "float16|fp16|f16|half",
        "weights stored in float16 are read and computed in another type, so choose auto, float32 or bfloat16",
    ),
)


# ----------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Place:
    """Where an option of ours is. text: how it is written there. home: whose it is, "" = of where it was looked for."""

    text: str
    home: str = ""


def normal(spelling: str) -> str:
    """`--max-model-len`, `max-model-len` and `max_model_len` are one name; a short flag such as `-md` is itself."""
    is_short = spelling.startswith("-") and not spelling.startswith("--")
    return spelling if is_short else spelling.removeprefix("--").replace("-", "_")


def answer(spelling: str, find: Callable[[str], Place]) -> str | None:
    """One sentence on a peer's option: what it is here, or that it is not. None where no peer has the name.

    find: the place of a name of ours, or of a name=value. Peers whose rows agree are named together.
    """
    agreeing: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for row in TABLE:
        if normal(spelling) in map(normal, row.theirs):
            agreeing.setdefault((row.ours, row.note), []).append(
                f"{row.peer}'" if row.peer[-1] == "s" else f"{row.peer}'s"
            )
    if not agreeing:
        return None
    parts = []
    for (ours, note), peers in agreeing.items():
        places = [Place(entry) if entry.startswith(_WHOLE) else find(entry) for entry in ours]
        what = f"is {_written(places)} here" if ours else "has no counterpart here"
        parts.append(f"{_joined(peers)} {spelling} {what}" + (f": {note}" if note else ""))
    return "; ".join(parts) + (f"; see {DOCUMENT}" if ": " in parts[-1] else f": see {DOCUMENT}")


def by_name(name: str, known: Collection[str], home: str, variable_prefix: str = "") -> str | None:
    """The answer to an unknown keyword or key.

    known: names that are possible where it was found; any other name of ours belongs to `home`. variable_prefix: of
    environment variables, which are written in capitals.
    """

    def find(entry: str) -> Place:
        ours, _, value = entry.partition("=")
        written = f'{ours}="{value}"' if value else ours
        if ours not in known:
            return Place(written, _HOMES.get(ours, home))
        return Place(f"{variable_prefix}{ours.upper()}{entry[len(ours) :]}" if variable_prefix else written)

    return answer(name, find)


def by_value(name: str, value: str) -> str | None:
    """The answer to a peer's value for an option that is called the same here; None where nobody has it."""
    for option, pattern, text in VALUES:
        if option == name and re.fullmatch(pattern, value, re.IGNORECASE):
            return f"{name}={value!r} is not possible: {text.format(value=value)}"
    return None


def on_command_line(words: Seq[str], option: str, context: Any) -> str | None:
    """The answer to an option that a command does not have: one of another command of ours, or of a peer.

    words: the command line. option: what the parser refused. context: click's, of the command that was parsed; its
    root says what exists where.
    """
    root, command, typed = context.find_root(), context.command_path, _whole_word(words, option)
    parsers = dict(_commands(root.command, root.command_path))
    elsewhere = _of_another_command(typed, command, parsers)
    if elsewhere is not None and elsewhere.runs_engine:
        return elsewhere.text
    commands = {path: _names(parser) for path, parser in parsers.items()}

    def find(entry: str) -> Place:
        ours, _, value = entry.partition("=")
        for path in (command, *commands):
            flag = commands.get(path, {}).get(ours)
            if flag is not None:
                text = f"{flag} {value}".rstrip() if flag.startswith("-") else f"the argument {value or flag}"
                return Place(text, "" if path == command else path)
        return Place(entry, "the --config file")

    return answer(typed, find) or (None if elsewhere is None else elsewhere.text)


_WHOLE = ("forerun ", "LLM.")  # a command or a method is written the same everywhere
_HOMES = {"prompt": "LLM.generate", "prompt_file": "forerun generate", "system": "forerun chat"}


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each command with its path, as it is typed."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{path} {name}")


def _names(command: Any) -> Mapping[str, str]:
    """A command's parameters: name -> flag, or the name of an argument in capitals."""
    names = {}
    for param in command.params:
        if param.param_type_name == "option":
            names[param.name] = param.opts[0]
        else:
            names[param.name.removesuffix("s")] = param.name.upper()
    return names


@dataclass(frozen=True)
class _Elsewhere:
    """The answer to a flag of another command. runs_engine: that command is for running models, as peers' are."""

    text: str
    runs_engine: bool


def _of_another_command(flag: str, command: str, parsers: Mapping[str, Any]) -> _Elsewhere | None:
    """The answer to a flag that `command` has not and another one has; the nearest below it, else the first."""
    homes = {
        path: param
        for path, parser in parsers.items()
        for param in parser.params
        if param.param_type_name == "option" and normal(flag) in map(normal, param.opts)
    }
    if not homes or command in homes:
        return None
    home = next((path for path in homes if path.startswith(f"{command} ")), next(iter(homes)))
    text = f"{flag} is an option of {home}, "
    arguments = [p.name for p in parsers[command].params if p.param_type_name == "argument"]
    if homes[home].name in arguments:
        text += f"and the argument {homes[home].name.upper()} of {command}: write it without {flag}"
    elif home.startswith(f"{command} "):
        text += f"not of {command}: write it behind {home.rpartition(' ')[2]}"
    else:
        text += f"not of {command}: {_way_out(homes[home], parsers[command], home)}"
    return _Elsewhere(text, any(_is_of_engine(param) for param in parsers[home].params))


def _way_out(param: Any, parser: Any, home: str) -> str:
    """An option of the engine can be told without a flag to every command that starts one."""
    if not _is_of_engine(param) or not any(map(_is_of_engine, parser.params)):
        return f"leave it out or use {home}"
    has_file = any(p.name == "config" for p in parser.params)
    return f"set FORERUN_{param.name.upper()}" + (" or use --config" if has_file else "")


def _is_of_engine(param: Any) -> bool:
    return getattr(param, "rich_help_panel", None) == ENGINE_OPTION


def _whole_word(words: Seq[str], option: str) -> str:
    """What was typed, without a value behind `=`: of `-md` the parser refuses `-m`."""
    for word in words:
        typed = word.partition("=")[0]
        if typed == option or (option[1:2] != "-" and typed[:2] == option):
            return typed
    return option


def _written(places: Seq[Place]) -> str:
    """Places that share a home are joined before it is named."""
    if len({place.home for place in places}) == 1:
        home = places[0].home
        return _joined([place.text for place in places]) + (f" of {home}" if home else "")
    return _joined([_written([place]) for place in places])


def _joined(texts: Seq[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last
