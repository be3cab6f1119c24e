"""How far acceptances of an encoder-decoder's answers are from independent, for each task."""

from collections.abc import Iterator

from benchmarks.paper_exhibits.independence import TITLE, independence
from benchmarks.paper_work import Work
from forerun.bench.exhibits import Exhibit

NAME = "independence-t5"


def make(work: Work) -> Iterator[Exhibit]:
    """Make it for each task."""
    lengths = work.plan.spec_lengths
    recipe = work.task_recipe(NAME, "num_tokens", "ngram", "spec_lengths")
    for task, found in work.task_alphas.items():
        yield independence(found, f"{NAME}-{task}", f"{TITLE} ({task})", lengths, recipe)
