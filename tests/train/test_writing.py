"""`forerun train sample`: what the target writes, and the file that it is written to."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import date
from importlib.metadata import metadata
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from forerun import LLM, SamplingParams
from forerun.errors import BadOption, NotFound, UnsupportedModel
from forerun.text import sandbox
from forerun.train import corpus
from forerun.train.config import SampleConfig
from forerun.train.questions import read_questions
from forerun.train.samples import SampleWriter, read_samples, stream
from forerun.train.sampling import shares_of, texts_for
from forerun.train.writing import TEMPERATURES, Frame, Lengths, Shares, Writer, first_ids, looped
from refusals import refusal
from train.conftest import run_command
from train.written import CONTINUATIONS, TEMPLATE, TEXTS, chatting, write, writer_of

NUM_TOKENS = 900
ALL_KINDS = Shares(0.5, 0.25, 0.25)


@pytest.fixture(scope="module")
def writer(target: Path) -> Writer:
    """On operators whose rows do not depend on the batch."""
    return writer_of(target, shares=ALL_KINDS, ops="reference_row_by_row")


@pytest.fixture(scope="module")
def whole(writer: Writer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "whole"
    write(writer, path, NUM_TOKENS)
    return path


@pytest.mark.parametrize("share", [0.0, 0.3, 0.97])
def test_a_killed_run_goes_on_to_the_same_bytes(writer: Writer, whole: Path, tmp_path: Path, share: float) -> None:
    """A kill leaves any number of the bytes behind the header, the last record cut short; the batch may be another."""
    data, path = whole.read_bytes(), tmp_path / "cut"
    header = data.index(b"}\n") + 2
    path.write_bytes(data[: header + int(share * (len(data) - header))])
    assert write(writer, path, NUM_TOKENS, batch_size=3) == data


def test_a_day_later_it_goes_on_as_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some templates print the date."""

    def written(path: Path, num_tokens: int) -> bytes:
        how = "--question-tokens 12 --answer-tokens 24 --passage-tokens 16 --ops reference_row_by_row --quiet"
        run_command(f"sample --target {target} --out {path} --num-tokens {num_tokens} --chat 1 {how}")
        return path.read_bytes()

    target = chatting(tmp_path / "model", "{{ strftime_now('%d') }}" + TEMPLATE)
    config = target / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('_embeddings": 256', '_embeddings": 512'))
    today, other = date(2026, 11, 26), date(2026, 11, 27)
    monkeypatch.setattr(sandbox, "datetime", SimpleNamespace(now=lambda: today))
    whole = written(tmp_path / "whole", 400)
    assert len(written(tmp_path / "parts", 150)) < len(whole)
    monkeypatch.setattr(sandbox, "datetime", SimpleNamespace(now=lambda: other))
    assert written(tmp_path / "parts", 400) == whole
    assert written(tmp_path / "another", 400) != whole


def test_a_file_without_a_frame_goes_on(target: Path, tmp_path: Path) -> None:
    """One of before, when files had none; and one of continuations, where it is other shares that are refused."""
    writer = writer_of(target, shares=ALL_KINDS, ops="reference")
    options = writer.options()
    how = {"seed": 0, "lengths": writer.lengths}
    older = {name: value for name, value in options.items() if name != "frame"}
    again = Writer(writer.llm, TEXTS, shares=ALL_KINDS, begun=older, **how)
    assert again.options() == older
    assert again.frame == writer.frame
    begun = Writer(writer.llm, TEXTS, shares=CONTINUATIONS, **how).options()
    SampleWriter(tmp_path / "texts", begun).close()
    with pytest.raises(BadOption, match="was begun with chat='0'"):
        SampleWriter(tmp_path / "texts", Writer(writer.llm, TEXTS, shares=ALL_KINDS, begun=begun, **how).options())


