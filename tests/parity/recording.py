"""What the engine computed before a change, bit for bit, and whether it computes the same behind it.

    python tests/parity/recording.py record FILE       write digests of everything below to FILE
    python tests/parity/recording.py compare FILE      compute it again: a line for each difference, and exit 1

FORERUN_ISA chooses the kernels, and recorded/ISA.json is what they computed. For each model (small random ones of all
kinds of blocks and files, the shipped pair, SmolLM2's 4-bit file) and each drafter that steers by no clock, five
requests run in one batch, greedy and sampled by several rules: token ids, log-probabilities, the bits of every hidden
row and of its logits, and the details of every round. `--only TEXT` takes the cases whose name has it.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forerun import LLM, SamplingParams, native
from forerun.drafters import Target
from forerun.engine.request import Request
from forerun.models.named import DATA
from forerun.types import StepReport
from methods import NEEDS
from models.gguf_vocabularies import smollm2
from parity import small_models
from parity.bitwise import Recorder

WITH_HEADS = ("blockwise", "dflash", "eagle", "hydra", "medusa", "pass")
TEXT = "the quick brown fox jumps over the lazy dog. the quick brown fox "
PROMPTS = [
    TEXT,
    TEXT * 2 + "jumps over",
    "a",
    "def fib(n):\n    return fib(n - 1) + fib(n - 2)\n\ndef fib(",
    "xyzxyzxyzxyz",
]
SHIPPED, SMOLLM2, FLOATS, TYPES = "shipped", "smollm2", "8-bit floats", "many types"  # models that are no small ones
Params = Mapping[str, Any]
PARAMS: list[Params] = [
    {"temperature": 0.0, "seed": 5, "logprobs": 2},
    {"temperature": 0.9, "seed": 7, "logprobs": 1},
    {"temperature": 1.0, "seed": 8, "acceptance": "ratio", "top_p": 0.9},
    {"temperature": 0.0, "seed": 6, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}},
    {"temperature": 0.8, "seed": 9, "top_k": 20, "min_p": 0.02, "presence_penalty": 0.2},
]
CHAINS = ("ratio", "block", "lenience", "lenience:correction=target", "typical")  # rules that judge them
TREES = ("ratio", "kseq", "traversal", "typical:delta=0.9", "match")
BEAMS: list[Params] = [
    {"temperature": 0.0, "num_beams": width, "n": num, "length_penalty": penalty}
    for width, num, penalty in ((2, 2, 1.0), (4, 2, 0.6), (3, 1, 1.0), (2, 1, 2.0), (5, 3, 1.0))
]
MODEL = "model:path={draft},quantization=none"
TREE = "tree:of=(model:path={draft}),shape=2x2,draws=independent"
ALONE = "max_cached_requests=0"  # which text ends first, and is searched by the others, is up to the clock
DRAFTERS = {
    **{name: name for name in ("none", "lookup", "random", "ngram", "recycle", "lookahead", "prediction")},
    "suffix": f"suffix:{ALONE}",
    "suffix tree": f"suffix:shape=tree,{ALONE}",
    "early_exit": "early_exit:layers=1",
    "model": MODEL,
    "tree": f"tree:of=({MODEL})",
    "tree drawn": TREE,
    "cascade": "cascade:of=(model:path={draft})",
    "mixed": "mixed:of=lookup+(model:path={draft})",
    "several": "several:of=lookup+(model:path={draft},draft_temperature=0.5)",
    "self": "self:quantization=int8:group=16",
    **{name: f"{name}:path={{heads}}/{name}" for name in WITH_HEADS},
}
FEW = ("none", "suffix tree", "model", "recycle")  # of models that differ in their blocks alone
PACING = ("confidence", "svip", "entropy:h_ref=0.5", "adaedl:threshold=0.1")
DENSE = {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}}
ROUNDED = {
    "int8": {"dtype": "bfloat16", "quantization": "int8:group=16"},
    "int4": {"dtype": "bfloat16", "quantization": "int4:group=32"},
}
BY_TORCH = {"float32": DENSE["float32"], "row by row": {"dtype": "float32", "ops": "reference_row_by_row"}}


@dataclass(frozen=True)
class Case:
    """An engine and the five requests that it serves. model: which pair; drafter: with places for its paths."""

    name: str
    model: str
    drafter: str
    options: Mapping[str, Any]
    num_tokens: int = 20
    params: Seq[Params] = field(default_factory=lambda: PARAMS)

    @property
    def has_head(self) -> bool:
        return self.drafter.partition(":")[0] in WITH_HEADS


class Folders:
    """What the cases run, each written when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def pair(self, model: str) -> tuple[Path, Path]:
        """A target and its draft model: of a small model one that mostly agrees with it."""
        if model == SHIPPED:
            return DATA / "target", DATA / "draft"
        if model in small_models.RAW:
            return self._small(model)
        makes = {FLOATS: self._floats, TYPES: self._gguf, SMOLLM2: smollm2}
        target = makes[model]()
        return target, target

    def _small(self, kind: str) -> tuple[Path, Path]:
        name = kind.replace(", ", "-").replace(" ", "-")
        target, draft = self._root / name, self._root / f"{name}-draft"
        if not target.exists():
            small_models.write(target, kind)
            small_models.write(draft, kind, noise=0.03)
        return target, draft

    def heads(self) -> Path:
        """Random heads of the small llama, a folder for each method."""
        made = self._root / "heads"
        if not made.exists():
            made.mkdir()
            llm = LLM(str(self._small("llama")[0]), draft="none", dtype="float32")
            target = Target.of(llm.checkpoint.model, llm.opened)
            for name in WITH_HEADS:
                NEEDS[name](target, made)
        return made

    def _floats(self) -> Path:
        made = self._root / "floats"
        return made if made.exists() else small_models.write_floats(made)

    def _gguf(self) -> Path:
        made = self._root / "many-types.gguf"
        return made if made.exists() else small_models.write_gguf(made)


