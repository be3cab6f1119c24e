"""What drafts gain for beam search.

python docs/development/measure/beam_speed.py [target] [draft] [shape] [dtype]

Each prompt is searched without drafts and with them, in turn; the texts and scores must be the same in every bit. A
line has the widths of the searches, steps and rows of a pass of the target, seconds, and the medians of the ratios: of
seconds, and of CPU seconds, which with one thread are what a machine without other work would show.
target, draft: as for `forerun generate`; shape: as for `forerun bench methods`, or none; dtype: of the weights.
"""

import json
import statistics
import sys
import time

from forerun import LLM, RequestOutput, SamplingParams
from forerun.bench.methods import PROMPTS
from forerun.bench.widen import load_widened, measured_target
from forerun.config import EngineConfig
from forerun.text.terminal import make_console

WIDTHS = ((4, 4, 2), (4, 8, 2), (2, 4, 3), (4, 8, None))  # num_beams, draft_beams, levels; None = as auto paces
NUM_PROMPTS, MAX_TOKENS, WARM_UP_TOKENS = 3, 32, 8


def searched(llm: LLM, prompt: list[int], **given: object) -> tuple[tuple[float, float], list[RequestOutput]]:
    """Return the seconds of a search and its CPU seconds, and its texts."""
    params = SamplingParams(temperature=0, ignore_eos=True, **{"max_tokens": MAX_TOKENS, **given})  # type: ignore[arg-type]
    start, cpu_start = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompt, params)
    return (time.perf_counter() - start, time.process_time() - cpu_start), outputs


def main(target: str, draft: str, shape: str = "none", dtype: str = "auto") -> None:
    """Measure, and print a table."""
    console = make_console()
    config = EngineConfig.make(target=None if target == "shipped" else target, max_seq_len=1024, dtype=dtype)
    llm = LLM(load_widened(measured_target(config, shape), shape, console), draft=draft, max_seq_len=1024, dtype=dtype)
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    texts = [line["messages"][-1]["content"] for line in lines[:: len(lines) // NUM_PROMPTS]][:NUM_PROMPTS]
    prompts = [llm.tokenizer.encode(text) for text in texts]
    console.print(f"{llm!r}\n{NUM_PROMPTS} prompts, {MAX_TOKENS} tokens")
    console.print("beams  drafted  levels  steps/pass  rows/pass  plain s  drafted s  speed-up  by CPU")
    for width, wide, levels in WIDTHS:
        options = {"num_beams": width, "draft_beams": wide, "spec_length": levels, "n": width}
        searched(llm, prompts[0], **options, max_tokens=WARM_UP_TOKENS)
        times: list[tuple[float, float, float, float]] = []
        reports = []
        for i, prompt in enumerate(prompts):
            runs = {}
            for name in (("none", None), (None, "none"))[i % 2]:
                runs[name] = searched(llm, prompt, **options, draft=name)
            (plain_times, plain), (drafted_times, drafted) = runs["none"], runs[None]
            assert [(o.token_ids, o.score) for o in plain] == [(o.token_ids, o.score) for o in drafted]
            times.append((*plain_times, *drafted_times))
            reports.append(drafted[0].report)
        passes = sum(report.num_steps for report in reports)
        steps, rows = (sum(getattr(r, name) for r in reports) / passes for name in ("num_emitted", "num_rows"))
        ratios = [statistics.median(row[i] / row[i + 2] for row in times) for i in (0, 1)]
        plain_s, drafted_s = (sum(row[i] for row in times) for i in (0, 2))
        named = "auto" if levels is None else levels
        console.print(
            f"{width:5}  {wide:7}  {named:>6}  {steps:10.2f}  {rows:9.1f}  {plain_s:7.2f}"
            f"  {drafted_s:9.2f}  {ratios[0]:8.2f}  {ratios[1]:6.2f}"
        )


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["shipped", "model"]))
