"""Reasons why this server lacks some APIs of other servers."""

from __future__ import annotations

TEXTS = "this server's models write texts"
VECTORS = f"no embeddings are made here: {TEXTS}; ask a server of an embedding model"
RANKS = f"nothing is ranked here: {TEXTS}; ask a server of a reranking model"
ADAPTERS = "no adapters are loaded here: merge one into its model, and serve that"
FILES = "no files are kept here: `forerun batch` answers a file of requests"
