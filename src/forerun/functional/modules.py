"""A torch module as the engine's model: any causal or encoder-decoder module in the form of Hugging Face.

A module must have `config.vocab_size`. Its call takes `input_ids` (of an encoder-decoder: `encoder_outputs` and
`decoder_input_ids`), `past_key_values` and `use_cache`, and returns an object with `logits` [1, n, V] and
`past_key_values`. In place of `past_key_values` there may be `cache`, as in transformers from 5.24 on. The cache may be
a tuple of layers or an object with `crop`. With use_cache=False each pass runs the whole text, so that a module needs
no cache.

ModuleCache is the engine's KVCache (forerun/kv). It stores token ids, and no keys and values. The module's own cache
holds the keys and values of some text. A pass compares that text with the text to run, cuts the module's cache to the
common beginning, and runs the rest. So a rejected token costs nothing until the next pass. A tree takes one call of the
module for each leaf: a branch is run from the node at which it leaves the branch before. The engine's hidden states are
logits here (H = V).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun.config import Quantization
from forerun.errors import BadOption, InternalError, NotFound, PromptTooLong, pip, shown
from forerun.functional.caching import cached_tokens, prune_cache
from forerun.functional.processors import Draws, wide
from forerun.host_tensor import dtype_name
from forerun.kv import Held, Room
from forerun.kv.cache import CacheShape
from forerun.ops.passes import Passed
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch_pools import pools_on
from forerun.ops.torch_tensors import TorchRows
from forerun.types import RaggedBatch

UNLIMITED = 2**24  # tokens, of a module that states no limit
LIMITS = ("max_position_embeddings", "max_context_length")  # names of a limit in config
CUT_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # types of layers that a DynamicCache can store and cut


class ModuleModel:
    """A module with the interface of forerun.ops.model.Model.

    role: the name of the module in messages. uses_cache: whether keys and values are kept between passes. num_ids: how
    many ids have a token, where the module's vocabulary is padded. draws: the processor that changes the logits.
    Raises BadOption for an object that is no such module.
    """

    def __init__(
        self, module: Any, role: str, *, uses_cache: bool = True, num_ids: int | None = None, draws: Draws | None = None
    ) -> None:
        self.module, self.role, self.uses_cache = module, role, uses_cache
        self._draws = draws or Draws({})
        whole: Any = getattr(module, "config", None)
        config = whole.get_text_config(decoder=True) if hasattr(whole, "get_text_config") else whole
        vocab_size = getattr(config, "vocab_size", None)
        if not isinstance(module, torch.nn.Module) or not isinstance(vocab_size, int):
            raise BadOption(
                f"the {role} {shown(module)} has no config.vocab_size: give a module as transformers has it"
            )
        if getattr(module, "training", False):
            raise BadOption(
                f"the {role} is in training mode, in which dropout changes its logits: call its eval() first"
            )
        self.vocab_size = self.hidden_size = vocab_size if num_ids is None else min(num_ids, vocab_size)
        self.limit: int | None = next((n for name in LIMITS if (n := getattr(config, name, None)) is not None), None)
        self.max_positions = self.limit or UNLIMITED
        self.is_encoder_decoder = bool(getattr(whole, "is_encoder_decoder", False))
        self.model_type = str(getattr(whole, "model_type", type(module).__name__))
        self.cache_shape, self.num_layers = CacheShape(0, 1, 1), 1  # of no use: no layer can be seen
        first = next(itertools.chain(module.parameters(), module.buffers()), torch.empty(0))
        self.place = torch.device(getattr(module, "device", first.device))
        self.device = self.place.type
        floating = (p.dtype for p in module.parameters() if p.is_floating_point())
        self.dtype = next(floating, torch.float32)
        self.weight_dtype = self.activation_dtype = self.cache_dtype = dtype_name(self.dtype)
        self.make_pools = pools_on(str(self.place))
        self.rows = TorchRows(self.place, torch.float32)
        self.ops = ReferenceOps()
        named = inspect.signature(module.forward).parameters
        self._keeps_last = "logits_to_keep" in named  # whether a call can return only the last rows' logits
        self._past = "cache" if "cache" in named and "past_key_values" not in named else "past_key_values"
        self._generation = getattr(module, "generation_config", None)
        if uses_cache:
            self.new_past()

    # ------------------------------------------------------------------------------------------------ as a model

    @property
    def config(self) -> ModuleModel:
        """The ModelConfig of the module: this object, because it has all attributes of a ModelConfig."""
        return self

    has_experts, num_slots = False, 1
    weight_bits: tuple[int, ...] = ()
    bytes_per_pass = 0

    @property
    def encoder(self) -> ModuleModel | None:
        """The model that encodes the inputs: this object for an encoder-decoder, None for a causal module."""
        return self if self.is_encoder_decoder else None

    def own_cache(self) -> ModuleCache:
        """Make a cache for this model."""
        return ModuleCache()

    def forward(
        self,
        batch: RaggedBatch,
        cache: ModuleCache,
        layers: Seq[int] | None = None,
        hidden: Tensor | None = None,
        taps: Seq[int] = (),
    ) -> Passed:
        """Run the module over each sequence by itself, and return the logits [T, V] in place of hidden states.

        The processor has not changed these logits yet. Raises InternalError where the caller asks for some of the
        layers, for inner states, or for a run of vectors in place of tokens.
        """
        if layers is not None or hidden is not None or taps:
            raise InternalError("a module is run whole, from token ids to logits: it has no inner layers to show")
        tokens, _ = batch.ids()
        outputs = []
        for b, slot in enumerate(batch.slots):
            run = batch.run(b)
            text = cache.write(slot, tokens[run.start : run.stop], batch, b)
            text.encoded = cache.texts[batch.sources[b].slot].encoded if batch.sources else None
            outputs.append(self._run(text, batch, b, b in batch.silent))
        return Passed(
            outputs[0] if len(outputs) == 1 else torch.cat(outputs) if outputs else torch.empty(0, self.vocab_size)
        )

    def logits(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        """Return logits [R, num_ids] after the processor's changes.

        hidden: the module's logits [R, V]. num_ids: how many of the first ids to return; None = all.
        """
        return wide(self._draws.logits(hidden[:, :num_ids].clone()))

    def norm(self, hidden: Tensor) -> Tensor:
        """Return `hidden` [R, V] unchanged, because logits need no norm."""
        return hidden

    def embed(self, ids: Seq[int]) -> Tensor:
        """Raise BadOption, because a module takes token ids and no embeddings."""
        raise BadOption(f"the {self.role} is a module, which takes ids and no vectors: use another drafter")

    def head(self, ids: Seq[int]) -> Any:
        """Raise BadOption, because the LM head of a module is not known here."""
        return self.embed(ids)

    def wait(self) -> None:
        """Wait until a CUDA device has computed all passes. On a CPU there is nothing to wait for."""
        if self.device == "cuda":
            torch.cuda.synchronize(self.place)

    def rounded(self, quantization: Quantization) -> ModuleModel:
        """Raise BadOption, because the weights of a module are never changed."""
        raise BadOption(
            f"the {self.role} is a module, whose weights are not rounded here: give a draft model of its own"
        )

    # ------------------------------------------------------------------------------------------- encoder and decoder

    def begin(self, sources: Mapping[int, Seq[int]], cache: ModuleCache) -> None:
        """Run the encoder over each input by itself, and store its output. sources: token ids by cache slot."""
        encoder = self.module.get_encoder()
        with torch.inference_mode():
            for slot, ids in sources.items():
                cache.fill(slot, ids, encoder(input_ids=torch.tensor([list(ids)], device=self.place)))

    def start_ids(self, pad_token_id: int) -> list[int]:
        """Return the token id that a decoder's text starts with, in a list. For a causal module the list is empty.

        pad_token_id: the start id where the module names no start id.
        """
        if not self.is_encoder_decoder:
            return []
        places = (self._generation, getattr(self.module, "config", None))
        known = (getattr(place, "decoder_start_token_id", None) for place in places)
        start = next((token for token in known if token is not None), pad_token_id)
        return [int(start[0] if isinstance(start, list) else start)]

    def end_ids(self) -> frozenset[int]:
        """Return the token ids that end the output, as the module's generation_config and config name them."""
        places = (self._generation, getattr(self.module, "config", None))
        known = (getattr(place, "eos_token_id", None) for place in places)
        return frozenset(i for ids in known if ids is not None for i in (ids if isinstance(ids, list) else [ids]))

    def check(self, inputs: Seq[int]) -> None:
        """Raise UserError for an input that is empty, has unknown ids, or is too long for the encoder.

        The engine refuses an input that is too long for a decoder.
        """
        if not len(inputs):
            raise BadOption("inputs has no tokens: give at least one id")
        if wrong := [i for i in inputs if not (isinstance(i, int) and 0 <= i < self.vocab_size)]:
            raise BadOption(
                f"inputs holds {shown(wrong[0])}, but the ids of the {self.role} are 0 .. {self.vocab_size - 1}"
            )
        if self.is_encoder_decoder and len(inputs) > self.max_positions:
            raise PromptTooLong(
                f"the input has {len(inputs)} tokens and the encoder of the {self.role} takes {self.max_positions}: "
                "shorten it"
            )

    # ------------------------------------------------------------------------------------------------------ its passes

    def new_past(self) -> Any:
        """Make an empty cache for the module; None where the module makes its own cache.

        A module of transformers gets cache layers that keep all tokens, so that tokens can be cut. A sliding window is
        then applied by the attention mask alone. Raises BadOption for a module with a state that cannot be cut.
        """
        config = self.module.config
        if not hasattr(config, "get_text_config"):  # a module that is not from transformers
            return None
        dynamic, pair = cache_classes()
        kinds = {type(layer).__name__ for layer in dynamic(config=config).layers}
        if getattr(self.module, "_is_stateful", False) or not kinds <= CUT_LAYERS:
            raise BadOption(
                f"the {self.role} ({self.model_type}) keeps a state that cannot be cut behind a rejected token: use "
                "use_cache=False, which runs the whole text in each pass"
            )
        return pair(dynamic(), dynamic()) if self.is_encoder_decoder else dynamic()

    def _run(self, text: Text, batch: RaggedBatch, b: int, is_silent: bool) -> Tensor:
        """Return the logits [n, V] of a run.

        is_silent: whether no logits are needed. The result is then zeros that take no memory.
        """
        num = len(batch.run(b))
        if is_silent:
            if self.uses_cache:
                self._behind(text, text.path(-1), num, 1)
            return torch.zeros(1, self.vocab_size, dtype=self.dtype, device=self.place).expand(num, -1)
        if not batch.is_tree(b):
            return self._behind(text, text.path(-1), num, num)
        rows: list[Tensor | None] = [None] * num
        first = len(text.nodes) - num
        for leaf in sorted(set(range(num)) - {text.parents[first + i] - first for i in range(num)}):
            path = [node - first for node in text.ancestors(first + leaf) if node >= first]
            new = [row for row in path if rows[row] is None]  # the end of the path: the rest was run for another leaf
            logits = self._behind(text, text.path(first + leaf), len(new), len(new))
            for row, values in zip(new, logits, strict=True):
                rows[row] = values
        return torch.stack([row for row in rows if row is not None])

    def _behind(self, text: Text, ids: list[int], num: int, num_wanted: int) -> Tensor:
        """Return the logits after each of the last `num_wanted` ids, [num_wanted, V].

        The last `num` ids are run. Ids before these are run, too, where the module's cache lacks them.
        """
        past_ids, past = text.past_ids, text.past
        text.past_ids, text.past = [], None  # the text stays without a cache where the pass fails
        start = _num_common(past_ids, ids, len(ids) - num)
        if self.uses_cache and past is None:
            past = self.new_past()
        past = prune_cache(past, len(past_ids) - start)
        rest = torch.tensor([ids[start:]], device=self.place)
        given: dict[str, Any] = {self._past: past, "use_cache": self.uses_cache}
        if self._keeps_last:
            given["logits_to_keep"] = num_wanted
        if self.is_encoder_decoder:
            output = self.module(encoder_outputs=text.encoded, decoder_input_ids=rest, **given)
        else:
            output = self.module(input_ids=rest, **given)
        if self.uses_cache:
            text.past, text.past_ids = getattr(output, self._past), ids
            if cached_tokens(text.past) != len(ids):
                raise BadOption(
                    f"the {self.role} returned a cache of {cached_tokens(text.past)} tokens behind {len(ids)}: use "
                    "use_cache=False"
                )
        logits: Tensor = output.logits[0, -num_wanted:, : self.vocab_size]
        return logits