def cases() -> Iterator[Case]:
    """Yield everything that is recorded."""
    is_native = native.isa() != "reference"
    for family in small_models.LIKE_LLAMA:
        yield from _of_a_family(family, {**DENSE, **ROUNDED} if is_native else BY_TORCH)
    for kind in [*small_models.OTHERS, *small_models.ENCODERS]:
        for way, options in (DENSE if is_native else BY_TORCH).items():
            for name in FEW:
                if name != "recycle" or kind in small_models.OTHERS:
                    yield Case(f"{kind}, {way}, {name}", kind, DRAFTERS[name], options)
    yield from _of_rules_and_pacing(DENSE["float32"])
    if is_native:
        yield from _of_other_memory()
        yield from _of_whole_models()


def _of_a_family(family: str, ways: Mapping[str, Mapping[str, Any]]) -> Iterator[Case]:
    for way, options in ways.items():
        for name, drafter in DRAFTERS.items():
            if name in WITH_HEADS and family != "llama":
                continue
            if name in ("dflash", "eagle", "self") and way.startswith("int"):
                continue  # their rows are shorter than a group, or rounded already
            yield Case(f"{family}, {way}, {name}", family, drafter, options)


def _of_rules_and_pacing(options: Mapping[str, Any]) -> Iterator[Case]:
    for name, drafter, rules in (("chains", MODEL, CHAINS), ("trees", TREE, TREES)):
        params = [{"temperature": (1.0, 0.7)[i % 2], "seed": i, "acceptance": rule} for i, rule in enumerate(rules)]
        yield Case(f"rules of {name}", "qwen2", drafter, options, params=params)
    greedy = [{"temperature": 0.0, "acceptance": f"lenience:l={l}"} for l in (0.3, 0.5, 0.7, 0.9, 1.0)]  # noqa: E741
    yield Case("lenience, greedy", "qwen2", MODEL, options, params=greedy)
    yield Case("beams", "qwen2", MODEL, options, params=BEAMS)
    for policy in PACING:
        yield Case(f"pacing, {policy}", "qwen2", MODEL, {**options, "pacing": policy})


def _of_other_memory() -> Iterator[Case]:
    """Caches of 8 bits, experts of fewer, and files of other numbers."""
    for kind in ("llama", "qwen2", "sinks", "t5"):
        for name in ("none", "model"):
            for way, options in DENSE.items():
                more = {**options, "kv_cache_dtype": "int8"}
                yield Case(f"{kind}, {way}, int8 cache, {name}", kind, DRAFTERS[name], more)
    for kind in ("experts", "t5"):
        for way, options in ROUNDED.items():
            yield Case(f"{kind}, {way}, suffix", kind, DRAFTERS["suffix"], options)
    for model in (FLOATS, TYPES):
        for way, options in DENSE.items():
            yield Case(f"{model}, {way}, suffix", model, DRAFTERS["suffix"], options)


