"""The programs of docs/site as modules, for they stand in no package."""

import importlib.util
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "site"


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = _load("pages")
pictures = pages.pictures()
