"""Routes of llama-server that its web page, editors and older clients need.

Follows tools/server/README.md of llama.cpp. The module openai.py has the features of llama-server that belong to
OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError, shown
from forerun.serve import chats
from forerun.serve.absent import ADAPTERS, RANKS, VECTORS
from forerun.serve.bodies import (
    ONE_ANSWER,
    Form,
    Given,
    Job,
    Refused,
    are_ids,
    params_of,
    report_of,
    status_of,
    wants_report,
)
from forerun.serve.events import event
from forerun.serve.fields import (
    EFFORT,
    FLAG,
    IDS,
    OF_PARAMS,
    PARAMS,
    STOPS,
    TEXT,
    Fields,
    array,
    by_reader,
    either,
    honoured,
    inert,
    limited,
    neutral,
    noted,
    one_of,
    required,
)
from forerun.serve.routes import Api, Count, Counted, Generate, Look, Models, Reader
from forerun.serve.served import template_of
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.request import Chunk, RequestOutput
    from forerun.text.tokenizer import Tokenizer

COMPLETION, INFILL, APPLY_TEMPLATE = "/completion", "/infill", "/apply-template"
PROPS, SLOTS = "/props", "/slots"
_CUT = "tokens are cut by top_k, top_p and min_p"
_FIELDS: Fields = {
    "prompt": required(either(TEXT, IDS), is_read=True),
    **honoured(model=TEXT, stream=FLAG, penalize_nl=FLAG, response_fields=array(TEXT)),
    **by_reader(
        n_predict=either(one_of(-1), OF_PARAMS["max_tokens"]),
        stop=limited("stop", STOPS),
        repeat_penalty=OF_PARAMS["repetition_penalty"],
    ),
    "n_probs": neutral((0,), "/v1/completions has logprobs"),
    "typical_p": neutral((1, 1.0), _CUT),
    "top_n_sigma": neutral((-1, -1.0), _CUT),
    "xtc_probability": neutral((0, 0.0), _CUT),
    "mirostat": neutral((0,), _CUT),
    "dynatemp_range": neutral((0, 0.0), "the temperature is one number"),
    "dry_multiplier": neutral((0, 0.0), "repetition is held back by repeat_penalty"),
    "repeat_last_n": neutral((-1,), "repeat_penalty counts the whole text"),
    "lora": neutral(([],), "no adapters are loaded here"),
    "n_cmpl": neutral((1,), ONE_ANSWER),
    "samplers": neutral(([],), "the temperature comes first, then top_k, min_p and top_p"),
    "min_keep": neutral((0,), _CUT),
    "t_max_predict_ms": neutral((-1, 0), "an answer ends by n_predict, stop, and the time of the server"),
    "n_indent": neutral((0,), "lines are as the model writes them"),
    "return_tokens": neutral((False,), "each piece of a stream has its tokens"),
    **inert("an answer is the same wherever its prompt is found", "cache_prompt"),
    **inert("a prompt is read to its end", "t_max_prompt_ms"),
    **inert("a context that is full ends the answer, and is not moved on", "n_keep", "n_discard"),
    **inert("tokens are the same wherever they are drawn", "backend_sampling"),
    **inert("n_probs is off", "post_sampling_probs"),
    **inert("xtc_probability is off", "xtc_threshold"),
    **inert("mirostat is off", "mirostat_tau", "mirostat_eta"),
    **inert("dynatemp_range is off", "dynatemp_exponent"),
    **inert("dry_multiplier is off", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
}
_OF_INFILL: Fields = {
    **{name: field for name, field in _FIELDS.items() if name not in ("samplers", "n_indent", "t_max_predict_ms")},
    "input_prefix": required(TEXT, "send the text on both sides of what is to be filled in"),
    "input_suffix": required(TEXT, "send the text on both sides of what is to be filled in"),
    **honoured(prompt=TEXT),  # how the text that is to be filled in begins
    **noted("input_extra", "samplers", "n_indent", "t_max_predict_ms"),  # as editors send them
}
_OF_TEMPLATES: Fields = {
    **chats.FIELDS,
    **chats.CHOICE,
    **honoured(model=TEXT, reasoning_effort=EFFORT),
    **inert("nothing is generated", *PARAMS, "stream", "stream_options", "max_tokens", "n", "stop"),
    **inert("nothing is generated", "logprobs", "top_logprobs"),
}
_NAMES = {"n_predict": "max_tokens", "stop": "stop", "repeat_penalty": "repetition_penalty"}
_OTHER_NAMES = {"max_tokens": "n_predict"}


def _read(read: Given, model: str, defaults: Mapping[str, Any]) -> Job:
    prompt: Any = read.fields["prompt"]
    if not isinstance(prompt, str) and not are_ids(prompt):
        raise Refused(f"prompt={shown(prompt)} is not possible: it must be a text, or a list of token ids", "prompt")
    return _job(COMPLETION, read, model, defaults, prompt)


def _read_infill(read: Given, model: str, defaults: Mapping[str, Any]) -> Job:
    prefix, begun, suffix = (read.fields.get(name, "") for name in ("input_prefix", "prompt", "input_suffix"))
    return _job(INFILL, read, model, defaults, prefix + begun, suffix)


def _job(
    url: str, read: Given, model: str, defaults: Mapping[str, Any], prompt: str | list[int], suffix: str | None = None
) -> Job:
    given = read.fields
    if not given.get("penalize_nl", True) and given.get("repeat_penalty") not in (None, 1):
        message = "penalize_nl=false is not possible: repeat_penalty counts ends of lines, too; leave out one of them"
        read.ignore(Refused(message, "penalize_nl", code="unsupported_parameter"))
    return Job(
        url,
        model,
        params_of(given, {"max_tokens": None, **defaults}, _NAMES, None),
        prompts=(prompt,),
        suffix=suffix,
        stream=given.get("stream", False),
        report=wants_report(given),
        ignored=tuple(read.ignored),
        given={"response_fields": [path.split("/") for path in given.get("response_fields", [])]},
    )


def _apply_template(texts: Reader, read: Given) -> Counted:
    """Render a conversation with the chat template. Return the prompt, and the names of ignored fields.

    No answer is generated. texts: reads the bodies of the model. read: the fields of the body.
    """
    effort = read.fields.get("reasoning_effort")
    talk = Job(APPLY_TEMPLATE, texts.name, SamplingParams(), effort=effort, **chats.conversation(read))
    talk = texts.templated(talk)
    return {"prompt": texts.rendered(talk)}, talk.ignored


def answer(
    job: Job, outputs: Seq[RequestOutput], tokenizer: Tokenizer, answer_id: str, created_s: int
) -> dict[str, Any]:
    """Return the body of a whole answer, as sent without streaming."""
    return _chosen(job, {**_ending(job, outputs), "content": outputs[0].text})


def _chosen(job: Job, whole: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `whole` that the request lists in response_fields; all of `whole` if it lists none.

    The result is flat: a nested field is named by its path, such as timings/prompt_n.
    """
    chosen = dict[str, Any]()
    for *path, name in job.given["response_fields"]:
        inside: Any = whole
        for key in path:
            inside = inside.get(key) if isinstance(inside, dict) else None
        if isinstance(inside, dict) and name in inside:
            chosen["/".join((*path, name))] = inside[name]
    return chosen if job.given["response_fields"] else whole


