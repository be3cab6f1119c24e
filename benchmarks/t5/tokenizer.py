"""The tokenizer of a T5 that is trained: as that of `forerun train lm`, with T5's own special tokens."""

from collections.abc import Iterable, Sequence as Seq

from tokenizers import Tokenizer, processors

from benchmarks.t5.config import PairConfig
from benchmarks.t5.examples import Example
from forerun.errors import BadOption
from forerun.models.opened import OpenedCheckpoint
from forerun.train.tokenizer import copy_tokenizer, load_tokenizer, save_tokenizer, train_tokenizer

PAD, END = "<pad>", "</s>"  # a decoder begins with the first, a text ends with the second
PAD_ID, END_ID = 0, 1
SPECIAL = {"bos_token": None, "eos_token": END, "pad_token": PAD}
TOKENIZER_EXAMPLES = 50_000  # of each folder, that a tokenizer is made of


def train_pair_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a tokenizer for an encoder-decoder, which puts END behind each text."""
    tokenizer = train_tokenizer(texts, vocab_size, (PAD, END))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return tokenizer


def make_tokenizer(config: PairConfig, learned: Seq[Seq[Example]]) -> Tokenizer:
    """Return the given tokenizer, else the teacher's, else a newly trained one; its files go to out/tokenizer."""
    folder = config.out / "tokenizer"
    if config.tokenizer is None and config.teacher is not None:
        copy_tokenizer(OpenedCheckpoint.of(config.teacher).folder, folder)
        return checked(load_tokenizer(folder), config)
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
    else:
        texts = (text for own in learned for e in own[:TOKENIZER_EXAMPLES] for text in (e.source, e.target))
        tokenizer = train_pair_tokenizer(texts, config.shape.vocab_size)
    save_tokenizer(checked(tokenizer, config), folder, config.seq_len_tokens, SPECIAL)
    return tokenizer


def checked(tokenizer: Tokenizer, config: PairConfig) -> Tokenizer:
    """Return a tokenizer. Raises BadOption where its special ids are not those of T5, or the model has fewer ids."""
    if [tokenizer.token_to_id(token) for token in (PAD, END)] != [PAD_ID, END_ID]:
        raise BadOption(f"the tokenizer must have {PAD} as id {PAD_ID} and {END} as id {END_ID}: leave --tokenizer out")
    if tokenizer.get_vocab_size() > config.shape.vocab_size:
        raise BadOption(f"the tokenizer has {tokenizer.get_vocab_size()} ids, the model {config.shape.vocab_size}")
    return tokenizer
