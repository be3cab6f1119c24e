"""The shapes of requests that coding agents send: fields and nesting as their makers document them, with texts of ours.

They were written by hand and not captured from a running agent.
"""

from typing import Any


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


BASH = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
COMMAND = {"type": "array", "items": {"type": "string"}}
SHELL = {"type": "object", "properties": {"command": COMMAND}, "required": ["command"], "additionalProperties": False}
# Codex CLI, first turn: POST /v1/responses
CODEX: dict[str, Any] = {
    "model": "shipped",
    "instructions": "You are a coding agent running in a terminal.",
    "input": [
        said("developer", "<permissions instructions>\nread-only\n</permissions instructions>"),
        said("user", "<environment_context>\n  <cwd>/src</cwd>\n</environment_context>"),
        said("user", "def add("),
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": SHELL},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "client_metadata": {"x-codex-installation-id": "4d1a"},
}

REMINDED = [
    {"type": "text", "text": "<system-reminder>\nThe date is known.\n</system-reminder>"},
    {"type": "text", "text": "def add(", "cache_control": {"type": "ephemeral"}},
]
# Claude Code: POST /v1/messages?beta=true
CLAUDE_CODE: dict[str, Any] = {
    "model": "shipped",
    "messages": [{"role": "user", "content": REMINDED}],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.0"},
        {"type": "text", "text": "You are a command line tool.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [{"name": "Bash", "description": "Executes a command.", "input_schema": BASH}],
    "metadata": {"user_id": "user_4d1a_account__session_0199"},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