def _of_whole_models() -> Iterator[Case]:
    for name in ("none", "suffix tree", "recycle", "model", "tree", "early_exit", "lookahead"):
        drafter = DRAFTERS[name].replace("layers=1", "layers=3")
        for way in ("bfloat16", "float32"):
            yield Case(f"{SHIPPED}, {way}, {name}", SHIPPED, drafter, DENSE[way], 10)
        if smollm2() is not None:
            yield Case(f"{SMOLLM2}, {name}", SMOLLM2, drafter, {}, 10)
    if smollm2() is not None:
        yield Case(f"{SMOLLM2}, eagle", SMOLLM2, "eagle:path=smollm2", {}, 10)


def run(case: Case, folders: Folders) -> dict[str, str]:
    """Serve the five requests in one batch, and return a digest of each kind of result."""
    target, draft = folders.pair(case.model)
    drafter = case.drafter.format(draft=draft, heads=folders.heads() if case.has_head and "{" in case.drafter else "")
    sizes = {"spec_length": 4, "max_batch_size": 5, "max_seq_len": 256, "prefill_stretch": 0}
    llm = LLM(str(target), draft=drafter, **{**sizes, **case.options})
    reports: list[StepReport] = []
    llm.listen(reports.append, detail=True)
    engine = llm.engine
    # How much of a text a draft model catches up with in a step is up to the clock: here as much as at first, always.
    engine.stepper.catchup.observe = lambda report: None  # type: ignore[method-assign]
    recorder = Recorder(engine.runner)
    searches = "num_beams" in case.params[0]
    requests = list[Request]()
    for text, each in zip(PROMPTS, case.params, strict=True):
        params = SamplingParams(max_tokens=case.num_tokens, ignore_eos=not searches, **each)
        requests += engine.add_all(engine.tokenizer.encode(text), params)
    while any(request.seq.finish_reason is None for request in requests):
        for request in engine.step():
            assert request.error is None, request.error
    seqs = [request.seq for request in requests]
    parts: dict[str, Any] = {
        "ids": [seq.output_ids for seq in seqs],
        "logprobs": [
            [(e.token_id, e.logprob.hex(), [(i, v.hex()) for i, v in e.top]) for e in s.logprobs] for s in seqs
        ],
    }
    if searches:
        parts["scores"] = [(float(request.score or 0).hex(), request.cumulative_logprob) for request in requests]
    else:
        rows = [recorder.of(seq.id, len(seq.tokens) - 1) for seq in seqs]
        parts["rows"] = [[(row.hidden.hex(), row.logits and row.logits.hex()) for row in each] for each in rows]
    if native.isa() != "reference" or not case.has_head:  # torch rounds products of a head by where they lie in memory
        rounds = [r for report in reports for r in report.rounds]  # which of two texts goes first is up to the clock
        parts["rounds"] = [[_details(r) for r in rounds if r.sequence_id == seq.id] for seq in seqs]
    return {name: _digest(part) for name, part in parts.items()}


def _details(r: Any) -> tuple[Any, ...]:
    probs = [p.hex() for p in r.draft_probs], [p if p is None else p.hex() for p in r.target_probs]
    return r.position, r.tokens, r.parents, *probs, r.accepted, r.next_token


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def about() -> dict[str, str]:
    """What the bits depend on besides the code; torch's may differ between processors of one instruction set."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
    return {"isa": native.isa(), "processor": processor, "numpy": np.__version__, "torch": torch.__version__}


def main() -> int:
    """Record or compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    known: dict[str, Any] = {}
    if given.what == "compare":
        recorded = json.loads(given.file.read_text(encoding="utf-8"))
        known = recorded["cases"]
        print(f"recorded with {recorded['about']}, now {about()}")
    found: dict[str, dict[str, str]] = {}
    num_different = 0
    with tempfile.TemporaryDirectory() as root:
        folders = Folders(Path(root))
        for case in cases():
            if given.only not in case.name:
                continue
            try:
                found[case.name] = run(case, folders)
            except Exception as error:
                found[case.name] = {"error": f"{type(error).__name__}: {error}"}
            now, before = found[case.name], known.get(case.name, {})
            different = [part for part in {**before, **now} if known and now.get(part) != before.get(part)]
            if different or "error" in now:
                num_different += bool(different)
                print(f"{case.name}: {', '.join(different)} {now.get('error', '')}", flush=True)
    if given.what == "record":
        given.file.parent.mkdir(parents=True, exist_ok=True)
        given.file.write_text(json.dumps({"about": about(), "cases": found}, indent=0) + "\n", encoding="utf-8")
    print(f"{native.isa()}: {len(found)} cases, {num_different} differ")
    return bool(num_different)


if __name__ == "__main__":
    sys.exit(main())
