"""Table 5 of Leviathan et al. 2023 (arXiv 2211.17192), measured on an encoder-decoder pair, for each task."""

from collections.abc import Iterator

from benchmarks.paper_exhibits import table_5
from benchmarks.paper_work import Work
from forerun.bench.exhibits import Exhibit

NAME = "table-5-t5"


def make(work: Work) -> Iterator[Exhibit]:
    """Make it for each task; the paper has the translation alone."""
    recipe = work.task_recipe(NAME, "num_tokens", "ngram")
    for task in work.task_pair.tasks:
        is_published = task.published == "EnDe"
        note = (table_5.NOTE if is_published else "") + f" On {work.machine}."
        name, title = f"{NAME}-{task.name}", f"{table_5.TITLE} ({task.name})"
        yield table_5.table_5(work.task_alphas[task.name], name, title, is_published, note, recipe)
