"""Checkpoints of other formats: each refused before its weights are read, in one sentence with a way out."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forerun.errors import NotFound, UnsupportedModel
from forerun.models.families import model_types
from forerun.models.loading import load_checkpoint
from forerun.models.opened import read_config
from models.hubserver import Client, HubServer, contents
from refusals import refusal
from tiny import write_tiny

Raw = dict[str, Any]
TYPES, KNOWN = " or ".join(model_types()), str(list(model_types()))
WANTED = (
    "a model of `forerun models`, a folder that holds config.json, model.safetensors and tokenizer.json, a GGUF file, "
    "or a model of the hub as org/name"
)
READABLE = (
    "name the unquantised original, or one quantised as GPTQ, AWQ, FP8, MXFP4 or compressed-tensors of 4 or 8 bits"
)
QUANTISED = (
    "which means quantised weights, and no quantization_config in config.json says how they are to be read: "
    f"{READABLE} by a tool that writes that key"
)
GGUF = "{where} has weights in model-Q4.gguf{more} only: name one such file, as {where}{colon}model-Q4.gguf"
CONVERT = (
    "convert it with transformers, AutoModelForCausalLM.from_pretrained('{where}').save_pretrained(FOLDER), and the "
    "same with AutoTokenizer"
)
PICKLE = (
    f"a pickle, which may run any code while it is read, so forerun reads safetensors only: if you trust it, {CONVERT}"
)
ADAPTER = (
    "{where} is an adapter to 'org/base' and not a whole model: merge it with peft, AutoPeftModelForCausalLM."
    "from_pretrained('{where}').merge_and_unload().save_pretrained(FOLDER), and copy the tokenizer's files of org/base "
    "into FOLDER"
)
SLOW = (
    "and forerun reads tokenizer.json: convert it with transformers, AutoTokenizer.from_pretrained('{where}')."
    "save_pretrained(FOLDER), where FOLDER holds the rest of the checkpoint"
)

# What a folder has instead of files of a good checkpoint (None = it lacks that file) -> the whole sentence.
Change = dict[str, bytes | None]
NO_WEIGHTS: Change = {"model.safetensors": None}
BASE = json.dumps({"base_model_name_or_path": "org/base"}).encode()
FOLDERS: list[tuple[Change, str]] = [
    (NO_WEIGHTS | {"model-Q4.gguf": b"", "config.json": None}, GGUF.replace("{more}", "")),
    (NO_WEIGHTS | {"model-Q4.gguf": b"", "model-Q8.gguf": b"", "pytorch_model.bin": b""},
     GGUF.replace("{more}", ", model-Q8.gguf")),
    (NO_WEIGHTS | {"pytorch_model.bin": b""}, "{where} has weights in pytorch_model.bin only, " + PICKLE),
    (NO_WEIGHTS | {f"consolidated.0{i}.pth": b"" for i in range(5)} | {"config.json": None},
     "{where} has weights in consolidated.00.pth, consolidated.01.pth, consolidated.02.pth and 2 more only, " + PICKLE),
    (NO_WEIGHTS | {"adapter_config.json": BASE, "adapter_model.safetensors": b"", "config.json": None}, ADAPTER),
    (NO_WEIGHTS | {"adapter_config.json": BASE, "adapter_model.bin": b""}, ADAPTER),
    (NO_WEIGHTS | {"adapter_config.json": b"{}"},
     ADAPTER.replace("'org/base'", "a model that it does not name").replace("org/base", "that model")),
    (NO_WEIGHTS | {"consolidated.safetensors": b""},
     "{where} has weights in consolidated.safetensors only, and forerun reads model.safetensors, or the shards that "
     "model.safetensors.index.json names: name a checkpoint that has them, as save_pretrained of transformers writes "
     "it"),
    (NO_WEIGHTS,
     "there is neither model.safetensors nor model.safetensors.index.json in {where}: fetch the whole checkpoint"),
    (NO_WEIGHTS | {"model_index.json": b"{}", "config.json": None},
     f"there is no config.json in {{where}}: name {WANTED}"),
    ({"tokenizer.json": None, "tokenizer.model": b""}, "{where} has its tokenizer in tokenizer.model only, " + SLOW),
    ({"tokenizer.json": None, "vocab.json": b"", "merges.txt": b""},
     "{where} has its tokenizer in vocab.json, merges.txt only, " + SLOW),
    ({"quantize_config.json": b'{"bits": 4, "quant_method": "gptq"}'},
     f"{{where}} holds quantize_config.json (quant_method='gptq'), {QUANTISED}"),
    ({"hf_quant_config.json": b'{"quantization": {}}'}, f"{{where}} holds hf_quant_config.json, {QUANTISED}"),
]  # fmt: skip


# A folder without any tokenizer is a model of ids; a repository without one was left unfinished.
LISTED = [
    *FOLDERS,
    (
        {"tokenizer.json": None},
        "there is no tokenizer.json in {where}: copy it from the model that this one was made of",
    ),
]


def apply(change: Change, files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in (files | change).items() if data is not None}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(write_tiny(tmp_path_factory.mktemp("refused") / "tiny"))


@pytest.fixture
def write(tmp_path: Path, files: dict[str, bytes]) -> Callable[[Change], Path]:
    def write(change: Change) -> Path:
        for name, data in apply(change, files).items():
            (tmp_path / name).write_bytes(data)
        return tmp_path

    return write


@pytest.mark.parametrize(("change", "sentence"), FOLDERS)
def test_folders(write: Callable[[Change], Path], change: Change, sentence: str) -> None:
    folder = write(change)
    said = refusal((UnsupportedModel, NotFound), load_checkpoint, folder, with_tokenizer=True)
    assert said == sentence.format(where=folder, colon="/")


def test_repositories_are_refused_before_their_weights_are_fetched(
    hub: HubServer, client: Client, files: dict[str, bytes]
) -> None:
    """The same sentences with the hub id; and whatever config.json says."""
    configs = [(json.loads(files["config.json"]) | keys, sentence) for _, keys, sentence in CONFIGS]
    changes = LISTED + [({"config.json": json.dumps(raw).encode()}, sentence) for raw, sentence in configs]
    for i, (change, _) in enumerate(changes):
        hub.publish(f"org/case{i}", apply(change, files))
    found = client.find(*({"name": f"org/case{i}", "load": True} for i in range(len(changes))))
    for i, (_, sentence) in enumerate(changes):
        assert found[i].message == (sentence.format(where=f"org/case{i}", colon=":") if i < len(LISTED) else sentence)
    small = {"adapter_config.json", "quantize_config.json", "hf_quant_config.json", "config.json", "tokenizer.json"}
    assert set(hub.fetched()) <= small | {"generation_config.json"}
    # Beside the files of two quantisers.
    assert sum(name == "config.json" for name in hub.fetched()) == len(CONFIGS) + 2


CONFIGS: list[tuple[str, Raw, str]] = [
    *(
        (
            method,
            {"quantization_config": {"quant_method": method, "bits": 4}},
            f"config.json sets quant_method='{method}' in quantization_config, which is not read: {READABLE}",
        )
        for method in ("bitsandbytes", "quark", "hqq")
    ),
    ("nameless", {"compression_config": {"format": "pack"}},
     f"config.json sets compression_config={{'format': 'pack'}}, which is not read: {READABLE}"),
    ("code of a known type", {"auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}},
     "config.json has auto_map={'AutoModelForCausalLM': 'm.M'} for model_type='llama', and forerun never runs a "
     f"checkpoint's code: use a checkpoint of model_type {TYPES} without it, or take auto_map out of config.json if "
     "that code computes what the plain architecture does"),
    ("code of an unknown type", {"model_type": "own", "auto_map": {"AutoConfig": "c.C"}},
     "config.json has auto_map={'AutoConfig': 'c.C'} for model_type='own', and forerun never runs a checkpoint's "
     f"code: use a checkpoint of model_type {TYPES} without it"),
    ("no type", {"model_type": None},
     f"config.json has no model_type: fetch it again, or add the one that it is, of {KNOWN}"),
    *((kind, {"model_type": kind}, f"model_type='{kind}' is not supported: it must be one of {KNOWN}")
      for kind in ("t5gemma2", "llava", "falcon", "bert", "mamba2")),
    *((kind, {"rope_scaling": {"rope_type": kind, "factor": 4.0}},
       f"config.json sets rope_type='{kind}', which forerun does not compute: it must be one of ['default', "
       "'linear', 'llama3', 'yarn', 'longrope'], or, where it was only added for texts longer than those in "
       "training, be taken out")
      for kind in ("dynamic", "mrope", "su")),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "sentence"), [case[1:] for case in CONFIGS], ids=[case[0] for case in CONFIGS])
def test_configs(llama_raw: Raw, keys: Raw, sentence: str) -> None:
    assert refusal(UnsupportedModel, read_config, llama_raw | keys) == sentence


def test_code_that_is_known_to_be_what_is_computed_does_not_matter(llama_raw: Raw) -> None:
    """Phi-3's and Phi-4-mini's files bring along what transformers has."""
    phi = llama_raw | {"model_type": "phi3"}
    own = "modeling_phi3.Phi3ForCausalLM"
    assert read_config(phi | {"auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": own}}) == read_config(phi)
    for model_type, name in (("phi3", "modeling_phi4.Phi4ForCausalLM"), ("llama", own)):
        with pytest.raises(UnsupportedModel, match="never runs a checkpoint's code"):
            read_config(llama_raw | {"model_type": model_type, "auto_map": {"AutoModelForCausalLM": name}})


def test_code_for_anything_but_the_model_does_not_matter(llama_raw: Raw) -> None:
    for auto_map in ({"AutoTokenizer": ["t.T", None]}, {"AutoConfig": "c.C"}, {}, None):
        assert read_config(llama_raw | {"auto_map": auto_map}) == read_config(llama_raw)


SINGLE_FILES = {
    "model-Q4.gguf": "{file} is empty: fetch it again",
    "model.pt": "{file} is " + PICKLE,
    "model.safetensors": "{file} is one file of a checkpoint: name its folder, {where}, which must hold "
    "config.json and tokenizer.json too",
    "config.json": f"{{file}} is a file that holds no model: name {WANTED}",
}


@pytest.mark.parametrize("name", SINGLE_FILES)
def test_single_files(write: Callable[[Change], Path], name: str) -> None:
    folder = write({"model-Q4.gguf": b"", "model.pt": b""})
    said = refusal((UnsupportedModel, NotFound), load_checkpoint, folder / name)
    assert said == SINGLE_FILES[name].format(file=folder / name, where=folder)


@pytest.mark.parametrize(
    ("dtype", "named"), [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3")]
)
def test_tensors_of_eight_bits(write: Callable[[Change], Path], dtype: torch.dtype, named: str) -> None:
    """Whether they stand for a weight or beside the weights."""
    folder = write({})
    name = "model.layers.0.mlp.up_proj.qweight"
    save_file({name: torch.ones(4, 4).to(dtype)}, folder / "model.safetensors")
    said = refusal(UnsupportedModel, load_checkpoint, folder)
    assert said == f"{name} in {folder / 'model.safetensors'} has type {named}, {QUANTISED}"


# ------------------------------------------------------------------------------------------- files that cannot be read

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b'\n<!DOCTYPE html>\n<html lang="en"><head><title>model.safetensors</title></head></html>\n'
INSTEAD: list[tuple[bytes, str]] = [
    (LFS, "is a pointer of git-lfs and not the file: run git lfs pull in its folder, or fetch it with hf download"),
    (PAGE, "is a web page and not the file, as a link to the page about a file gives it: fetch it with hf download, or "
     "from the page's download link"),
    (b"", "is empty: fetch it again"),
]  # fmt: skip
FILES = ("model.safetensors", "config.json", "tokenizer.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("data", "words"), INSTEAD, ids=["pointer", "page", "empty"])
def test_what_came_in_the_place_of_a_file(write: Callable[[Change], Path], name: str, data: bytes, words: str) -> None:
    folder = write({name: data})
    assert refusal(UnsupportedModel, load_checkpoint, folder, with_tokenizer=True) == f"{folder / name} {words}"


@pytest.mark.parametrize("name", FILES)
def test_links_that_lead_nowhere(write: Callable[[Change], Path], name: str) -> None:
    folder = write({name: None})
    for place, words in (
        (name, "that leads back to itself: remove it and fetch the file again"),
        ("../blobs/1", "to ../blobs/1, which is not there: fetch it again, or copy what it leads to"),
    ):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(place)
        assert refusal(NotFound, load_checkpoint, folder, with_tokenizer=True) == f"{folder / name} is a link {words}"


def test_a_folder_that_leads_back_to_itself(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("model")
    with pytest.raises(NotFound, match=r"model is a link that leads back to itself: remove it"):
        load_checkpoint(tmp_path / "model")


@pytest.fixture
def as_another_user(write: Callable[[Change], Path]) -> Iterator[Path]:
    """A good folder, read once, so that all code is there; then root becomes a user who may read what all may read.

    Folders of pytest are its user's own, so the checkpoint is in one that all may enter.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(write({}), Path(place, "model"))
        load_checkpoint(folder, with_tokenizer=True)
        for path in (Path(place), folder):
            path.chmod(0o755)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(user)


@pytest.mark.parametrize("name", [*FILES, "."])
def test_what_may_not_be_read(as_another_user: Path, name: str) -> None:
    path, user = as_another_user / name, os.geteuid()
    if user == 65534:
        os.seteuid(0)
    path.chmod(0)
    os.seteuid(user)
    said = refusal(NotFound, load_checkpoint, as_another_user, with_tokenizer=True)
    os.seteuid(os.getuid())
    path.chmod(0o755)
    assert said == (
        f"{path} may not be read by this user (Permission denied): give yourself the right with chmod, or ask its owner"
    )
