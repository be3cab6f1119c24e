"""What is asked of servers like this one and is not built here: refused by name, each in one sentence.

A route that other servers have and this one has not is no misprint: its client is told that, and what to do instead.
"""

from __future__ import annotations

_TEXTS = "this server's models write texts"
_VECTORS = f"no embeddings are made here: {_TEXTS}; ask a server of an embedding model"
_RANKS = f"nothing is ranked here: {_TEXTS}; ask a server of a reranking model"
_IMAGES = f"no images are made here: {_TEXTS}"
_SPEECH = f"nothing is heard or spoken here: {_TEXTS}"
_FILES = "no files are kept here: `forerun batch` answers a file of requests"
_KEPT = "no assistants and threads are kept here: send the conversation to /v1/chat/completions or /v1/responses"
_FIXED = "models are not fetched or changed by requests: start `forerun serve` with the ones that are to be served"

# By the path, or by what it begins with where that ends in a slash.
ABSENT = {
    "/v1/embeddings": _VECTORS,
    "/embeddings": _VECTORS,
    "/embedding": _VECTORS,
    "/api/embed": _VECTORS,
    "/api/embeddings": _VECTORS,
    "/pooling": _VECTORS,
    "/v1/rerank": _RANKS,
    "/v2/rerank": _RANKS,
    "/rerank": _RANKS,
    "/v1/reranking": _RANKS,
    "/reranking": _RANKS,
    "/v1/score": _RANKS,
    "/score": _RANKS,
    "/classify": _RANKS,
    "/v1/images/": _IMAGES,
    "/v1/audio/": _SPEECH,
    "/v1/realtime": _SPEECH,
    "/v1/moderations": "texts are not judged here: ask a server of a moderation model",
    "/v1/files": _FILES,
    "/v1/files/": _FILES,
    "/v1/batches": _FILES,
    "/v1/batches/": _FILES,
    "/v1/messages/batches": _FILES,
    "/v1/assistants": _KEPT,
    "/v1/threads": _KEPT,
    "/v1/threads/": _KEPT,
    "/v1/conversations": _KEPT,
    "/v1/fine_tuning/": "no models are trained by requests: `forerun train` trains drafts",
    "/api/pull": _FIXED,
    "/api/push": _FIXED,
    "/api/create": _FIXED,
    "/api/copy": _FIXED,
    "/api/delete": _FIXED,
    "/api/blobs/": _FIXED,
    "/infill": "texts are filled in by /v1/completions with a suffix",
    "/lora-adapters": "no adapters are loaded here: merge one into its model, and serve that",
    "/v1/load_lora_adapter": "no adapters are loaded here: merge one into its model, and serve that",
}


def refusal(path: str) -> str | None:
    """The sentence for a path that is known and not built; None for any other."""
    beginnings = (f"{path[:end]}/" for end in range(len(path)) if path[end] == "/")
    return next((ABSENT[one] for one in (path, *beginnings) if one in ABSENT), None)
