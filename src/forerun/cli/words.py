"""The phrases in which all commands report counts, rates, precision, operators, drafters, sampling and endings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun import native
from forerun.errors import has_card
from forerun.models import named
from forerun.text.terminal import note as note
from forerun.types import BEAM, FinishReason, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forerun.engine.llm import LLM
    from forerun.engine.request import RequestOutput, RequestReport
    from forerun.ops.model import Model


def counted(num: int, noun: str) -> str:
    """Return a count with its noun: 1 token, 2 tokens, 3 target passes."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{num:,} {noun if num == 1 else plural}"


def percent(rate: float) -> str:
    """Return a rate as a percentage, such as 43%."""
    return f"{rate:.0%}"


def precision(llm: LLM) -> str:
    """Return a model's precision: the bits of quantised weights, or else the dtype.

    If the model's file has another dtype, the text names it, too.
    """
    checkpoint = llm.checkpoint
    if checkpoint.model.weight_bits:
        return checkpoint.model.precision
    used = checkpoint.model.precision.removesuffix(" weights")
    if checkpoint.quantization is not None:
        return f"{used} (rounded to {checkpoint.quantization})"
    stored = (checkpoint.stored or "").removesuffix(" weights")
    return used if stored in ("", used) else f"{used} (the file has {stored})"


def backend(llm: LLM) -> str:
    """Return the operators that compute the target and the drafts, and why faster operators do not compute them."""
    target = llm.checkpoint.model
    runners = [runner for drafter in llm.engine.drafter.members.values() for runner in drafter.runners]
    others = {computed(model) for model in (runner.model for runner in runners) if model.ops.name != target.ops.name}
    return "; ".join([computed(target), *(f"drafts by {other}" for other in sorted(others))])


def computed(model: Model) -> str:
    """Return the name of the operators that compute a model, and why faster operators do not compute it."""
    from forerun import ops
    from forerun.blocks import Spec

    spec = model.config
    faster = ops.faster(model.ops.name, model.device, spec) if isinstance(spec, Spec) else ()
    kernels = (f"{name} {reason}" if reason.startswith("is not") else reason for name, reason in faster)
    reasons = "; ".join([*kernels, *_card_is_idle(model)])
    return f"{model.ops.name} operators" + (f" ({reasons})" if reasons else "")


def _card_is_idle(model: Model) -> Iterator[str]:
    """Yield a sentence where a model is computed on the CPU, although the machine has a card that could compute it."""
    if model.device != "cpu" or not has_card() or native.torch_version() is None:
        return
    from forerun.ops import cuda

    if (card := cuda.card()) is not None and cuda.usable("cuda") is None:
        yield f"--device cuda would compute on {card}"


def model_name(llm: LLM) -> str:
    """Return the target's name for the user: its name in `forerun models`, or else its checkpoint's name."""
    target = llm.config.target
    return target if target is not None and named.find(target) is not None else llm.checkpoint.name


def drafting(llm: LLM, draft: str | None = None) -> str:
    """Return a phrase that says how drafts are made. draft: a request's drafter; None = the engine's first drafter."""
    method = draft or llm.engine.drafter.main
    if method == "model" and draft is None:
        _, options = llm.opened.resolve(llm.config.draft)
        return "drafts by a model" if options.path is None else f"drafts by {options.path}"
    if method in ("lookup", "suffix"):
        return f"drafts from the text ({method})"
    return {"none": "no drafts", "model": "drafts by a model"}.get(method, f"drafts by {method}")


def drawing(params: SamplingParams) -> str:
    """Return how tokens are chosen: the number of beams, greedy, or the temperature and the filters that are set."""
    if params.searches:
        return counted(params.num_beams, "beam")
    if params.greedy:
        return "greedy"
    filters = [f"{name.replace('_', '-')} {getattr(params, name):g}" for name in ("top_k", "top_p", "min_p")]
    is_set = (params.top_k > 0, params.top_p < 1, params.min_p > 0)
    return ", ".join([f"temperature {params.temperature:g}", *(f for f, on in zip(filters, is_set, strict=True) if on)])


def ending(reason: FinishReason | None, num_tokens: int, params: SamplingParams) -> list[str]:
    """Return why an output ended, as phrases for the closing line; [] if the model itself ended the output."""
    if reason == "length":
        return ["cut at --max-tokens" if num_tokens == params.max_tokens else "cut at --max-seq-len"]
    return {None: ["stopped"], "abort": ["aborted"]}.get(reason, [])


def closing_line(llm: LLM, output: RequestOutput, params: SamplingParams, seconds: float | None = None) -> str:
    """Return the line of facts below an output. seconds: the time from prompt to last token; None = show no speed."""
    report, num_tokens = output.report, len(output.token_ids)
    other = report.draft if report.draft != llm.engine.drafter.main else None  # beams have their own drafter
    parts = [model_name(llm), drafting(llm, other or params.draft)]
    parts += [f"{counted(num_tokens, 'token')} in {counted(report.num_steps, 'target pass')}"]
    if seconds is not None:
        parts.append(f"{num_tokens / seconds:.1f} tokens/s")
    if report.acceptance_rate is not None:
        parts.append(f"acceptance rate {percent(report.acceptance_rate)}")
    if not report.is_lossless:
        parts.append(lossy(report.acceptance, report.tv_price))
    if output.score is not None:
        parts.append(f"score {output.score:.4f}")
    parts += [precision(llm), backend(llm), drawing(params)]
    if not params.greedy:
        parts.append(f"seed {output.seed}")
    return f"[{', '.join([*parts, *ending(output.finish_reason, num_tokens, params)])}]"


def lossy(acceptance: str, tv_price: float | None) -> str:
    """Return the words for the lossy rule `acceptance`, with its TV price if the price was measured.

    An example: lossy: lenience:l=0.5, TV price 3.1% a tested token
    """
    price = "" if tv_price is None else f", TV price {tv_price:.1%} a tested token"
    return f"lossy: {acceptance}{price}"


def details(report: RequestReport) -> str:
    """Return the line that --verbose adds below an output, with tested tokens, acceptance by position and more."""
    parts = []
    if report.acceptance == BEAM and report.num_steps:
        parts.append(f"{report.rows_per_pass:.1f} rows per target pass")
    if report.mean_accepted_length is not None:
        parts.append(f"{report.mean_accepted_length:.2f} tokens per target pass")
    if report.alpha_hat is not None:
        parts.append(f"{report.num_drafted:,} drafted, {report.num_tested:,} tested, {report.num_accepted:,} accepted")
        parts.append(f"alpha-hat {report.alpha_hat:.2f}")
        parts.append("accepted by position " + " ".join(map(percent, report.acceptance_per_position)))
    if report.first_token_at_s is not None:
        parts.append(f"first token after {report.first_token_at_s - report.arrived_at_s:.2f} s")
    if report.num_cached_tokens:
        disk = f", {report.num_disk_tokens:,} of them from disk" if report.num_disk_tokens else ""
        parts.append(f"{counted(report.num_cached_tokens, 'prompt token')} from the cache{disk}")
    return f"[{', '.join(parts)}]"
