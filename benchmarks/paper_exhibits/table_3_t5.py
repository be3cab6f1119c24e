"""Table 3 of Leviathan et al. 2023 (arXiv 2211.17192), measured on an encoder-decoder pair, for each task."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.paper_exhibits.table_3 import table_3
from benchmarks.paper_work import Work
from forerun.bench.exhibits import Exhibit

NAME = "table-3-t5"
NOTE = (
    " Published: unigram and bigram beside theirs, T5-small, base and large beside the draft models in the order of "
    "their sizes."
)


def make(work: Work) -> Iterator[Exhibit]:
    """Make it for each task, beside the paper's."""
    recipe = work.task_recipe(NAME, "num_tokens", "ngram")
    for task in work.task_pair.tasks:
        beside: dict[str, Mapping[str, Any]] = {} if task.published is None else {f"T5-XXL {task.published}": {}}
        note = (NOTE if beside else "") + f" On {work.machine}."
        title = f"Table 3: alpha by draft and sampling ({task.name})"
        yield table_3(work.task_alphas[task.name], f"{NAME}-{task.name}", title, beside, note, recipe)
