"""Writes what documents say of the code: `make pages`, which is `python docs/site/pages.py`.

What is written stands between two comments, `<!-- begin: NAME -->` and `<!-- end -->`, within a line or around lines;
everything else in a page is its author's. `parts` says what each name stands for. The options of a method need no
comments of their author: a page of docs/methods/ without them gets them at its end. Numbers of pair.json, which are
links, and two pictures are written, too (docs/site/pictures.py). A test compares all of it with the code.
"""

import dataclasses
import functools
import importlib
import importlib.util
import re
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.main

from forerun import errors, registry, verify
from forerun.cli.main import app
from forerun.config import EngineConfig
from forerun.drafters import Target
from forerun.engine.opened import Opened
from forerun.errors import UserError
from forerun.models.families import gguf_families, model_types
from forerun.registry import PeerOption, flag_of, names
from forerun.serve.apis import apis, generating
from forerun.serve.fields import SHARED
from forerun.serve.options import Limits, ServerOptions
from forerun.serve.routes import Count, Generate, Look
from forerun.types import SamplingParams
from forerun.verify import beams

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PART = re.compile(r"<!-- begin: ([^\n]+?) -->(.*?)<!-- end -->", re.DOTALL)
SEARCH, SEARCH_OPTIONS = "beam", ("num_beams", "draft_beams", "length_penalty", "early_stopping")  # a page, no room
UNDER_LOAD = (  # the options of the engine that docs/study/serving.md is about
    *("max_batch_size", "max_num_batched_tokens", "prefill_chunk_tokens", "max_seq_len", "kv_cache_tokens"),
    *("kv_cache_dtype", "prefill_stretch", "max_itl_ms", "draft_catchup_tokens"),
)

# ---------------------------------------------------------------------------------------------------------- the methods


def first_sentence(module: types.ModuleType) -> str:
    """Return the first sentence of a file's docstring; a full stop inside of one, as in "et al. 2023", ends none."""
    paragraph = " ".join((module.__doc__ or "").split("\n\n")[0].split())
    found = re.match(r".*?[.](?=\s+[A-Z]|$)", paragraph)
    return _cell(found[0] if found else paragraph)


def drafter_facts(module: types.ModuleType) -> tuple[str, str]:
    """Return shape and draws of a drafter with its default options, "-" where it cannot be built of these alone."""
    try:
        drafter = module.build(module.Options(), shipped_target())
    except UserError:
        return "-", "-"
    return drafter.shape, drafter.draws


@functools.cache
def shipped_target() -> Target:
    """Return the shipped target, for which there is a draft model."""
    opened = Opened.of(EngineConfig(target="shipped", ops="reference", max_batch_size=1, max_seq_len=256))
    return Target.of(opened.load().model, opened)


def rule_facts(module: types.ModuleType) -> tuple[str, str, str]:
    """Return whether a rule is lossless, and the shapes and draws that it judges."""
    return "yes" if module.LOSSLESS else "**no**", ", ".join(module.SHAPES), ", ".join(module.DRAWS)


Facts = Callable[[types.ModuleType], tuple[str, ...]]
# Room: the columns of its table beside name and sentence, and what stands in them.
ROOMS: dict[str, tuple[tuple[str, ...], Facts]] = {
    "drafters": (("drafts", "siblings"), drafter_facts),
    "verify": (("lossless", "judges", "siblings"), rule_facts),
    "pacing": ((), lambda module: ()),
}


def methods(room: str) -> dict[str, types.ModuleType]:
    """Return the methods of a room by name."""
    return {name: importlib.import_module(f"forerun.{room}.{name}") for name in names(f"forerun.{room}")}


def table_of(room: str) -> str:
    """Return a line for each method of a room."""
    columns, facts = ROOMS[room]
    rows = [(f"[{name}]({name}.md)", *facts(module), first_sentence(module)) for name, module in methods(room).items()]
    return table(("name", *columns, "in a sentence"), rows)


