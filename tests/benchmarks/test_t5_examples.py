"""The translation task knows German, by answers written by hand. Splits do not overlap, and a seed repeats itself."""

import random
import sys
from itertools import permutations
from pathlib import Path

import pytest

from benchmarks.t5 import examples, scoring
from benchmarks.t5.examples import summary, translation
from benchmarks.t5.examples.choices import Drawn, every
from benchmarks.t5.examples.german import CASES, Noun, genitive, ordinal, spelled
from benchmarks.t5.examples.meaning import Clause, Draw, Phrase, Word, contracted, noun_of, phrase, same, verb_of, words
from forerun.errors import BadOption, NotFound, UnsupportedModel
from refusals import refusal


def word(table: str, english: str) -> Word:
    return next(word for word in words(table) if word.forms[0] == english)


class Singular(Draw):
    """Draws what comes first, and singular nouns."""

    def chance(self, share: float) -> bool:
        return False

    def of(self, options):  # type: ignore[no-untyped-def]
        return options[0]


class Plural(Singular):
    def chance(self, share: float) -> bool:
        return True


def made(noun: str, *adjectives: str, kind: str = "the", plural: bool = False, table: str = "THINGS") -> Phrase:
    draw = (Plural if plural else Singular)(random.Random(0))
    of = "OF_PERSONS" if table == "PERSONS" else "OF_THINGS"
    return phrase(draw, word(table, noun), [word(of, adjective) for adjective in adjectives], kind)


def first(options):  # type: ignore[no-untyped-def]
    """Picks what comes first."""
    return options[0]


NOUN_PHRASES = {
    "the old table": made("table", "old"),
    "a new lamp": made("lamp", "new", kind="a"),
    "an expensive book": made("book", "expensive", kind="a"),
    "this dark picture": made("picture", "dark", kind="this"),
    "my tired children": made("child", "tired", kind="my", plural=True, table="PERSONS"),
    "the red cars": made("car", "red", kind="the", plural=True),
    "Anna's clever student": made("student", "clever", kind="whose", table="PERSONS"),
    "two small keys": made("key", "small", kind="count"),
}
STUDENTS = ("kluger Student", "klugen Studenten", "klugem Studenten", "klugen Studenten")
IN_EVERY_CASE = {
    "the old table": "der alte Tisch, den alten Tisch, dem alten Tisch, des alten Tisches",
    "a new lamp": "eine neue Lampe, eine neue Lampe, einer neuen Lampe, einer neuen Lampe",
    "an expensive book": "ein teures Buch, ein teures Buch, einem teuren Buch, eines teuren Buches",
    "this dark picture": "dieses dunkle Bild, dieses dunkle Bild, diesem dunklen Bild, dieses dunklen Bildes",
    "my tired children": "meine müden Kinder, meine müden Kinder, meinen müden Kindern, meiner müden Kinder",
    "the red cars": "die roten Autos, die roten Autos, den roten Autos, der roten Autos",
    "Anna's clever student": ", ".join(f"Annas {clever}" for clever in STUDENTS),
    "two small keys": "zwei kleine Schlüssel, zwei kleine Schlüssel, zwei kleinen Schlüsseln, zwei kleiner Schlüssel",
}


@pytest.mark.parametrize("english", NOUN_PHRASES)
def test_noun_phrases_agree(english: str) -> None:
    own = NOUN_PHRASES[english]
    assert own.english == english
    assert ", ".join(own.german(first, case) for case in CASES) == IN_EVERY_CASE[english]


def test_synonyms_of_another_gender_take_their_own_endings() -> None:
    own = made("car", "red", kind="a")
    assert set(every(lambda pick: own.german(pick, "acc"))) == {"ein rotes Auto", "einen roten Wagen"}


@pytest.mark.parametrize(
    ("noun", "wanted"),
    [("Haus", "Hauses"), ("Auto", "Autos"), ("Schuh", "Schuhs"), ("Kind", "Kindes"), ("Chef", "Chefs")],
)
def test_genitives(noun: str, wanted: str) -> None:
    assert genitive(noun) == wanted


def test_numbers_and_contractions() -> None:
    assert spelled(342) == "dreihundertzweiundvierzig"
    assert (ordinal(3), ordinal(7, "en"), ordinal(20, "en")) == ("dritte", "siebten", "zwanzigsten")
    assert contracted("in dem alten Haus") == "im alten Haus"
    assert contracted("in einem Haus") == "in einem Haus"
    assert noun_of("m Nachbar Nachbarn w") == Noun("m", "Nachbar", "Nachbarn", is_weak=True)


