"""Small modules: random ones of transformers, and one whose exact probabilities are known."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from forerun.models.toy import ToyModel

VOCAB = 97
PROMPT = [5, 9, 5, 9, 12, 40, 33, 5, 9]
_DECODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "initializer_factor": 2.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "init_std": 0.3, "forced_eos_token_id": None,
}  # fmt: skip
_MADE = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_DECODER, "sliding_window": 8}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", _BART),
}


def module_of(kind: str, seed: int | None = None, **more: int) -> Any:
    """Make a random module of a few thousand weights. Those without a seed say texts of several tokens."""
    model, config, sizes = _MADE[kind]
    given = {"vocab_size": VOCAB, **({"initializer_range": 0.3} if kind == "gpt2" else {}), **sizes, **more}
    torch.manual_seed({"bart": 2}.get(kind, 0) if seed is None else seed)
    return getattr(transformers, model)(getattr(transformers, config)(**given)).eval()


def noisy(module: Any, noise: float = 0.05) -> Any:
    """Make a drafter that is right most of the time."""
    near, generator = copy.deepcopy(module), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(noise * parameter.std().nan_to_num(0.0) * torch.randn(parameter.shape, generator=generator))
    return near


def generated(module: Any, inputs: list[int], num: int, **options: Any) -> list[int]:
    """What generate() of transformers says, greedily."""
    given = {"do_sample": False, "num_beams": 1, "eos_token_id": None, "pad_token_id": 0, **options}
    found = module.generate(torch.tensor([inputs], device=module.device), max_new_tokens=num, **given)[0].tolist()
    return found[1:] if module.config.is_encoder_decoder else found[len(inputs) :]


class ToyModule(torch.nn.Module):
    """A toy model in the form of transformers, with a cache of tuples in which ids and positions stand.

    A cache that was not cut, or cut too far, makes it say something else. cross: layers have four tensors, of which the
    last two must come back as they were.
    """

    def __init__(self, toy: ToyModel, *, cross: bool = False, max_positions: int = 64) -> None:
        super().__init__()
        self.toy, self.cross = toy, cross
        self.config = SimpleNamespace(vocab_size=toy.config.vocab_size, max_position_embeddings=max_positions)
        self.calls: list[tuple[int, int]] = []  # tokens in the cache, tokens given
        self.eval()

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        new = input_ids.double()[:, None, :, None]
        num_past = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        at = num_past + torch.arange(new.shape[2], dtype=torch.float64)[None, None, :, None]
        layer = (new, at)
        if past_key_values is not None:
            layer = tuple(torch.cat(pair, dim=2) for pair in zip(past_key_values[0], layer, strict=False))
        self.calls.append((num_past, new.shape[2]))
        encoder = ()
        if self.cross:
            encoder = (torch.full((1, 1, 7, 1), 3.0),) * 2 if past_key_values is None else past_key_values[0][2:]
            assert all(tensor.shape[2] == 7 for tensor in encoder)
        tokens, places = ([int(x) for x in tensor.flatten().tolist()] for tensor in layer)
        rows = [self.toy._at(tokens[: i + 1], places[: i + 1]) for i in range(num_past, len(tokens))]
        return SimpleNamespace(logits=torch.from_numpy(np.stack(rows))[None], past_key_values=((*layer, *encoder),))


class NewerModule(ToyModule):
    """The same in the form of transformers from 5.24 on, and without the older names."""

    def forward(self, input_ids: Tensor, cache: Any = None, use_cache: bool = False) -> Any:  # type: ignore[override]
        made = super().forward(input_ids, cache, use_cache)
        return SimpleNamespace(logits=made.logits, cache=made.past_key_values)