def test_every_kind_is_what_the_target_says(writer: Writer, whole: Path, target: Path) -> None:
    found = read_samples(whole)
    assert {sample.kind for sample in found.samples} == {"chat", "task", "text"}
    assert {sample.temperature for sample in found.samples} == set(TEMPERATURES)
    assert [s.number for s in found.samples] == sorted(s.number for s in found.samples)
    llm = LLM(str(target), draft="none", max_seq_len=256, calibrate=False, ops="reference_row_by_row")
    greedy = [s for s in found.samples if s.temperature == 0 and 0 < s.answer_at < len(s.ids)]
    assert {sample.kind for sample in greedy} >= {"chat", "text"}
    for sample in greedy[:6]:
        ids, params = sample.ids.tolist(), SamplingParams(max_tokens=24, temperature=0)
        out = llm.generate([ids[: sample.answer_at]], params)[0].token_ids
        assert out[: len(ids) - sample.answer_at] == ids[sample.answer_at :]
    chat = next(s for s in greedy if s.kind == "chat")
    text = llm.tokenizer.decode(chat.ids.tolist())
    assert text.startswith("<user>")
    assert text[: len(llm.tokenizer.decode(chat.ids[: chat.answer_at].tolist()))].endswith("<|end|><A>")


def test_held_out_samples_are_apart_and_beginnings_differ(whole: Path) -> None:
    found = read_samples(whole)
    held_out, seen = found.split(True), found.split(False)
    assert len(held_out) + len(seen) == len(found.samples)
    assert {s.number % 16 for s in held_out} == {0}
    keys = [s.key for s in found.samples]
    assert len(set(keys)) == len(keys)
    tokens = stream(seen, end=0)
    assert tokens[-1] == 0
    assert sum(len(s.ids) for s in seen) < len(tokens) <= sum(len(s.ids) + 1 for s in seen)


def test_a_beginning_that_was_there_is_left_out(writer: Writer, whole: Path, tmp_path: Path) -> None:
    first, second = read_samples(whole).samples[:2]
    file = SampleWriter(tmp_path / "twice", writer.options())
    assert [file.append(s) for s in (first, first, second)] == [True, False, True]
    file.close()
    assert len(read_samples(tmp_path / "twice").samples) == 2


def test_texts_that_are_used_up_are_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="too few different passages"):
        write(writer_of(target, ["one line"], ops="reference"), tmp_path / "samples", 10**6)


