"""Live generation for the page: what a running engine drafts, accepts and rejects."""

from __future__ import annotations

from fastapi import APIRouter

from forerun.engine.llm import LLM


def make_router(llm: LLM) -> APIRouter:
    """The routes of the widgets Live and Trace."""
    return APIRouter()
