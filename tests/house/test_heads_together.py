"""Trained heads in one batch draft for each request what they draft for it alone: no row of a neighbour is mixed up.

A head that reads the wrong row, the wrong sequence or a stale cache is as lossless as a right one, for every draft is
judged; only its drafts tell. So they are compared, round by round. The target often repeats its last token, and so do
the heads: some drafts are accepted whole, some in part, some not at all.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM, SamplingParams, native
from forerun.drafters import Seen
from forerun.drafters.hydra import HydraHeads
from forerun.drafters.shared import head_files
from forerun.models.loading import load_checkpoint
from forerun.registry import load
from forerun.testing.engines import target_for
from forerun.types import Rows, Sequence, StepReport
from methods import NEEDS
from tiny import write_tiny

pytestmark = pytest.mark.skipif(native.isa() == "reference", reason=f"no native operators: {native.why_not()}")

HEADS = {"eagle": "", "medusa": ",shape=2x1", "hydra": ",shape=2x1", "dflash": "", "blockwise": "", "pass": ""}
# The rows of these know no text before they are trained: a bias lets target and head say one id more often.
BIASED = ("dflash", "pass")
BIAS = {162: 4.5}
SCALES = {"dflash": 2.0, "pass": 0.05}  # of random weights, so that rows depend on the text; 0.15 elsewhere
Rounds = list[tuple[int, tuple[int, ...], tuple[int, ...]]]  # position, drafted, accepted nodes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, "model", and a head of each method, called as that."""
    root = tmp_path_factory.mktemp("together")
    target = load_checkpoint(write_tiny(root / "model", inner_scale=0.1), with_tokenizer=True)
    known = target_for(target.model, target.tokenizer, target.end_ids)
    for method in HEADS:
        NEEDS[method](known, root)
        file = root / method / head_files.WEIGHTS
        save_file(agreeing(method, load_file(file), target.model), file)
    return root


def agreeing(method: str, weights: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The weights of a random head, changed so that it says what the target's LM head makes of its row, about."""
    width = model.config.hidden_size
    final = torch.from_numpy(model.weight("model.norm.weight"))
    joins = ("fc.weight", "input.weight") if method == "eagle" else ("res_connection.weight",)
    for name, weight in weights.items():
        if name in ("d2t", head_files.PROBE):
            continue
        weight *= SCALES.get(method, 0.15)
        if "norm" in name:
            weight.fill_(1.0)
        if name in ("model.norm.weight", "norm.weight"):
            weight.copy_(final)
        if name.endswith(joins):
            columns = weight[:, width:] if method == "eagle" else weight[:, :width]  # hydra reads the row first
            columns += torch.eye(width)
    return weights


def specs(folder: Path) -> list[str]:
    return [f"{method}:path={folder / method}{options}" for method, options in HEADS.items()]


def llm_of(folder: Path, chunk_tokens: int = 512) -> LLM:
    """An engine that has all heads."""
    drafts = {"draft": "none", "extra_drafts": ";".join(specs(folder)), "pacing": "fixed", "spec_length": 5}
    sizes = {"max_batch_size": 12, "max_seq_len": 128, "prefill_chunk_tokens": chunk_tokens}
    return LLM(str(folder / "model"), dtype="float32", prefix_caching=False, calibrate=False, **drafts, **sizes)


def requests(folder: Path) -> Iterator[tuple[list[int], SamplingParams]]:
    """Two for each head, greedy and sampled, of other lengths: they are not in step."""
    for i, spec in enumerate(specs(folder) * 2):
        prompt = [5 + 7 * i % 200, *range(40 + i, 44 + 3 * i)]
        sampled: dict[str, Any] = {"temperature": 0.4, "seed": i} if i % 3 == 2 else {"temperature": 0}
        if spec.startswith(BIASED):
            sampled["logit_bias"] = BIAS
        yield prompt, SamplingParams(max_tokens=30 + i, ignore_eos=True, draft=spec, **sampled)


def rounds_of(llm: LLM, wanted: list[tuple[list[int], SamplingParams]]) -> list[Rounds]:
    """The rounds of requests that are served together, by request."""
    found, engine = defaultdict[int, Rounds](list), llm.engine

    def listen(report: StepReport) -> None:
        for one in report.rounds:
            found[one.sequence_id].append((one.position, tuple(one.tokens), tuple(one.accepted)))

    llm.listen(listen, detail=True)
    asked = [engine.add(prompt, params) for prompt, params in wanted]
    while any(request.seq.finish_reason is None for request in asked):
        engine.step()
    assert all(request.error is None for request in asked)
    return [found[request.seq.id] for request in asked]


def others(folder: Path, methods: Seq[str], chunk_tokens: int = 512) -> list[str]:
    """The drafters of the requests whose drafts in a batch are not those that they have alone.

    Fails where drafts are all right or all wrong, which would show little.
    """
    wanted = [request for request in requests(folder) if str(request[1].draft).partition(":")[0] in methods]
    together = rounds_of(llm_of(folder, chunk_tokens), wanted)
    alone = [rounds_of(llm_of(folder), [request])[0] for request in wanted]
    numbers = defaultdict[str, list[int]](lambda: [0, 0])
    for (_, params), rounds in zip(wanted, alone, strict=True):
        for _, drafted, accepted in rounds:
            numbers[str(params.draft)][0] += len(drafted)
            numbers[str(params.draft)][1] += len(accepted)
    assert all(0 < accepted < drafted for drafted, accepted in numbers.values()), numbers
    pairs = zip(wanted, together, alone, strict=True)
    return [str(params.draft) for (_, params), ours, theirs in pairs if ours != theirs]


@pytest.mark.parametrize("chunk_tokens", [512, 5])
def test_heads_draft_in_a_batch_what_they_draft_alone(folder: Path, chunk_tokens: int) -> None:
    assert others(folder, list(HEADS), chunk_tokens) == []


def first_row(seen: Seen) -> Rows:
    """As `Seen.hidden`, of the pass's first rows whatever the sequence."""
    return seen.scores.hidden[: len(seen.kept)]


def first_layer(seen: Seen, k: int) -> Rows:
    """As `Seen.layer`, in the same way."""
    return seen.scores.taps[k][: len(seen.kept)].copy()


def reversed_last(heads: HydraHeads, hidden: Rows, last: Seq[int], num_heads: int, num: int) -> Any:
    """As `HydraHeads.following`, with the last tokens of the sequences in another order."""
    return FOLLOWING(heads, hidden, last[::-1], num_heads, num)


def first_run(drafter: Any, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
    """As `PassDrafter.observe`, of what the pass scored for its first sequence."""
    OBSERVE(drafter, seqs, [replace(own, run=0) for own in seen])


PASS = load("forerun.drafters", "pass", "drafter").PassDrafter
FOLLOWING, OBSERVE = HydraHeads.following, PASS.observe
WRONG = {"eagle": (Seen, "layer", first_layer), "medusa": (Seen, "hidden", property(first_row)),
         "hydra": (HydraHeads, "following", reversed_last), "dflash": (Seen, "layer", first_layer),
         "blockwise": (Seen, "hidden", property(first_row)), "pass": (PASS, "observe", first_run)}  # fmt: skip


@pytest.mark.parametrize("method", HEADS)
def test_a_head_that_reads_for_a_neighbour_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(*WRONG[method])
    assert others(folder, [method])
