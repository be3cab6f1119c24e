"""The shipped pair widened to the true shapes of Llama 3.2 1B and 3B (`make parity`; 9 GB of disk, 18 GB of memory).

Both are written as bfloat16 folders and read back in float32, one runtime in memory at a time. transformers must choose
the tokens that forerun chooses; new ids must have probability 0 in both; and the pair must accept as it did before.
"""

import gc
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.bench.widen import SHAPES, num_parameters, write_widened
from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.models.loading import load_checkpoint
from forerun.models.runner import Run
from forerun.sampling import probs
from parity.bitwise import held_out_texts

NARROW = {"target": SHIPPED_TARGET, "draft": SHIPPED_DRAFT}
WIDE = {"target": SHAPES["llama-3.2-3b"], "draft": SHAPES["llama-3.2-1b"]}
NUM_PROMPTS, NUM_TOKENS, NUM_DRAFTED_TOKENS = 20, 16, 32
NUM_OLD_IDS = 4096
MEMORY_BYTES = 18 << 30
pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Both checkpoints; removed afterwards."""
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    if int(available.split()[1]) * 1024 < MEMORY_BYTES:
        pytest.skip(f"needs {MEMORY_BYTES >> 30} GiB of memory; {available}")
    root = tmp_path_factory.mktemp("wide")
    for name, shape in WIDE.items():
        write_widened(NARROW[name], root / name, shape)
    yield {name: root / name for name in WIDE}
    shutil.rmtree(root)


@dataclass(frozen=True)
class Greedy:
    """Plain greedy decoding of every prompt: (prompt ids, output ids); and the largest probability of all new ids."""

    runs: list[tuple[list[int], list[int]]]
    share_of_new_ids: float
    num_parameters: int


def greedy(folder: Path) -> Greedy:
    llm = LLM(folder, draft="none", dtype="float32", max_seq_len=512)
    assert llm.engine.runner.num_ids == llm.checkpoint.model.config.vocab_size
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    outs = llm.generate(held_out_texts(NUM_PROMPTS), params)
    share = 0.0
    runner = llm.engine.runner
    runner.cache.open(-1)
    for row in runner.forward([Run(-1, outs[0].prompt_ids)]).logits[0]:
        for temperature in (1.0, 100.0):
            weights = probs(row, SamplingParams(temperature=temperature)).dense
            share = max(share, float(weights[NUM_OLD_IDS:].sum()))
    return Greedy([(o.prompt_ids, o.token_ids) for o in outs], share, num_parameters(llm.checkpoint.model.config))


def theirs(folder: Path, runs: list[tuple[list[int], list[int]]]) -> tuple[list[list[int]], float]:
    """What transformers chooses at each place of the outputs, and the largest probability of all new ids there."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size
    chosen, share = [], 0.0
    for text, (prompt_ids, token_ids) in zip(held_out_texts(NUM_PROMPTS), runs, strict=True):
        assert tokenizer.encode(text) == prompt_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt_ids + token_ids[:-1]]), logits_to_keep=len(token_ids)).logits[0]
        chosen.append(logits.argmax(-1).tolist())
        for temperature in (1, 100):
            share = max(share, float((logits / temperature).softmax(-1)[:, NUM_OLD_IDS:].sum(-1).max()))
    return chosen, share


@pytest.mark.parametrize("name", WIDE)
def test_transformers_says_the_same(name: str, folders: dict[str, Path], say: Callable[[str], None]) -> None:
    ours = greedy(folders[name])
    gc.collect()
    chosen, share = theirs(folders[name], ours.runs)
    gc.collect()
    assert chosen == [token_ids for _, token_ids in ours.runs]
    assert ours.share_of_new_ids == 0
    assert share == 0
    same = sum(a == b for a, b in zip(ours.runs, greedy(NARROW[name]).runs, strict=True))
    say(
        f"\n{name}, {ours.num_parameters:,} parameters: {NUM_PROMPTS} x {NUM_TOKENS} greedy tokens equal to those "
        f"of transformers, {same} of {NUM_PROMPTS} outputs to those of the trained model; new ids have "
        "probability 0"
    )


def alpha_hat(pair: dict[str, Path], temperature: float) -> tuple[float, int]:
    """Accepted / tested draft tokens, and how many were tested.

    The draft model is in bfloat16 in both pairs: so the larger pair takes 16 GB. With a seed the text is the target's
    alone (match), so both pairs are compared on one text as long as the targets agree.
    """
    target = load_checkpoint(pair["target"], dtype="float32", with_tokenizer=True)
    draft = load_checkpoint(pair["draft"], dtype="bfloat16", with_tokenizer=True)
    llm = LLM(target, draft=draft, max_seq_len=512, spec_length=5)
    seeds = [None if temperature == 0 else 1000 + i for i in range(NUM_PROMPTS)]
    params = [
        SamplingParams(max_tokens=NUM_DRAFTED_TOKENS, temperature=temperature, seed=seed, ignore_eos=True)
        for seed in seeds
    ]
    outs = llm.generate(held_out_texts(NUM_PROMPTS), params)
    accepted, tested = (sum(getattr(o.report, name) for o in outs) for name in ("num_accepted", "num_tested"))
    return accepted / tested, tested


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_pair_accepts_as_before(temperature: float, folders: dict[str, Path], say: Callable[[str], None]) -> None:
    narrow, num_narrow = alpha_hat(NARROW, temperature)
    wide, num_wide = alpha_hat(folders, temperature)
    gc.collect()
    say(
        f"\ntemperature {temperature:g}: alpha-hat {narrow:.4f} ({num_narrow} tested) of the trained pair, "
        f"{wide:.4f} ({num_wide} tested) of the widened one"
    )
    assert abs(wide - narrow) <= 0.02
