"""Prompts that the page offers as examples. Drafting gains much for some of them, and little for others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """One prompt. is_chat: True = a message of a conversation, False = the beginning of a text to continue."""

    title: str
    text: str
    is_chat: bool = False


_EDIT = '''Rename the method `get` to `fetch` in this class and print the whole class.

```python
class Shelf:
    """Keeps things by their names."""

    def __init__(self):
        self.things = {}

    def put(self, name, thing):
        if name in self.things:
            raise KeyError(f"{name} is on the shelf already")
        self.things[name] = thing

    def get(self, name):
        if name not in self.things:
            raise KeyError(f"{name} is not on the shelf")
        return self.things[name]
```'''

_QUESTION = """Read the text, then answer with the sentence of the text that says it: when is the pool closed?

The pool in Harbour Road opens at seven. On the first Monday of each month it is closed for cleaning. Children under \
ten swim with an adult. The café beside the pool sells soup, bread and coffee until four."""

CHATS = (
    Example("edit a class", _EDIT, is_chat=True),
    Example("quote from a text", _QUESTION, is_chat=True),
    Example("a list", "List ten kinds of boats, each with one sentence about what it is used for.", is_chat=True),
    Example("a story", "Tell a short story about a clock that runs backwards.", is_chat=True),
)

CODE = (
    Example("a function", "def fib(n):\n"),
    Example(
        "a class",
        'class Stack:\n    """A list of things of which the last comes first."""\n\n    def __init__(self):\n'
        "        self.items = []\n\n    def push(self, item):\n",
    ),
    Example(
        "something that repeats",
        "for i in range(10):\n    for j in range(10):\n        for k in range(10):\n            print(i, j, k)\n\nfor ",
    ),
    Example("a loop over files", 'import os\n\nfor name in os.listdir("."):\n'),
)