def clause_of(tense: str, *, negative: bool = False, kind: str = "the", verb: str = "pick up") -> Clause:
    name = Phrase("Peter", "er", lambda pick, case: "Peter")
    bag, yesterday = made("bag", "heavy", kind=kind), same("yesterday", "gestern")
    return Clause(name, word("WITH_THING", verb), tense, accusative=bag, time=yesterday, negative=negative)


# What is between the verb and its end, in every order.
NO_BAG = ("Peter {} gestern keine schwere Tasche", "Gestern {} Peter keine schwere Tasche")
A_BAG = tuple(order.replace("keine", "eine") for order in NO_BAG)
THE_BAG = (*(order.replace("keine", "die") for order in NO_BAG), "Peter {} die schwere Tasche gestern")


@pytest.mark.parametrize(
    ("own", "english", "orders", "verb", "end"),
    [
        (clause_of("past"), "Peter picked up the heavy bag", THE_BAG, "hat", "abgeholt"),
        (clause_of("present", negative=True), "Peter does not pick up the heavy bag", THE_BAG, "holt", "nicht ab"),
        (clause_of("will", negative=True, kind="a"), "Peter will not pick up a heavy bag", NO_BAG, "wird", "abholen"),
        (clause_of("must", kind="a", verb="hide"), "Peter must hide a heavy bag", A_BAG, "muss", "verstecken"),
    ],
)
def test_verbs_move(own: Clause, english: str, orders: tuple[str, ...], verb: str, end: str) -> None:
    assert own.english() == f"{english} yesterday"
    said = {text[:1].upper() + text[1:] for text in every(own.german)}
    assert said == {f"{order.format(verb)} {end}" for order in orders}


def test_questions_and_subordinate_clauses() -> None:
    own = clause_of("past")
    assert own.english_question() == "did Peter pick up the heavy bag yesterday"
    assert own.german_question(first) == "hat Peter gestern die schwere Tasche abgeholt"
    assert own.german_subordinate(first) == "Peter gestern die schwere Tasche abgeholt hat"
    assert clause_of("present").german_subordinate(first) == "Peter gestern die schwere Tasche abholt"
    assert clause_of("must").german_subordinate(first) == "Peter gestern die schwere Tasche abholen muss"
    assert verb_of("folgen folgst folgt gefolgt s").with_sein


def test_every_pattern_makes_sentences_whose_answers_are_found_again() -> None:
    """Whatever is drawn is among all answers, and no phrase is left without its words."""
    rng = random.Random(5)
    for pattern in translation.PATTERNS:
        for _ in range(40):
            found = pattern(Draw(rng))
            drawn, answers = found.german(Drawn(rng)), found.answers()
            assert drawn in answers or len(answers) == translation.MOST_ANSWERS
            for text in (found.english, *answers):
                assert "  " not in text, text
                assert text[0].isupper() or text[0].isdigit(), text
                assert text[-1] in ".?", text
                assert not text.endswith((" .", "..")), text


def test_sentences_are_many() -> None:
    rng = random.Random(1)
    assert len({translation.draw_sentence(rng).english for _ in range(2000)}) > 1950


def test_a_seed_repeats_itself_and_splits_do_not_overlap(tmp_path: Path) -> None:
    assert sum(examples.write("translation", tmp_path / "a", 3000, 3).values()) == 3000
    examples.write("translation", tmp_path / "b", 600, 3)
    examples.write("translation", tmp_path / "c", 3000, 4)
    files = [[(tmp_path / run / f"{split}.jsonl").read_bytes() for split in examples.SPLITS] for run in "abc"]
    assert all(one.startswith(other) for one, other in zip(*files[:2], strict=True)), "fewer of them are the first"
    assert all(files[1])
    assert all(one != other for one, other in zip(files[0], files[2], strict=True))
    sources = {split: {e.source for e in examples.read(tmp_path / "a", split)} for split in examples.SPLITS}
    assert all(len(sources[split]) > 20 for split in examples.SPLITS)
    others = {split: {e.source for e in examples.read(tmp_path / "c", split)} for split in examples.SPLITS}
    for split in ("validation", "bench"):
        assert not sources[split] & sources["train"]
        assert not sources[split] & others["train"], "of another seed, too"
    assert any(e.also for e in examples.read(tmp_path / "a", "bench"))
    assert not any(e.target in e.also for e in examples.read(tmp_path / "a", "bench"))


