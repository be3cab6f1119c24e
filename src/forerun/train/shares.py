"""Measures the probability that a target accepts the k-th child that a draft model proposes, for Sequoia trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.drafters.shared import artifacts
from forerun.engine.opened import SHIPPED_DRAFT, is_shipped
from forerun.errors import BadOption
from forerun.kv.cache import BlockCache
from forerun.models.loading import Checkpoint, load_checkpoint
from forerun.models.runner import Run, Runner
from forerun.text.tokenizer import compare
from forerun.train.corpus import bench_prompts, load_corpus
from forerun.train.evaluate import read_prompts

Floats = npt.NDArray[np.float64]


def fit(
    out: Path,
    target: str,
    draft: str | None,
    prompts: Path | None,
    num_prompts: int,
    longest: int,
    num_ranks: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda num, of: None,
) -> Floats:
    """Measure a target and a draft model on held-out texts, write the shares to `out`, and return them.

    The shares are the result of `measure`. The drafter `tree:shape=sequoia,file=FILE` reads the file. draft: None = the
    shipped draft model, for the shipped target only. prompts: a prompts.jsonl; None = pieces of held-out Python
    sources. num_prompts: the largest number of texts. longest: the number of tokens after which a text is cut.
    num_ranks: the number of ranks in the shares. progress: see `measure`. Raises UserError; for `prompts`, before a
    model is loaded.
    """
    if draft is None and not is_shipped(target):
        raise BadOption("only the shipped model has a draft model that need not be named: give --draft")
    texts = [] if prompts is None else read_prompts(prompts, num_prompts, target=target)
    pair = [load_checkpoint(name, with_tokenizer=True) for name in (target, draft or SHIPPED_DRAFT)]
    tokenizer = pair[0].text_tokenizer
    compare(tokenizer, pair[1].text_tokenizer, pair[1].name)
    if prompts is None:
        held_out = load_corpus(None).bench
        chosen = bench_prompts(held_out, lambda text: len(tokenizer.encode(text)), num_prompts, 40, longest, seed)
        texts = [prompt.text for prompt in chosen]
    ids = [tokenizer.encode(text) for text in texts]
    shares = measure(pair[0], pair[1], ids, num_ranks, longest, seed, progress)
    num_ids = min(tokenizer.num_ids, pair[0].model.config.vocab_size)
    artifacts.save(out, "tree", {"shares": shares.astype(np.float32)}, artifacts.fingerprint(tokenizer, num_ids))
    return shares


def measure(
    target: Checkpoint,
    draft: Checkpoint,
    texts: Seq[Seq[int]],
    num_ranks: int,
    longest: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda num, of: None,
) -> Floats:
    """Return the share of positions at which the child of rank r is accepted, [2, num_ranks].

    Row 0 is for greedy decoding: the share of positions where the target's likeliest id has rank r in the draft model's
    distribution; rank 0 is the likeliest id. Row 1 is for temperature 1: the mean probability that the child of rank r,
    the (r + 1)-th id drawn without replacement, is accepted by recursive rejection. The positions are all positions of
    the texts, which are given as ids and cut after `longest` ids. progress: called before the first text and after each
    text, with the number of texts that are measured and the number of all texts.
    """
    rng = np.random.default_rng(seed)
    shares = np.zeros((2, num_ranks))
    num = 0
    runners = [_runner(checkpoint, longest) for checkpoint in (target, draft)]
    progress(0, len(texts))
    for i, ids in enumerate(texts, 1):
        p_rows, q_rows = (_logits(runner, ids[:longest]) for runner in runners)
        for p_logits, q_logits in zip(p_rows, q_rows, strict=True):
            best = p_logits.argmax()
            if best < len(q_logits) and (rank := int((q_logits > q_logits[best]).sum())) < num_ranks:
                shares[0, rank] += 1
            q = np.zeros(len(p_logits))
            q[: len(q_logits)] = _softmax(q_logits)[: len(p_logits)]
            shares[1] += accepted_shares(_softmax(p_logits), q / q.sum(), num_ranks, rng)
            num += 1
        progress(i, len(texts))
    return shares / max(1, num)


def accepted_shares(p: Floats, q: Floats, num: int, rng: np.random.Generator) -> Floats:
    """Draw `num` children from q without replacement, and return each child's probability of acceptance, [num].

    The children are tested in order, by recursive rejection. p, q [V]: the distributions of target and draft model.
    """
    shares, reached = np.zeros(num), 1.0
    for k in range(num):
        if q.sum() <= 0:
            break
        q = q / q.sum()
        token = int(np.searchsorted(q.cumsum(), rng.random(), side="right").clip(max=len(q) - 1))
        accepted = min(1.0, p[token] / q[token]) if q[token] > 0 else 0.0
        shares[k], reached = reached * accepted, reached * (1 - accepted)
        rest = np.maximum(p - q, 0)
        p = rest / rest.sum() if rest.sum() > 0 else p
        q = np.where(np.arange(len(q)) == token, 0.0, q)
    return shares


def _runner(checkpoint: Checkpoint, longest: int) -> Runner:
    model = checkpoint.model
    cache = BlockCache.of(model, "paged", max_batch_size=1, max_seq_len=longest)
    return Runner(model, cache)


def _logits(runner: Runner, ids: Seq[int]) -> Floats:
    """Return the logits after each of the n ids, [n, V]."""
    runner.cache.open(0)
    try:
        return runner.forward([Run(0, list(ids))]).logits[0].astype(np.float64)
    finally:
        runner.cache.release(0)


def _softmax(row: Floats) -> Floats:
    weights = np.exp(row - row.max())
    return np.asarray(weights / weights.sum())
