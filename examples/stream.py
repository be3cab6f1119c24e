"""Text as it is verified: `python examples/stream.py [MODEL]`.

First one stream in a loop. Then two at once with asyncio: they share every pass of the model, and each has the text
that it would have alone.
"""

import asyncio
import sys

from forerun import LLM, SamplingParams

PROMPTS = ["What is a prime number?", "Name three colours of the rainbow."]
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=7)


async def text_of(llm: LLM, prompt: str) -> str:
    """Return what comes behind a prompt, piece by piece, while other tasks run."""
    return "".join([chunk.text async for chunk in llm.astream(prompt, PARAMS)])


async def both(llm: LLM) -> list[str]:
    """Return the texts of all prompts, which run in one batch."""
    return await asyncio.gather(*(text_of(llm, prompt) for prompt in PROMPTS))


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
    alone = ""
    for chunk in llm.stream(PROMPTS[0], PARAMS):
        print(chunk.text, end="", flush=True)
        alone += chunk.text
    print()
    texts = asyncio.run(both(llm))
    print(texts[1])
    print("the same text beside another request:", texts[0] == alone)


if __name__ == "__main__":
    main()