def test_a_docstring_becomes_shuffled_sources_and_its_first_sentence(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        'def area(width, *, height=2):\n    """Return the area of\n    a field. In metres.\n\n    Raises nothing.\n    """\n'  # noqa: E501
        'def short(x):\n    """Return nothing."""\n'
        'class Box:\n    """Hold a few things\n\n    Args: none of them is needed."""\n'
        "def broken(:\n"
    )
    assert list(summary.summaries(path)) == [], "no Python"
    path.write_text(path.read_text().replace("def broken(:\n", ""))
    found: dict[str, set[str]] = {}
    for source, target in summary.summaries(path):
        found.setdefault(target, set()).add(source)
    own = {" ".join(order) for order in permutations(("Return the area of a field.", "In metres.", "Raises nothing."))}
    area = found.pop("Return the area of a field.")
    assert 2 <= len(area) <= summary.ORDERS
    assert area <= {f"summarize: area(width, height) {order}" for order in own}
    more = "Args: none of them is needed."
    box = {f"summarize: class Box {more} Hold a few things.", f"summarize: class Box Hold a few things. {more}"}
    assert found == {"Hold a few things.": box}
    assert list(summary.summaries(path)) == list(summary.summaries(path))


def test_a_source_is_cut_but_never_the_sentence_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f'def f(x):\n    """Do it with a word. {"Or else not at all. " * 40}"""\n')
    sources = [source for source, target in summary.summaries(path) if target == "Do it with a word."]
    assert sources
    for source in sources:
        assert source.count("Do it with a word.") == 1
        assert summary.SOURCE_CHARACTERS - 20 < len(source) <= summary.SOURCE_CHARACTERS


def test_whole_packages_are_held_out(tmp_path: Path) -> None:
    packages: dict[str, str] = {}
    sources = list[tuple[str, Path]]()
    for i in range(400):
        copied = "Copied into every module of them" if i % 3 == 0 else f"Do the thing of number {i} here"
        path, package = tmp_path / f"m{i}.py", f"package{i // 2}"
        path.write_text(f'def f{i}():\n    """{copied}.\n\n    It is what function {i} of this module does."""\n')
        packages[f"f{i}()"] = package
        sources.append((package, path))
    rows = list(examples.summaries(10_000, 0, sources))
    assert rows == list(examples.summaries(10_000, 0, sources))
    assert rows != list(examples.summaries(10_000, 1, sources))
    found = {split: [example for own, example in rows if own == split] for split in examples.SPLITS}
    assert all(found.values())
    learned = found["train"]
    for example in (*found["validation"], *found["bench"]):
        assert example.target not in {e.target for e in learned}, "what was learned tries nothing"
    inside = {split: {packages[e.source.split()[1]] for e in own} for split, own in found.items()}
    assert not inside["train"] & (inside["validation"] | inside["bench"])


def test_what_is_not_possible_is_refused(tmp_path: Path) -> None:
    assert "must be translation or summary" in refusal(BadOption, examples.write, "poetry", tmp_path, 5, 0)
    assert "at least 1" in refusal(BadOption, examples.write, "translation", tmp_path, 0, 0)
    assert "python -m benchmarks.t5 examples" in refusal(NotFound, examples.read, tmp_path / "nowhere", "train")
    (tmp_path / "train.jsonl").write_text('{"source": 3}\n')
    assert "train.jsonl" in refusal(UnsupportedModel, examples.read, tmp_path, "train")


def test_the_package_for_numbers_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "num2words", None)
    for name in ("german", "meaning", "translation"):
        monkeypatch.delitem(sys.modules, f"benchmarks.t5.examples.{name}", raising=False)
    with pytest.raises(BadOption, match=r"the task translation writes numbers in words: .*pip install num2words"):
        examples.write("translation", tmp_path, 5, 0)


def test_answers_are_scored() -> None:
    found = [
        examples.Example("translation", "a", "Heute kommt Anna.", ("Anna kommt heute.",)),
        examples.Example("translation", "b", "Peter schläft."),
        examples.Example("translation", "c", "Drei rote Äpfel."),
    ]
    good = scoring.score(["Anna kommt heute.", "Peter, Peter isst.", ""], found)
    assert (good.num, good.exact) == (3, 1 / 3)
    assert good.overlap == pytest.approx((1 + 2 * 1 / 5 + 0) / 3)
