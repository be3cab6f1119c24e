"""Figure 1 of Leviathan et al. 2023 (arXiv 2211.17192): a text, coloured by what became of the guesses."""

from collections.abc import Iterator

from benchmarks.paper_work import Work
from forerun.bench.exhibits import Coloured, Exhibit, Token, Tokens, Value
from forerun.bench.latency import heard, read_prompts
from forerun.bench.tables import Column
from forerun.bench.widen import num_parameters
from forerun.engine.llm import LLM
from forerun.models.loading import Checkpoint
from forerun.text.rounds import round_pieces
from forerun.text.tokenizer import token_text
from forerun.types import SamplingParams, StepReport

NAME = "figure-1"
FIGURE_TOKENS = 64


def make(work: Work) -> Iterator[Exhibit]:
    """Draw a text of the target, and of the draft model whose size is next to the shipped one's."""
    pair = work.pair
    nearest = min(pair.drafts.values(), key=lambda draft: abs(num_parameters(draft.model.config) - 1.9e6))
    yield figure_1(pair.target, nearest, work.plan.seed, work.recipe(NAME))


def figure_1(target: Checkpoint, draft: Checkpoint, seed: int, recipe: str) -> Exhibit:
    """Return a sampled text, one line for each pass of the target, coloured by what became of the guesses."""
    llm = LLM(target, draft=draft, spec_length=5, max_batch_size=1)
    reports: list[StepReport] = []
    (_, prompt), *_ = read_prompts(1)
    params = SamplingParams(max_tokens=FIGURE_TOKENS, temperature=1, seed=seed, acceptance="ratio", ignore_eos=True)
    with heard(llm, reports.append, detail=True):
        (output,) = llm.generate(prompt, params)
    left: int | None = output.prompt_ids[-1]
    rows: list[tuple[Value, ...]] = []
    lines: list[Tokens] = []
    for report in reports:
        for detail in report.rounds:
            tokens = []
            for piece in round_pieces(detail, report.num_committed):
                tokens.append(Token(token_text(llm.tokenizer, piece.token, left), piece.kind))
                left = left if piece.kind in ("rejected", "untested") else piece.token
            lines.append(Tokens(tuple(tokens)))
            rows.append((len(lines), f"{len(detail.accepted)}/{len(detail.tokens)}", lines[-1]))
    return Exhibit(
        "figure-1",
        f"Figure 1: {len(output.token_ids)} tokens in {len(lines)} passes of the target",
        (Column("pass"), Column("accepted"), Column("tokens")),
        rows,
        Coloured(lines),
        "Green: accepted guesses. Red, [-marked-]: rejected ones; {behind them}: never tested. Blue, [+marked+]: the "
        "target's own. Temperature 1, K = 5. The paper's figure has 38 tokens in 9 passes.",
        recipe,
    )
