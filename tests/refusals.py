"""What is said where something is refused."""

from collections.abc import Callable
from typing import Any

import pytest


def refusal(
    kind: type[Exception] | tuple[type[Exception], ...], call: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> str:
    """Call what must raise an error of this kind, and return the sentence of the error."""
    with pytest.raises(kind) as refused:
        call(*args, **kwargs)
    return str(refused.value)
