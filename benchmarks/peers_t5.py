"""`benchmarks.peers_t5` runs the same encoder-decoder pair, sources and threads in forerun and in transformers.

Nobody else speculates on encoder-decoders. Both decode greedily, in the type that forerun computes the target in, and
write as many tokens as the target's own greedy answers have. They take turns by groups of sources: transformers and
forerun one request at a time, and forerun a group at once. peers.py has the engines, peer_results.py the numbers.
"""

import sys
import time
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.paper_tasks import Task, of_places
from benchmarks.peer_process import Outcome, PeerError, PeerProcess, Question, python_flag
from benchmarks.peer_results import OWN, PLAIN, TABLE, lines_of, print_notes
from benchmarks.peers import LOOKUP_MAX_N, Group, OwnEngine, measure, print_engines, say, set_num_threads
from benchmarks.start import measuring, start
from forerun.bench.plans import Plan
from forerun.bench.results import print_ceiling, record_of
from forerun.bench.tables import table
from forerun.bench.widen import describe, draft_options, num_parameters
from forerun.cli import flags
from forerun.config import EngineConfig
from forerun.engine.opened import Opened
from forerun.errors import BadOption
from forerun.models.hub import locate
from forerun.models.loading import Checkpoint
from forerun.registry import option
from forerun.text.terminal import make_console

PEER = "transformers"
AGAIN = "plain once more"


@dataclass(frozen=True)
class AnswersPlan(Plan):
    """What is compared. The draft model is that of --draft, else the first of the pair's folder.

    python: transformers' interpreter, None = this one.
    """

    pair: Path | None = option(
        None,
        "folder of an encoder-decoder pair: target, draft-NAME, and NAME.jsonl for each task",
        usual="build/t5pair",
    )
    tasks: tuple[str, ...] = option(
        (), "NAME=FILE with prompts, JSON lines with source", flag="--task", usual="those of --pair"
    )
    spec_lengths: tuple[int, ...] = option((5,), "tokens drafted per step (K)", flag="--spec-length", min=1, usual="5")
    num_prompts: int = option(64, "of all tasks, in turns", flag="--prompts", min=1)
    batch_size: int = option(16, "requests that forerun also runs at once, and sources of a turn", min=2, max=1024)
    max_tokens: int = option(64, "tokens per answer at most", min=2)
    num_repeats: int = option(1, "times every source is answered", flag="--repeats", min=1)
    num_threads: int | None = option(None, "of every engine", min=1, max=1024, usual="FORERUN_NUM_THREADS")
    python: Path | None = option(
        None, "interpreter that can import transformers", flag="--transformers-python", usual="this one"
    )


class OneByOne(OwnEngine):
    """forerun with one request at a time, and plain decoding once more."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._llms[AGAIN] = self._llms[PLAIN]
        self.configurations = list(self._llms)


class AtOnce(OwnEngine):
    """forerun with all requests of a group at once. A request's seconds are its tokens' share of the group's."""

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig, draft: Path, spec_lengths: Seq[int], batch_size: int
    ) -> None:
        super().__init__(checkpoint, config, draft, spec_lengths, "", batch_size)
        self.name, self.about = f"{OWN}, {batch_size} at once", f"the same, {batch_size} requests at once"

    def together(self, configuration: str, group: Group) -> list[Outcome]:
        """Continue the prompts of a group at once."""
        llm = self._llms[configuration]
        params = [self.params(num_tokens) for _, num_tokens in group]
        begun = time.perf_counter()
        outputs = llm.generate([ids for ids, _ in group], params)
        seconds = (time.perf_counter() - begun) / sum(num_tokens for _, num_tokens in group)
        return [
            Outcome(output.token_ids, seconds * num, seconds * num, num)
            for output, (_, num) in zip(outputs, group, strict=True)
        ]