def sentences(modules: Mapping[str, types.ModuleType], folder: str = "") -> str:
    """Return a line for each method: its page in a folder, and its first sentence."""
    rows = [(f"[{name}]({folder}{name}.md)", first_sentence(module)) for name, module in modules.items()]
    return table(("name", "in a sentence"), rows)


# ---------------------------------------------------------------------------------------------------------- the options


def options_table(cls: Any, of: Sequence[str] | None = None, *, as_flags: bool = False) -> str:
    """Return a line for each option of a dataclass that says what it is, or for those of some names."""
    hints = typing.get_type_hints(cls)
    rows = [
        (
            f"`{flag_of(field) if as_flags else field.name}`",
            values_of(field, hints[field.name]),
            default_of(field),
            meaning_of(field),
        )
        for field in dataclasses.fields(cls)
        if "help" in field.metadata and (of is None or field.name in of)
    ]
    return table(("option", "values", "default", "meaning"), rows) if rows else "It has no options."


def values_of(field: dataclasses.Field[Any], hint: Any) -> str:
    """Return what an option may be: its choices, its range and unit, or its types."""
    about = field.metadata
    if "choices" in about:
        return ", ".join(f"`{choice}`" for choice in about["choices"])
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    words = [KINDS[typing.get_origin(kind) or kind] for kind in kinds if (typing.get_origin(kind) or kind) in KINDS]
    return _cell(" or ".join([_range(about) if word == NUMBER else word for word in words])) or "text"


NUMBER = "a number"
KINDS = {
    bool: "true, false",
    int: NUMBER,
    float: NUMBER,
    str: "text",
    Sequence: "a list",
    tuple: "a list",
    Mapping: "a mapping",
}


