"""What mkdocs is told beside mkdocs.yml: pages that stand elsewhere, and folders whose pages need no list.

CONTRIBUTING.md, CHANGELOG.md and the programs of examples/ become pages. Links to them lead there.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
FOLDERS = {"Methods": "methods", "History": "development/history"}
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def on_config(config: Any) -> Any:
    """Put the pages of a folder into the navigation, wherever it names the folder's section."""
    _fill(config.nav)
    return config


def _fill(entries: list[Any]) -> None:
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        for title, value in entry.items():
            if title in FOLDERS:
                folder = FOLDERS[title]
                names = sorted(page.name for page in (ROOT / "docs" / folder).glob("*.md"))
                names.sort(key=lambda name: name != "README.md")  # the others stay in order
                entry[title] = [f"{folder}/{name}" for name in names]
            elif isinstance(value, list):
                _fill(value)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand outside of docs/."""
    made = {PAGES[name]: (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "CHANGELOG.md")}
    made["examples.md"] = _examples()
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def _examples() -> str:
    """One page with all programs; each begins with its docstring, which says how it is run."""
    programs = [
        f"## {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        for path in sorted((ROOT / "examples").glob("*.py"))
    ]
    return "\n".join(["# Examples\n\nShort programs. Each runs as it stands, and each is a test.\n", *programs])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links out of docs/ to the pages made of what they mean."""
    source = page.file.src_uri
    is_from_the_root = source in {"contributing.md", "changelog.md"}
    home = "" if is_from_the_root else posixpath.join("docs", posixpath.dirname(source))

    def led(link: re.Match[str]) -> str:
        before, path, after = link.groups()
        if "://" in path:
            return link[0]
        goal = posixpath.normpath(posixpath.join(home, path))  # from the root of the repository
        if goal in PAGES:
            goal = PAGES[goal]
        elif goal == "examples":
            goal = "examples.md"
        elif goal.startswith("examples/"):
            after = f"#{posixpath.basename(goal).replace('.', '')})"
            goal = "examples.md"
        elif goal.startswith("docs/"):
            goal = goal.removeprefix("docs/")
        return f"{before}{posixpath.relpath(goal, posixpath.dirname(source) or '.')}{after}"

    return LINK.sub(led, markdown)