def cache_classes() -> tuple[Any, Any]:
    """Return DynamicCache and EncoderDecoderCache. Raises NotFound where transformers is not installed."""
    try:
        from transformers import DynamicCache, EncoderDecoderCache
    except ImportError as error:
        raise NotFound(
            f"modules of transformers need that package ({error}): {pip('install transformers')}, or use_cache=False"
        ) from None
    return DynamicCache, EncoderDecoderCache


def _num_common(a: list[int], b: list[int], most: int) -> int:
    """Return the length of the common beginning of two texts, at most `most`."""
    if a[:most] == b[:most] and len(a) >= most:
        return most
    return next((i for i, (x, y) in enumerate(zip(a[:most], b, strict=False)) if x != y), min(len(a), most))


# ------------------------------------------------------------------------------------------------------------ the cache


@dataclass
class Text:
    """The tokens of a slot, and the module's own cache for them.

    kept: the tokens that stay. nodes: the tokens after the kept tokens: num_pending tokens that are not committed yet,
    then the tokens of the last run. parents: the parent of each node, -1 = the last kept token. past: the module's own
    cache. past_ids: the tokens in that cache, in order. encoded: the output of an encoder-decoder's encoder. It is
    stored in the slot of the encoder's input, and lent to a text that is run.
    """

    kept: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    num_pending: int = 0
    past: Any = None
    past_ids: list[int] = field(default_factory=list)
    encoded: Any = None

    def ancestors(self, node: int) -> list[int]:
        """Return the nodes on the path down to `node`, which comes last."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path(self, node: int) -> list[int]:
        """Return all kept tokens, then the tokens on the path down to `node`. node: -1 = the last node."""
        at = len(self.nodes) - 1 if node < 0 else node
        return [*self.kept, *(self.nodes[n] for n in self.ancestors(at))]

    def cut(self, num_nodes: int) -> None:
        """Forget all nodes but the first `num_nodes`."""
        del self.nodes[num_nodes:], self.parents[num_nodes:]


class ModuleCache:
    """The KVCache of a ModuleModel: the text of each slot. Memory belongs to the module, and is not counted here."""

    block_tokens = 1
    num_blocks = 2**40

    def __init__(self) -> None:
        self.texts: dict[int, Text] = {}

    def write(self, slot: int, tokens: Seq[int], batch: RaggedBatch, b: int) -> Text:
        """Add the tokens of a run after the pending tokens, and return the slot's text."""
        text = self.texts[slot]
        text.cut(text.num_pending)
        num_pending = len(text.nodes)
        if batch.is_tree(b):
            text.parents = [*text.parents[:num_pending], *batch.parents(b)[num_pending:]]
        else:
            text.parents = list(range(-1, num_pending + len(tokens) - 1))
        text.nodes += tokens
        return text

    def fill(self, slot: int, ids: Seq[int], encoded: Any) -> None:
        """Store an input of the encoder as the text of a slot, together with the encoder's output."""
        self.texts[slot] = Text(nodes=list(ids), parents=list(range(-1, len(ids) - 1)), encoded=encoded)

    def open(self, slot: int, tokens: Seq[int] = (), salt: str | None = None) -> int:
        """Begin a text. Return 0: none of its tokens is in the cache yet, because texts share nothing."""
        self.texts[slot] = Text()
        return 0

    def fork(self, slot: int, new_slot: int) -> None:
        """Begin a text with the kept tokens of another text, in a new slot.

        The encoder's output is shared. The keys and values of the new text are computed again.
        """
        self.texts[new_slot] = Text(kept=list(self.texts[slot].kept), encoded=self.texts[slot].encoded)

    def publish(self, slot: int, tokens: Seq[int]) -> None:
        """Do nothing, because texts share nothing."""

    def release(self, slot: int) -> None:
        """Forget a text."""
        self.texts.pop(slot, None)

    def length(self, slot: int) -> int:
        """Return the number of kept tokens in a slot; 0 for a slot without a text."""
        return len(self.texts[slot].kept) if slot in self.texts else 0

    def pending(self, slot: int) -> Seq[int]:
        """Return the parent of each pending token (a token that is written and not committed yet)."""
        text = self.texts.get(slot)
        return () if text is None else text.parents[: text.num_pending]

    def room(self, slot: int) -> Room:
        """Return a Room that is larger than any text."""
        return Room(self.length(slot), self.num_blocks, 0)

    def free_tokens(self, without: Collection[int] = ()) -> int:
        """Return a number of tokens that is larger than any text."""
        return self.num_blocks

    def missing_blocks(self, slot: int, num_tokens: int) -> int:
        """Return 0, because no memory is set aside."""
        return 0

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Do nothing, because no memory is set aside."""

    def keep(self, kept: Mapping[int, Seq[int]], held: Mapping[int, Held] | None = None) -> list[int]:
        """Keep the tokens of one path in each slot, leave the tokens of `held` pending, and drop all others.

        kept: by slot, the indices of the path's nodes. The module's own cache is cut by the next pass.
        """
        for slot, rows in kept.items():
            text = self.texts[slot]
            stay = (held or {}).get(slot, Held((), ()))
            text.kept += [text.nodes[row] for row in rows]
            text.nodes = [text.nodes[row] for row in stay.rows]
            text.parents = list(stay.parents)
            text.num_pending = len(text.nodes)
        return []

    def hold(self, slot: int, parents: Seq[int]) -> None:
        """Leave the tokens of the last run pending. Their parents are known from the pass, so `parents` is not read."""
        text = self.texts[slot]
        text.num_pending = len(text.nodes)

    def truncate_to(self, slot: int, length: int) -> int:
        """Keep only the first `length` tokens, and return `length`. Raises InternalError where the slot has fewer."""
        text = self.texts[slot]
        if length > len(text.kept):
            raise InternalError(f"slot {slot} keeps {len(text.kept)} tokens and cannot be cut to {length}")
        del text.kept[length:]
        text.num_pending = 0
        text.cut(0)
        return length

    def check_integrity(self) -> None:
        """Raise InternalError where the module's cache for a text does not have as many tokens as `past_ids`."""
        for slot, text in self.texts.items():
            if text.past is not None and cached_tokens(text.past) != len(text.past_ids):
                raise InternalError(f"the cache of slot {slot} does not hold its text")
