"""A conversation: `python examples/chat.py [MODEL]`. An empty line or Ctrl-D ends it.

The whole conversation is given again with each turn. What the turns have in common stays in the KV cache, so only the
new message is read.
"""

import sys

from forerun import LLM, SamplingParams


def read() -> str:
    """Return what is typed; "" at the end of the input."""
    try:
        return input("> ")
    except EOFError:
        return ""


def main() -> None:
    messages = []
    with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        while text := read():
            messages.append({"role": "user", "content": text})
            (answer,) = llm.chat(messages, SamplingParams(max_tokens=64, temperature=0))
            messages.append({"role": "assistant", "content": answer.text})
            print(answer.text)
            print(f"[{answer.report.mean_accepted_length:.2f} tokens per pass of the model]")


if __name__ == "__main__":
    main()