def _range(about: Mapping[str, Any]) -> str:
    low, above, high, unit = about.get("min"), about.get("above"), about.get("max"), about.get("unit")
    high = None if high == sys.float_info.max else high
    if about.get("range") == "at least 0":
        low, above = 0, None
    if above is not None:
        text = f"above {_number(above)}" + (f", at most {_number(high)}" if high is not None else "")
    elif low is not None:
        text = f"{_number(low)} or more" if high is None else f"{_number(low)} to {_number(high)}"
    else:
        text = NUMBER
    return " ".join(filter(None, [text, unit])) + "".join(f", or {_number(value)}" for value in about.get("also", ()))


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return a default as a command line says it."""
    usual = field.metadata.get("usual", field.default)
    if usual is dataclasses.MISSING or usual == ():
        return "none"
    if usual is None or isinstance(usual, bool):
        return str(usual).lower()
    return _cell(_number(usual) if isinstance(usual, int | float) else str(usual))


def meaning_of(field: dataclasses.Field[Any]) -> str:
    """Return what an option says of itself, to those who write Python where it tells them something else."""
    note = f"; {field.metadata['note']}" if "note" in field.metadata else ""
    return _cell(field.metadata.get("python", field.metadata["help"]) + note)


def _number(value: float) -> str:
    if isinstance(value, int) and value > 2**53:
        return f"2**{value.bit_length()}" + " - 1" * (value + 1 == 1 << value.bit_length())
    return str(int(value)) if float(value).is_integer() else str(value)


# ---------------------------------------------------------------------------------------- models, errors, other engines


def named_models() -> str:
    """Return a line for each model that has a name."""
    models = tomllib.loads((ROOT / "src" / "forerun" / "data" / "models.toml").read_text(encoding="utf-8"))
    rows = [
        (f"`{name}`", model["about"], f"{model['parameters'] / 1e9:.2f} B", model["kind"], model["licence"])
        for name, model in models.items()
    ]
    return table(("name", "what it is", "weights", "kind", "licence"), rows)


def families() -> str:
    """Return a line for each value of `model_type` that has a file."""
    architectures = {name: f"`{architecture}`" for architecture, (name, _) in gguf_families().items()}
    modules = {name: importlib.import_module(f"forerun.models.families.{name}") for name in model_types()}
    rows = [(f"`{name}`", first_sentence(module), architectures.get(name, "")) for name, module in modules.items()]
    return table(("`model_type`", "in a sentence", "`general.architecture` of GGUF files"), rows)


def error_tree() -> str:
    """Return the tree of all errors as errors.py draws it, as a block of code."""
    return "\n".join(line for line in (errors.__doc__ or "").splitlines() if line.startswith("    "))


def routes() -> str:
    """Return a line for each API of the server, with its routes."""
    modules = [(importlib.import_module(f"forerun.serve.apis.{name}"), api.routes) for name, api in apis().items()]
    return table(
        ("routes", "what they are"),
        [(", ".join(map(_route, of)), first_sentence(module)) for module, of in modules],
    )


def _route(route: Generate | Count | Look) -> str:
    method, url = (route.method, route.url) if isinstance(route, Look) else ("POST", route.form.url)
    text = f"`{method} {re.sub(':[a-z]+}', '}', url)}`"
    return text + f" (also {', '.join(f'`{path}`' for path in route.also)})" if route.also else text


def harmless_fields() -> str:
    """Return a line for all fields of the same bodies that have no effect for the same reason."""
    urls: dict[tuple[str, str], list[str]] = {}
    for url, route in generating().items():
        for name, field in route.form.fields.items():
            if (field.inert or field.is_noted) and url not in route.also:
                urls.setdefault((f"`{name}`", field.described["description"]), []).append(f"`{url}`")
    rows: dict[tuple[str, str], list[str]] = {}
    for (name, why), bodies in urls.items():
        rows.setdefault((", ".join(bodies), why), []).append(name)
    return table(("fields", "in bodies of", "they are"), [(", ".join(of), *about) for about, of in rows.items()])


FIELDS = {"LLM": set(EngineConfig.__dataclass_fields__), "SamplingParams": set(SamplingParams.__dataclass_fields__)}
ON_A_COMMAND_LINE = ("vLLM", "SGLang", "llama.cpp")  # the others are used from Python


def commands(command: Any, path: str = "forerun") -> Iterator[tuple[str, Any]]:
    """Return each command of ours with its name."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{path} {name}")


def parameters(command: Any) -> dict[str, str]:
    """Map names to how a document writes them: a flag, or an argument in capitals."""
    return {p.name: p.opts[0] if p.param_type_name == "option" else p.name.upper() for p in command.params}


COMMANDS = dict(commands(typer.main.get_command(app)))
FLAGS = {path: parameters(command) for path, command in COMMANDS.items()}


def peers() -> list[str]:
    """Return the engines whose options are known, in order."""
    return list(dict.fromkeys(row.peer for row in registry.peer_options()))


def written(entry: str, row: PeerOption) -> str:
    """Return an entry of `ours` as a document writes it: flags of forerun generate, or keywords of Python."""
    name, _, value = entry.partition("=")
    if entry.startswith(("forerun ", "LLM.")):
        return f"`{entry}`"
    if row.peer not in ON_A_COMMAND_LINE:
        home = next(home for home, fields in FIELDS.items() if name in fields)
        shown = f'"{value}"' if value else "..."
        return f"`{home}({name}={shown})`"
    if name == "prompt":
        return "the argument `PROMPTS`"
    home = "forerun generate" if name in FLAGS["forerun generate"] else "forerun chat"
    text = f"`{f'{FLAGS[home][name]} {value}'.strip()}`"
    return text if home == "forerun generate" else f"{text} of `{home}`"


def peer_table(peer: str) -> str:
    """Return what the options of another engine are here."""
    rows = [
        (
            ", ".join(f"`{spelling}`" for spelling in row.theirs),
            ", ".join(written(entry, row) for entry in row.ours) or "not here",
            row.note,
        )
        for row in registry.peer_options()
        if row.peer == peer
    ]
    return table(("option there", "here", "remark"), rows)