def run(config: EngineConfig, plan: AnswersPlan) -> dict[str, Any]:
    """Measure, print tables, and return all of it for JSON. Raises UserError for what cannot be measured."""
    console = make_console()
    if plan.python is not None and not plan.python.is_file():
        raise BadOption(
            f"{python_flag(PEER)} {plan.python} is not possible: there is no such file; name an interpreter"
        )
    named = () if config.draft in ("auto", "none") else (str(config.draft),)
    places = of_places(config, plan.pair, named, plan.tasks)
    draft = locate(draft_options((named or places.drafts)[0])[0]).resolve()
    num_threads = set_num_threads(plan.num_threads)
    config = replace(config, target=places.target, draft="auto")
    checkpoint = Opened.of(config).load()
    model = checkpoint.model
    own = OneByOne(checkpoint, config, draft, plan.spec_lengths, model.precision)
    many = AtOnce(checkpoint, config, draft, plan.spec_lengths, plan.batch_size)
    assert own.draft is not None
    console.print(f"target: {num_parameters(model.config):,} parameters ({describe(model.config)}), {model.precision}")
    console.print(f"draft model: {num_parameters(own.draft.model.config):,} parameters ({draft.name})")
    ceiling = print_ceiling(model, console)
    names, sources = in_turns(places.tasks, plan.num_prompts)
    ids = [own.encode(source) for source in sources] * plan.num_repeats
    lengths = [own.natural_length(one, plan.max_tokens) for one in ids[: len(sources)]] * plan.num_repeats
    left_out: dict[str, str] = {}
    question = Question(
        target=Path(checkpoint.folder).resolve(),
        draft=draft,
        work=Path(checkpoint.folder).resolve(),  # nothing is converted
        num_threads=num_threads,
        spec_lengths=plan.spec_lengths,
        lookup_max_n=LOOKUP_MAX_N,
        dtype=str(model.weight_dtype).removeprefix("torch."),
    )
    with ExitStack() as stack:
        engines: list[Any] = [own, many]
        say(f"loading {PEER} ...")
        try:
            peer = PeerProcess(PEER, plan.python or Path(sys.executable), question)
        except PeerError as error:
            left_out[PEER] = str(error)
        else:
            stack.callback(peer.close)
            engines.append(peer)
        measured = measure(engines, ids, lengths, left_out, plan.batch_size)
    busy_s = sum(outcome.seconds for outcomes in measured.values() for outcome in outcomes)
    print_engines(engines, left_out, busy_s, console)
    lines = lines_of(measured, lambda i, position: own.top2_gap(ids[i], position))
    console.print(table(lines, TABLE))
    print_notes(lines, measured, names * plan.num_repeats, console)
    console.print(
        f"{len(sources)} sources of {', '.join(task.name for task in places.tasks)}, answers of "
        f"{sum(lengths) / len(lengths):.1f} tokens in the mean; a request that runs with others has its tokens' share "
        "of their seconds"
    )
    return {
        "bench": "peers_t5",
        "target": checkpoint.name,
        "draft": draft.name,
        "plan": plan.record("pair", "python"),
        "engines": {engine.name: engine.about for engine in engines},
        "left_out": left_out,
        "prompts": names * plan.num_repeats,
        "new_tokens": lengths,
        **record_of([], model, [own.draft.model], ceiling),
        "lines": [asdict(line) for line in lines],
    }


def in_turns(tasks: Seq[Task], num: int) -> tuple[list[str], list[str]]:
    """Return names and sources of prompts, one of each task in turn."""
    rows = zip_longest(*([(f"{task.name} {i + 1}", one) for i, one in enumerate(task.measured)] for task in tasks))
    found = [pair for row in rows for pair in row if pair is not None][:num]
    return [name for name, _ in found], [source for _, source in found]


command = measuring(
    run,
    AnswersPlan,
    flags.engine("target", "draft", "dtype", "ops", "kv_cache_backend", "config"),
    "Run the same encoder-decoder pair, sources and threads in forerun and in transformers, greedily.",
)


if __name__ == "__main__":
    start(command)