class Stream:
    """Makes the server-sent events of one streamed answer; see `routes.Events`."""

    def __init__(self, job: Job, prompts: Seq[Seq[int]], tokenizer: Tokenizer, answer_id: str, created_s: int) -> None:
        self._job = job

    def begin(self) -> bytes:
        """Return no bytes, because this API's first event already has text."""
        return b""

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """Return the event for a chunk of the answer; no bytes if the chunk has no text."""
        if not chunk.text:
            return b""
        return event({"index": index, "content": chunk.text, "tokens": chunk.token_ids, "stop": False})

    def end(self, outputs: Seq[RequestOutput]) -> bytes:
        """Return the last event, with the reason why the answer ended, token counts and durations."""
        return event(_chosen(self._job, _ending(self._job, outputs)))

    def fail(self, error: ForerunError) -> bytes:
        """Return the event that reports an error after the response's status has been sent."""
        return event(error_answer(error)[1])


def error_answer(error: ForerunError, request_id: str = "") -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the JSON body with which this API reports an error."""
    status = status_of(error)[0]
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"code": status, "message": str(error), "type": kind}}


def _ending(job: Job, outputs: Seq[RequestOutput]) -> dict[str, Any]:
    output = outputs[0]
    report = output.report
    num = len(output.token_ids)
    num_prompt = len(output.prompt_ids)
    begun_s = report.scheduled_at_s or report.arrived_at_s
    first_s = report.first_token_at_s or report.ended_at_s or begun_s
    prompt_ms, predicted_ms = 1e3 * (first_s - begun_s), 1e3 * ((report.ended_at_s or first_s) - first_s)
    kind = "limit" if output.finish_reason == "length" else "word" if output.stop_text else "eos"
    ending = {
        "index": output.index,
        "content": "",
        "tokens": [],
        "id_slot": 0,
        "stop": True,
        "model": job.model,
        "tokens_predicted": num,
        "tokens_evaluated": num_prompt,
        "tokens_cached": report.num_cached_tokens,
        "stop_type": kind,
        "stopping_word": output.stop_text or "",
        "truncated": False,
        "timings": {
            "cache_n": report.num_cached_tokens,
            "prompt_n": num_prompt - report.num_cached_tokens,
            "prompt_ms": prompt_ms,
            "predicted_n": num,
            "predicted_ms": predicted_ms,
            "predicted_per_second": 1e3 * (num - 1) / predicted_ms if predicted_ms > 0 else None,
            "draft_n": report.num_drafted,
            "draft_n_accepted": report.num_accepted,
        },
    }
    return ending | ({"forerun": report_of(outputs)} if job.report else {})


def props(models: Models, key: str) -> dict[str, Any]:
    """Return the properties of the first model. The web page of llama-server requests them before anything else.

    key: not used (see `Look`).
    """
    service = models.first
    return {
        "default_generation_settings": {
            "n_ctx": service.llm.engine.max_seq_len,
            "params": dict(service.llm.usual_fields),
        },
        "total_slots": service.llm.config.max_batch_size,
        "model_alias": service.name,
        "model_path": service.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": template_of(service),
        "build_info": "forerun",
    }


def slots(models: Models, key: str) -> list[dict[str, Any]]:
    """Return one slot for each sequence that the first model's batch can hold.

    A slot does not say which request it holds. key: not used (see `Look`).
    """
    llm = models.first.llm
    num_running = len(llm.engine.scheduler.running)
    n_ctx = llm.engine.max_seq_len
    return [
        {"id": i, "n_ctx": n_ctx, "speculative": llm.config.draft != "none", "is_processing": i < num_running}
        for i in range(llm.config.max_batch_size)
    ]


API = Api(
    (
        Generate(Form(COMPLETION, _FIELDS, other_names=_OTHER_NAMES), _read, answer, Stream, also=("/completions",)),
        Generate(Form(INFILL, _OF_INFILL, other_names=_OTHER_NAMES), _read_infill, answer, Stream),
        Count(Form(APPLY_TEMPLATE, _OF_TEMPLATES, is_of_an_answer=False), _apply_template),
        Look(PROPS, props),
        Look(SLOTS, slots),
    ),
    error_answer,
    absent={"/embedding": VECTORS, "/reranking": RANKS, "/v1/reranking": RANKS, "/lora-adapters": ADAPTERS},
)