def test_a_file_goes_on_with_passages_of_other_texts(
    writer: Writer, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the default ones become others when a package is installed between two pieces of a long run."""
    kept = whole.read_bytes()
    file = SampleWriter(whole, {**writer.options(), "texts": "others"})
    file.close()
    assert "goes on with passages of these" in caplog.text
    assert whole.read_bytes() == kept
    assert file.num_samples == len(read_samples(whole).samples)


def test_other_options_and_broken_files_are_refused(writer: Writer, whole: Path, tmp_path: Path) -> None:
    assert "was begun with seed='0'" in refusal(BadOption, SampleWriter, whole, {**writer.options(), "seed": 1})
    assert "weights" in refusal(BadOption, SampleWriter, whole, {**writer.options(), "weights": "another target's"})
    assert "train sample" in refusal(NotFound, read_samples, tmp_path / "none")
    path, data = tmp_path / "broken", whole.read_bytes()
    for broken, said in ((b"PK\3\4" + data, "not a file of"), (data[:60], "not a file of")):
        path.write_bytes(broken)
        assert said in refusal(UnsupportedModel, read_samples, path)
    header = data.index(b"}\n") + 2
    path.write_bytes(data[: header + 20] + bytes([data[header + 20] ^ 1]) + data[header + 21 :])
    assert "is damaged behind" in refusal(UnsupportedModel, read_samples, path)


def test_a_file_has_one_writer(writer: Writer, whole: Path, tmp_path: Path) -> None:
    """What two of them append would be the samples of neither."""
    code = (
        "import sys; from pathlib import Path; from forerun.train.samples import SampleWriter, begun_with\n"
        "path = Path(sys.argv[1]); file = SampleWriter(path, begun_with(path)); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(whole)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "1\n"
        assert "another process writes to" in refusal(BadOption, SampleWriter, whole, writer.options())
        other.communicate("\n")
    SampleWriter(whole, writer.options()).close()


def test_repetition_is_found_at_its_third_time() -> None:
    assert looped(list(range(100)), 0) is None
    assert looped([7, *[1, 2, 3] * 20], 0) == 1 + 32  # short ones: 32 tokens of them
    assert looped([5] * 9 + list(range(40)), 9) is None
    long = list(range(30))
    assert looped([*range(100, 120), *long, *long, *long, 1], 0) == 20 + 3 * 30
    assert looped([*long, *long, 99, *long], 0) is None


def test_texts_that_are_not_read_decide_nothing(target: Path) -> None:
    """So that conversations can go on after packages, and with them the default texts, have changed."""
    one, other = (writer_of(target, [text], shares=Shares(1, 0, 0), ops="reference") for text in ("some", "other"))
    assert one.options() == other.options()


def test_a_text_begins_as_one_that_a_user_gives(target: Path, tmp_path: Path) -> None:
    """With the id that begins a sequence, where a tokenizer puts one before a text."""
    copy = tmp_path / "begins"
    shutil.copytree(target, copy)
    backend = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    first = backend.id_to_token(7)
    backend.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 7)])
    backend.save(str(copy / "tokenizer.json"))
    for shares, begins in ((Shares(0, 0, 1), True), (Shares(0, 1, 0), False), (Shares(1, 0, 0), False)):
        plain, own = (writer_of(path, shares=shares, ops="reference") for path in (target, copy))
        for number in range(4):
            wanted = plain.plan(number).prompt
            assert own.plan(number).prompt == ((7, *wanted) if begins else wanted)
    both = [writer_of(path, ops="reference").llm.tokenizer for path in (target, copy)]
    assert [first_ids(tokenizer) for tokenizer in both] == [(), (7,)]
    assert [tokenizer.encode("a river")[0] == 7 for tokenizer in both] == [False, True]


def test_texts_come_with_packages_where_a_kind_needs_them(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "stdlib_folder", lambda: sources)
    config = SampleConfig(out=tmp_path / "samples")
    assert texts_for(config, Shares(1, 0, 0)) == []
    for needing in (Shares(0, 0, 1), Shares(0.5, 0.5, 0)):
        texts = texts_for(config, needing)
        assert any("def alpha_0(value):" in text for text in texts), "modules"
        assert metadata("pytest").get_payload() in texts, "descriptions"  # type: ignore[attr-defined]
        assert topics["if"] in texts, "Python's help"
    (tmp_path / "named.txt").write_text("some rivers", encoding="utf-8")
    assert texts_for(replace(config, texts=(tmp_path / "named.txt",)), ALL_KINDS) == ["some rivers"]


def test_shares_must_be_shares() -> None:
    assert "1 together" in refusal(BadOption, Shares, 0.5, 0.5, 0.5)
    assert Shares(0.8, 0.2, 1 - 0.8 - 0.2).kind(0.999999) == "task"


def test_a_template_that_opens_no_turn_has_no_conversations(target: Path) -> None:
    """As that of the shipped model: the target would be given nothing to go on from."""
    assert Frame.opens_a_turn(writer_of(target).llm)
    bare = writer_of("shipped").llm
    assert not Frame.opens_a_turn(bare)
    config = SampleConfig(out=Path())
    assert shares_of(config, bare) == Shares(0, 0, 1)
    assert vars(shares_of(config, writer_of(target).llm)) == pytest.approx({"chat": 0.7, "task": 0.15, "text": 0.15})
    assert shares_of(replace(config, chat=0.5), bare) == Shares(0.5, 0.25, 0.25)
    assert shares_of(replace(config, chat=0.5, task=0.5), bare) == Shares(0.5, 0.5, 0)
    assert "--chat 0" in refusal(BadOption, writer_of, "shipped", shares=ALL_KINDS)


# ---------------------------------------------------------------------------------------------------------- questions

ENTRIES = [
    {"id": "a", "conversations": [{"from": "human", "value": " How far? "}, {"from": "gpt", "value": "Far."}]},
    {"conversations": [{"from": "gpt", "value": "I began."}]},
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]},
    {"turns": ["When?", "And then?"], "category": "time"},
    {"prompt": "Who?"}, "What?", {"instruction": "Where?", "output": "There."}, "Why?", {"messages": []}, 3,
    {"conversations": [{"from": "human", "value": "word " * 300}]},
]  # fmt: skip


def test_questions_are_read_from_files_of_every_form(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ENTRIES[:6]))
    (tmp_path / "b.jsonl").write_text("\n\n".join(json.dumps(entry) for entry in ENTRIES[5:]))
    questions = read_questions([tmp_path / "a.json", tmp_path / "b.jsonl"])
    assert questions[:-1] == ["How far?", "Why?", "When?", "Who?", "What?", "Where?"]
    assert questions[-1].startswith("word word")
    (tmp_path / "cut.json").write_text(json.dumps(ENTRIES[:4], indent=1)[:-20])
    assert read_questions([tmp_path / "cut.json"]) == ["How far?", "Why?"]
    for text, error in (("[1, 2]", UnsupportedModel), ("{", UnsupportedModel), ("[]", UnsupportedModel)):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(error, match=r"is not JSON|there is no question in"):
            read_questions([tmp_path / "c.json"])
    assert "cannot be read (No such file" in refusal(NotFound, read_questions, [tmp_path / "d.json"])


def test_a_conversation_begins_with_a_question_that_was_given(target: Path, tmp_path: Path) -> None:
    """Each once, those alone that are short enough; a killed run goes on to the same bytes, and not with others."""
    asked = [f"{i} rivers?" for i in range(40)]
    llm = writer_of(target, ops="reference_row_by_row").llm
    how: dict[str, Any] = {"seed": 0, "shares": Shares(0.6, 0.2, 0.2), "lengths": Lengths((4, 8), 12, 24)}
    whole = write(Writer(llm, TEXTS, [*asked, "too long " * 40], **how), tmp_path / "whole", NUM_TOKENS)
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    assert write(Writer(llm, TEXTS, [*asked, "too long " * 40], **how), tmp_path / "cut", NUM_TOKENS) == whole
    chats = [sample for sample in read_samples(tmp_path / "whole").samples if sample.kind == "chat"]
    texts = [llm.tokenizer.decode(sample.ids[: sample.num_given].tolist()) for sample in chats]
    said = [text.removeprefix("<user>").removesuffix("<|end|><A>") for text in texts]
    assert len(said) > 5
    assert len(set(said)) == len(said)
    assert set(said) <= set(asked)
    assert said != asked[: len(said)]
    assert all(sample.answer_at == sample.num_given < len(sample.ids) for sample in chats)
    with pytest.raises(BadOption, match="was begun with questions="):
        SampleWriter(tmp_path / "whole", Writer(llm, TEXTS, asked[1:], **how).options())
    with pytest.raises(BadOption, match="questions begin conversations, and --chat 0 writes none"):
        Writer(llm, TEXTS, asked, **{**how, "shares": Shares(0, 1, 0)})
    assert "no question has at most 12 tokens" in refusal(BadOption, Writer, llm, TEXTS, ["too long " * 40], **how)
    with pytest.raises(BadOption, match="there are too few questions"):
        write(Writer(llm, TEXTS, asked[:3], **{**how, "shares": Shares(1, 0, 0)}), tmp_path / "few", NUM_TOKENS)