# ------------------------------------------------------------------------------------------------------------ the pages


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


@functools.cache
def pictures() -> Any:
    """Return docs/site/pictures.py as a module."""
    spec = importlib.util.spec_from_file_location("pictures", Path(__file__).with_name("pictures.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parts() -> dict[str, Callable[[], str]]:
    """Return what each name stands for."""
    lossless = [verify.find(name).is_lossless for name in verify.rules()]
    pair = pictures().pair_tables(pictures().read_pair())
    return {
        "table of drafters": lambda: table_of("drafters"),
        "table of verification rules": lambda: table_of("verify"),
        "table of pacing policies": lambda: table_of("pacing"),
        "table of searches": lambda: sentences({SEARCH: beams}),
        "list of drafters": lambda: sentences(methods("drafters"), "methods/"),
        "number of drafters": lambda: str(len(set(methods("drafters")) - {"none", "forced"})),
        "number of verification rules": lambda: str(len(lossless)),
        "number of exact rules": lambda: str(sum(lossless)),
        "number of lossy rules": lambda: str(len(lossless) - sum(lossless)),
        "number of pacing policies": lambda: str(len(methods("pacing"))),
        "number of families": lambda: str(len(model_types())),
        "table of families": families,
        "routes of the APIs": routes,
        "fields of every body": lambda: textwrap.fill(", ".join(f"`{name}`" for name in sorted(SHARED)), 160),
        "fields without effect": harmless_fields,
        "models that have a name": named_models,
        "options of the engine": lambda: options_table(EngineConfig),
        "options under load": lambda: options_table(EngineConfig, UNDER_LOAD),
        "parameters of a request": lambda: options_table(SamplingParams),
        "options of the server": lambda: options_table(ServerOptions, as_flags=True),
        "limits of the server": lambda: options_table(Limits, as_flags=True),
        "tree of errors": error_tree,
        "the pair": lambda: pair["README.md"],
        "all numbers of the pair": lambda: pair["numbers.md"],
        f"options of {SEARCH}": lambda: options_table(SamplingParams, SEARCH_OPTIONS),
        **{
            f"options of {name}": functools.partial(options_table, module.Options)
            for room in ROOMS
            for name, module in methods(room).items()
        },
        **{f"what {peer} has": functools.partial(peer_table, peer) for peer in peers()},
    }


def with_parts(page: str, known: dict[str, Callable[[], str]], where: str) -> str:
    """Return a page with its parts as the code says them."""

    def part(found: re.Match[str]) -> str:
        name, old = found.groups()
        if name not in known:
            raise ValueError(f"{where}: nothing is known as {name!r}; it must be one of {', '.join(known)}")
        text = known[name]()
        return f"<!-- begin: {name} -->" + (f"\n\n{text}\n\n" if old.startswith("\n") else text) + "<!-- end -->"

    return PART.sub(part, page)


def texts() -> dict[Path, str]:
    """Return every file that is written at all, or a part of it, as it ought to be."""
    known, draws = parts(), pictures()
    results, made = draws.read_pair(), {}
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]:
        page = file.read_text(encoding="utf-8")
        options = f"options of {file.stem}"
        if file.parent == DOCS / "methods" and options in known and f"<!-- begin: {options} -->" not in page:
            page = f"{page.rstrip()}\n\n<!-- begin: {options} -->\n\n<!-- end -->\n"
        if PART.search(page) or draws.NUMBER.search(page):
            made[file] = draws.with_numbers(with_parts(page, known, file.relative_to(ROOT).as_posix()), results)
    made[DOCS / "development" / "architecture.svg"] = draws.architecture()
    made[DOCS / "pictures" / "pair.svg"] = draws.pair_picture(results)
    return made


def main() -> None:
    """Write what differs, and say what that was."""
    for file, text in texts().items():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
