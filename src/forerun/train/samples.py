"""Draws the target's own text for a draft model to learn from: continuations of training prompts, in batches.

A draft model must predict what the target writes, not what people wrote (Zhou et al. 2024, "DistillSpec", section 4:
on-policy data). Half of the samples are greedy and half are drawn at temperature 1, because both are used later.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from forerun.kv.cache import BlockCache
from forerun.models.layers import Decoder
from forerun.train.batches import Tokens, encode_documents
from forerun.train.corpus import load_corpus
from forerun.train.tokenizer import END_OF_TEXT
from forerun.types import RaggedBatch


@torch.inference_mode()
def continuations(
    model: Decoder, prompts: list[list[int]], num_new_tokens: int, temperature: float, seed: int = 0
) -> list[list[int]]:
    """Return num_new_tokens ids after each prompt, past an end of text; temperature 0 takes the most likely."""
    longest = max(map(len, prompts)) + num_new_tokens
    cache = BlockCache.create(
        model.config.cache_shape, "contiguous", max_batch_size=len(prompts), max_seq_len=longest, device=model.device
    )
    for slot in range(len(prompts)):
        cache.open(slot)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    runs = prompts
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_new_tokens):
        logits = next_logits(model, cache, runs)
        runs = [[token] for token in draw(logits, temperature, generator)]
        for output, run in zip(outputs, runs, strict=True):
            output += run
    return outputs


def next_logits(model: Decoder, cache: BlockCache, runs: list[list[int]]) -> Tensor:
    """Run the new tokens of every slot and keep them. Returns the logits [B, V] after the last token of each."""
    cached = [cache.length(slot) for slot in range(len(runs))]
    starts = [0]
    for slot, run in enumerate(runs):
        cache.reserve(slot, len(run))
        starts.append(starts[-1] + len(run))
    positions = [p for c, run in zip(cached, runs, strict=True) for p in range(c, c + len(run))]
    tokens = [token for run in runs for token in run]
    batch = RaggedBatch(
        tokens,
        positions,
        starts,
        list(range(len(runs))),
        cached,
    )
    hidden = model.forward(batch, cache)
    cache.keep({slot: range(len(run)) for slot, run in enumerate(runs)})
    return model.logits(hidden[[stop - 1 for stop in starts[1:]]])


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> list[int]:
    """Draw one id per row of logits [B, V]."""
    if temperature == 0:
        return logits.argmax(-1).tolist()
    probs = (logits / temperature).softmax(-1)
    return torch.multinomial(probs, 1, generator=generator)[:, 0].tolist()


def own_text(
    model: Decoder,
    tokenizer: Tokenizer,
    num_tokens: int,
    *,
    text: Path | None = None,
    batch_size: int = 128,
    prompt_tokens: tuple[int, int] = (16, 96),
    new_tokens: int = 224,
    seed: int = 0,
) -> Tokens:
    """Return prompts and the target's continuations, about num_tokens ids in all, uint16 [N].

    Half of the continuations are greedy, half are drawn at temperature 1. Prompts are spans of the train split at
    random places; an end-of-text id follows each continuation.
    """
    rng = np.random.default_rng(seed)
    source = encode_documents(load_corpus(text).train, tokenizer)
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream: list[int] = []
    turn = 0
    while len(stream) < num_tokens:
        starts = rng.integers(0, len(source) - prompt_tokens[1], batch_size)
        prompts = [source[s : s + int(rng.integers(*prompt_tokens))].tolist() for s in starts]
        outputs = continuations(model, prompts, new_tokens, float(turn % 2), seed + turn)
        stream += [i for prompt, output in zip(prompts, outputs, strict=True) for i in (*prompt, *output, end)]
        turn += 1
    return np.asarray(stream, dtype=np.uint16)
