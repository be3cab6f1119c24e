"""Routes of vLLM about tokens: /tokenize, /detokenize, /tokenizer_info.

A body of /tokenize has a prompt or messages, as in vLLM, or content, as in llama-server. With content, special tokens
are added only on request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.errors import shown
from forerun.serve import chats
from forerun.serve.absent import ADAPTERS, RANKS, VECTORS
from forerun.serve.bodies import Form, Given, Job, Refused
from forerun.serve.fields import FLAG, ID, TEXT, Fields, array, honoured, required
from forerun.serve.routes import Api, Count, Counted, Look, Models, Reader, plain_error
from forerun.serve.served import template_of
from forerun.text.small_files import SmallFiles
from forerun.text.template_files import special_tokens
from forerun.types import SamplingParams

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
_OF_CHATS: Fields = {name: replace(field, is_required=False) for name, field in chats.FIELDS.items()}
_OF_CONTENT = honoured(content=TEXT, add_special=FLAG, with_pieces=FLAG, parse_special=FLAG)
_OF_PROMPTS = honoured(prompt=TEXT)
_FIELDS: Fields = {
    **honoured(model=TEXT, add_special_tokens=FLAG, return_token_strs=FLAG),
    **_OF_PROMPTS,
    **_OF_CHATS,
    **_OF_CONTENT,
}


_OF_IDS: Fields = {**honoured(model=TEXT), "tokens": required(array(ID), is_read=True)}


def _tokenize(texts: Reader, read: Given) -> Counted:
    """Tokenize a text or a conversation as for generation. Return the token ids, and the names of ignored fields.

    texts: reads the bodies of the model. read: the fields of the body.
    """
    given, ignored = read.fields, tuple[str, ...]()
    if "content" in given:
        return _tokenize_content(texts, given), ()
    if ("prompt" in given) == ("messages" in given):
        raise Refused("the body must have a prompt or messages: give one of them", "prompt")
    if others := given.keys() & _OF_CONTENT.keys():
        raise Refused(f"{min(others)} belongs to content, and the body has none: drop it", min(others))
    if "messages" in given:
        if given.get("add_special_tokens"):
            raise Refused("add_special_tokens=true is not possible: the chat template has them; leave it out")
        talk = texts.templated(Job(TOKENIZE, texts.name, SamplingParams(), **chats.conversation(read)))
        ids, ignored = texts.encode(talk)[0], talk.ignored
    else:
        if others := given.keys() & _OF_CHATS.keys():
            raise Refused(f"{min(others)} belongs to messages, and the body has a prompt: drop it", min(others))
        texts.check_text(given["prompt"])
        ids = texts.tokenizer.encode(given["prompt"], given.get("add_special_tokens", True))
    answer = {"tokens": ids, "count": len(ids), "max_model_len": texts.max_seq_len}
    if given.get("return_token_strs"):
        answer["token_strs"] = [texts.tokenizer.id_to_token.get(i, "") for i in ids]
    return answer, ignored


def _tokenize_content(texts: Reader, given: dict[str, Any]) -> dict[str, Any]:
    if others := given.keys() - _OF_CONTENT.keys() - {"model"}:
        raise Refused(f"content and {min(others)} are of two forms of this body: keep to one", "content")
    text = given["content"]
    texts.check_text(text)
    has_special = given.get("add_special", False)
    if given.get("parse_special", True):
        ids = texts.tokenizer.encode(text, has_special)
    else:
        ids = texts.literal_ids(text, has_special)
    if given.get("with_pieces"):
        return {"tokens": [{"id": i, "piece": texts.tokenizer.own_text(i)} for i in ids]}
    return {"tokens": ids}


def _detokenize(texts: Reader, read: Given) -> Counted:
    """Return the text that the token ids in a body stand for. Raises Refused.

    texts: reads the bodies of the model. read: the fields of the body.
    """
    ids = read.fields.get("tokens")
    num_ids = texts.tokenizer.num_ids
    if isinstance(ids, list) and len(ids) > (most := texts.max_seq_len):
        message = f"tokens has {len(ids):,} ids and the context {most:,}, so no text is as long: send them in parts"
        raise Refused(message, "tokens")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < num_ids for token in ids):
        message = f"tokens={shown(ids)} is not possible: it must be a list of ids in 0 .. {num_ids - 1}"
        raise Refused(message, "tokens")
    text = texts.tokenizer.decode(ids)
    return {"prompt": text, "content": text}, ()  # the names of vLLM and of llama-server


def _tokenizer_info(models: Models, key: str) -> dict[str, Any]:
    """Return the first model's special tokens, context length and chat template, for clients that tokenize texts.

    key: not used (see `Look`).
    """
    llm = models.first.llm
    names = llm.tokenizer.id_to_token
    ends = [names[end] for end in sorted(llm.engine.end_ids) if end in names]
    special = {"bos_token": None, "eos_token": ends[0] if ends else None, "pad_token": None}
    special |= special_tokens(SmallFiles(llm.checkpoint.folder))
    return {**special, "model_max_length": llm.engine.max_seq_len, "chat_template": template_of(models.first) or None}


API = Api(
    (
        Count(
            Form(TOKENIZE, _FIELDS, is_of_an_answer=False), _tokenize, alternatives=("prompt", "messages", "content")
        ),
        Count(
            Form(DETOKENIZE, _OF_IDS, is_of_an_answer=False),
            _detokenize,
        ),
        Look("/tokenizer_info", _tokenizer_info, is_slow=True),
    ),
    plain_error,
    absent={"/pooling": VECTORS, "/score": RANKS, "/classify": RANKS, "/v1/load_lora_adapter": ADAPTERS},
)
