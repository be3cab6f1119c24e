"""Parts of a sentence in both languages: noun phrases, times, places, and clauses of them.

Each is drawn as a meaning, which English says in one way. German often has several: another order of words, a synonym.
"""

import random
import re
import tomllib
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from num2words import num2words

from benchmarks.t5.examples.choices import Pick, Say
from benchmarks.t5.examples.german import (
    DEFINITE,
    DEMONSTRATIVE,
    MIXED,
    OF_EIN,
    STRONG,
    WEAK,
    Adjective,
    Case,
    Noun,
    Verb,
    at_the_end,
    figures,
    form,
    ordinal,
    spelled,
    verb_parts,
)

T = TypeVar("T")
LEXICON = tomllib.loads(Path(__file__).with_name("lexicon.toml").read_text(encoding="utf-8"))

# ------------------------------------------------------------------------------------------------------------- lexicon


@dataclass(frozen=True)
class Word:
    """An English word with its forms, and the German ones that mean it. more: what else the lexicon says."""

    forms: tuple[str, ...]
    german: tuple[str, ...]
    more: str = ""


@cache
def words(name: str) -> tuple[Word, ...]:
    """Return a table of the lexicon."""
    entries = [entry.split(" = ") for entry in re.split("\n|; ", LEXICON[name].strip())]
    return tuple(
        Word(tuple(english.split("/")), tuple(german.split(", ")), *more) for english, german, *more in entries
    )


@cache
def names(name: str) -> tuple[tuple[str, str], ...]:
    """Return proper names: English beside German."""
    pairs = [entry.partition("=") for entry in LEXICON[name].split()]
    return tuple((english, german or english) for english, _, german in pairs)


@cache
def noun_of(text: str) -> Noun:
    """Read a noun of the lexicon."""
    gender, singular, *rest = text.split()
    return Noun(gender, singular, rest[0] if rest else "", rest[1:] == ["w"])  # type: ignore[arg-type]


@cache
def adjective_of(text: str) -> Adjective:
    """Read an adjective of the lexicon."""
    plain, _, stem = text.partition("/")
    return Adjective(plain, stem or plain)


@cache
def verb_of(text: str) -> Verb:
    """Read a verb of the lexicon."""
    whole, thou, he, participle, *rest = text.split()
    prefix, _, base = whole.rpartition("|")
    return Verb(prefix, base, thou, he, participle, rest == ["s"])


@cache
def counted(number: int) -> str:
    """Return an English number in words."""
    return str(num2words(number))


@cache
def nth(number: int, *, in_figures: bool = False) -> str:
    """Return an English ordinal number."""
    return str(num2words(number, to="ordinal_num" if in_figures else "ordinal"))


# -------------------------------------------------------------------------------------------------------- noun phrases


@dataclass(frozen=True)
class Phrase:
    """A noun phrase or pronoun. person: ich, du, er or sie, by which the verb's form goes. german: of each case.

    negative: the same with kein, where it is said so. is_definite: it may stand before a time.
    """

    english: str
    person: str
    german: Callable[[Pick, Case], str]
    as_object: str = ""
    is_definite: bool = True
    is_pronoun: bool = False
    negative: Callable[[Pick, Case], str] | None = None
    gender: str = ""

    @property
    def object(self) -> str:
        """How it reads as an object."""
        return self.as_object or self.english

    @property
    def is_third(self) -> bool:
        """Whether an English verb gets its -s."""
        return self.person == "er"


PRONOUNS = [
    ("I", "me", "ich", "ich mich mir"),
    ("you", "you", "du", "du dich dir"),
    ("he", "him", "er", "er ihn ihm"),
    ("she", "her", "er", "sie sie ihr"),
    ("we", "us", "sie", "wir uns uns"),
    ("they", "them", "sie", "sie sie ihnen"),
]
POSSESSIVES = [("my", "mein"), ("your", "dein"), ("his", "sein"), ("her", "ihr"), ("our", "unser"), ("their", "ihr")]


class Draw:
    """Draws the parts of a sentence."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def of(self, options: Seq[T]) -> T:
        """Return one of them."""
        return self.rng.choice(options)

    def chance(self, share: float) -> bool:
        """Return True so often."""
        return self.rng.random() < share

    def adjectives(self, table: str, most: int = 2) -> list[Word]:
        """Draw up to `most` different adjectives."""
        return self.rng.sample(words(table), min(most, self.of((0, 0, 1, 1, 1, 2))))

    def noun(
        self,
        table: str,
        adjectives: str,
        kinds: Seq[str] = ("the", "the", "a", "a", "this", "my", "count"),
        most: int = 2,
    ) -> Phrase:
        """Draw a noun phrase of one of these kinds."""
        return phrase(self, self.of(words(table)), self.adjectives(adjectives, most), self.of(kinds))

    def person(self, *, with_pronouns: bool = True) -> Phrase:
        """Draw somebody."""
        kind = self.rng.random()
        if kind < 0.3:
            return self.name()
        if kind < 0.5 and with_pronouns:
            return self.pronoun()
        return self.noun("PERSONS", "OF_PERSONS", ("the", "the", "a", "my", "my", "count", "whose"), most=1)

    def name(self) -> Phrase:
        """Draw somebody by name."""
        is_woman = self.chance(0.5)
        name, _ = self.of(names("WOMEN" if is_woman else "MEN"))
        return Phrase(name, "er", lambda pick, case: name, gender="f" if is_woman else "m")

    def pronoun(self) -> Phrase:
        """Draw a pronoun."""
        subject, as_object, person, german = self.of(PRONOUNS)
        forms = german.split()
        return Phrase(
            subject, person, lambda pick, case: forms[("nom", "acc", "dat").index(case)], as_object, is_pronoun=True
        )

    def thing(self) -> Phrase:
        """Draw a thing."""
        return self.noun("THINGS", "OF_THINGS")


def phrase(draw: Draw, word: Word, adjectives: Seq[Word], kind: str) -> Phrase:
    """Make a noun phrase. kind: the, a, this, my (one of the possessives), count, or whose (Anna's)."""
    plural = kind == "count" or (kind != "a" and draw.chance(0.25))
    noun = word.forms[1 if plural else 0]
    described = " ".join([", ".join(adjective.forms[0] for adjective in adjectives), noun]).strip()
    number, owner = 0, ("", "")
    if kind == "count":
        number = draw.of((*range(2, 13), draw.rng.randrange(13, 100), draw.rng.randrange(13, 1000)))
        number += number % 100 == 1
        in_figures = draw.chance(0.35)
        front = f"{number:,}" if in_figures else counted(number)
    elif kind == "my":
        owner = draw.of(POSSESSIVES)
        front = owner[0]
    elif kind == "whose":
        name, _ = draw.of(names("WOMEN") + names("MEN"))
        owner = (name, name)
        front = f"{name}'s"
    elif kind == "this":
        front = "these" if plural else "this"
    else:
        front = "the" if kind == "the" else article(described)

    def german(pick: Pick, case: Case, negative: bool = False) -> str:
        own = noun_of(pick(word.german))
        gender = "p" if plural else own.gender
        endings = WEAK
        if kind == "the":
            first = form(DEFINITE, gender, case)
        elif kind == "this":
            first = form(DEMONSTRATIVE, gender, case)
        elif kind == "count":
            first = figures(number) if in_figures else spelled(number)
            endings = STRONG
        elif kind == "whose":
            first, endings = owner[1] + "s", STRONG
        else:
            stem = owner[1] if kind == "my" else "kein" if negative else "ein"
            first, endings = stem + form(OF_EIN, gender, case), MIXED
        described = ", ".join(adjective_of(pick(a.german)).before(gender, case, endings) for a in adjectives)
        return " ".join(part for part in (first, described, own.form(case, plural=plural)) if part)

    negative = (lambda pick, case: german(pick, case, negative=True)) if kind == "a" else None
    gender = "p" if plural else word.german[0].partition(" ")[0]
    person, is_definite = "sie" if plural else "er", kind not in ("a", "count")
    return Phrase(f"{front} {described}", person, german, is_definite=is_definite, negative=negative, gender=gender)


def article(text: str) -> str:
    """Return a or an."""
    return "an" if text[0] in "aeiou" and not text.startswith(("uni", "use")) else "a"


# -------------------------------------------------------------------------------------------------------- times, places


@dataclass(frozen=True)
class Adverb:
    """When or where. tenses: that it goes with."""

    english: str
    german: Say
    tenses: str = "present past will can must should may want to"


def same(english: str, german: str | Seq[str], tenses: str = Adverb.tenses) -> Adverb:
    """Make an adverb that does not change."""
    options = [german] if isinstance(german, str) else german
    return Adverb(english, (lambda pick: pick(options)) if len(options) > 1 else lambda pick: options[0], tenses)


LATER = "will can must should may want to"
FIXED_TIMES = [
    same("yesterday", "gestern", "past"),
    same("today", "heute"),
    same("tomorrow", "morgen", LATER),
    same("last week", ("letzte Woche", "vorige Woche"), "past"),
    same("last year", ("letztes Jahr", "voriges Jahr"), "past"),
    same("last month", ("letzten Monat", "vorigen Monat"), "past"),
    same("next week", "nächste Woche", LATER),
    same("next year", "nächstes Jahr", LATER),
    same("every day", ("jeden Tag", "täglich"), "present"),
    same("every morning", "jeden Morgen", "present"),
    same("now", "jetzt", "present can must should may want to"),
    same("often", ("oft", "häufig"), "present past"),
    same("this evening", "heute Abend"),
    same("tonight", "heute Nacht", LATER),
    same("in the morning", "am Morgen"),
    same("in the evening", "am Abend"),
    same("at the weekend", "am Wochenende"),
    same("this morning", "heute Morgen", "past"),
    same("soon", "bald", LATER),
]


def day_of(draw: Draw, *, with_year: bool) -> tuple[str, str]:
    """Draw a date: English and German, without `on` and `am`: March 3rd, 1987, and 3. März 1987."""
    day, (month, monat) = draw.rng.randrange(1, 29), draw.of(names("MONTHS"))
    year = draw.rng.randrange(1850, 2060)
    if draw.chance(0.3):
        english, german = f"the {nth(day)} of {month}", f"{ordinal(day, 'en')} {monat}"
    else:
        english, german = f"{month} {nth(day, in_figures=True)}", f"{day}. {monat}"
        if draw.chance(0.3):
            english = f"the {nth(day, in_figures=True)} of {month}"
    comma = " " if english.startswith("the ") else ", "
    return (f"{english}{comma}{year}", f"{german} {year}") if with_year else (english, german)


def clock(draw: Draw) -> Adverb:
    """Draw a time of the day."""
    hour, kind = draw.rng.randrange(1, 12), draw.rng.randrange(6)
    this, following = counted(hour), spelled(hour + 1)
    own = "ein" if hour == 1 else spelled(hour)
    quarter = "eins" if hour == 1 else spelled(hour)
    if kind == 0:
        return same(f"at {this} o'clock", f"um {own} Uhr")
    if kind == 1:
        return same(f"at half past {this}", f"um halb {following}")
    if kind == 2:
        return same(f"at a quarter past {this}", f"um Viertel nach {quarter}")
    if kind == 3:
        return same(f"at a quarter to {counted(hour + 1)}", f"um Viertel vor {following}")
    minute = draw.rng.randrange(1, 60)
    if kind == 4:
        return same(f"at {hour}:{minute:02} p.m.", f"um {hour + 12}:{minute:02} Uhr")
    return same(f"at {hour}:{minute:02} a.m.", f"um {hour}:{minute:02} Uhr")


def time(draw: Draw, tense: str) -> Adverb:
    """Draw a time that goes with a tense."""
    kind = draw.rng.random()
    if kind < 0.4:
        fitting = [t for t in FIXED_TIMES if tense in t.tenses.split(" ") or tense == "want to" in t.tenses]
        return draw.of(fitting)
    if kind < 0.55:
        day, tag = draw.of(names("DAYS"))
        return same(f"on {day}", f"am {tag}")
    if kind < 0.7:
        english, german = day_of(draw, with_year=draw.chance(0.3) and tense == "past")
        return same(f"on {english}", f"am {german}")
    if kind < 0.82:
        return clock(draw)
    if kind < 0.9 and tense in ("past", "will"):
        number, span = draw.rng.randrange(2, 21), draw.of(words("SPANS"))
        far, weit = f"{counted(number)} {span.forms[1]}", noun_of(span.german[0]).form("dat", plural=True)
        before, vor = (f"{far} ago", "vor") if tense == "past" else (f"in {far}", "in")
        return same(before, f"{vor} {spelled(number)} {weit}")
    if kind < 0.95:
        season, jahreszeit = draw.of(names("SEASONS"))
        return same(f"in {season}", f"im {jahreszeit}")
    month, monat = draw.of(names("MONTHS"))
    return same(f"in {month}", f"im {monat}")


AT = {"in": "in", "an": "at", "auf": "on"}
CONTRACTED = {"in dem ": "im ", "an dem ": "am ", "in das ": "ins ", "an das ": "ans "}


def contracted(text: str) -> str:
    """Join a preposition with the article behind it, as it must be."""
    found = next((long for long in CONTRACTED if text.startswith(long)), None)
    return text if found is None else CONTRACTED[found] + text.removeprefix(found)


def place(draw: Draw) -> Adverb:
    """Draw where something happens."""
    if draw.chance(0.35):
        city, stadt = draw.of(names("CITIES"))
        return same(f"in {city}", f"in {stadt}")
    word = draw.of(words("PLACES"))
    own = phrase(draw, word, draw.adjectives("OF_PLACES", 1), draw.of(("the", "the", "a", "this", "my")))
    preposition = word.more
    english = "at" if word.forms[0] == "market" else AT[preposition]
    return Adverb(f"{english} {own.english}", lambda pick: contracted(f"{preposition} {own.german(pick, 'dat')}"))


# ------------------------------------------------------------------------------------------------------------- clauses


@dataclass(frozen=True)
class Clause:
    """Who does what to whom, when and where. negative: nicht, or kein before an indefinite object."""

    subject: Phrase
    verb: Word
    tense: str
    dative: Phrase | None = None
    accusative: Phrase | None = None
    time: Adverb | None = None
    place: Adverb | None = None
    negative: bool = False
    time_first: bool = False
    to: bool = False  # English says the book to him, not him the book

    def _objects(self) -> str:
        dative, accusative = (None if p is None else p.object for p in (self.dative, self.accusative))
        if dative is not None and accusative is not None:
            return f"{accusative} to {dative}" if self.to else f"{dative} {accusative}"
        return dative or accusative or ""

    def _after(self, verb: str, *, with_time: bool = True) -> str:
        when = self.time.english if self.time is not None and with_time else ""
        where = "" if self.place is None else self.place.english
        return " ".join(part for part in (verb, self._objects(), where, when) if part)

    def predicate(self, *, with_time: bool = True) -> str:
        """Return what English says behind the subject."""
        base, third, past, _ = self.verb.forms
        does = "does" if self.subject.is_third else "do"
        if self.tense == "present":
            verb = f"{does} not {base}" if self.negative else third if self.subject.is_third else base
        elif self.tense == "past":
            verb = f"did not {base}" if self.negative else past
        elif self.tense == "want to":
            wants = "wants to" if self.subject.is_third else "want to"
            verb = f"{does} not want to {base}" if self.negative else f"{wants} {base}"
        else:
            denied = "cannot" if self.tense == "can" else f"{self.tense} not"
            verb = f"{denied if self.negative else self.tense} {base}"
        return self._after(verb, with_time=with_time)

    def english(self) -> str:
        """Return the statement, without a full stop."""
        if self.time is not None and self.time_first:
            return f"{self.time.english}, {self.subject.english} {self.predicate(with_time=False)}"
        return f"{self.subject.english} {self.predicate()}"

    def english_question(self) -> str:
        """Return the question, without its mark."""
        does = "does" if self.subject.is_third else "do"
        base = self.verb.forms[0]
        first = {"present": does, "past": "did", "want to": does}.get(self.tense, self.tense)
        verb = f"want to {base}" if self.tense == "want to" else base
        return f"{first} {self.subject.english} {self._after(verb)}"

    def _middle(self, pick: Pick, *, subject: bool, when: str) -> list[str]:
        """What stands between the finite verb and what closes the clause."""
        dative, accusative = self.dative, self.accusative
        found = [self.subject.german(pick, "nom")] if subject else []
        if dative is not None and dative.is_pronoun:
            found.append(dative.german(pick, "dat"))
        if accusative is not None and accusative.is_pronoun:
            found.append(accusative.german(pick, "acc"))
        objects = []
        if dative is not None and not dative.is_pronoun:
            objects.append(dative.german(pick, "dat"))
        is_denied = False
        if accusative is not None and not accusative.is_pronoun:
            denied = accusative.negative if self.negative else None
            is_denied = denied is not None
            objects.append((denied or accusative.german)(pick, "acc"))
        time_last = bool(when and objects) and not is_denied and self._all_definite() and pick((False, False, True))
        found += [*objects, when] if time_last else [when, *objects]
        if self.place is not None:
            found.append(self.place.german(pick))
        if self.negative and not is_denied:
            found.append("nicht")
        return [part for part in found if part]

    def _all_definite(self) -> bool:
        return all(phrase is None or phrase.is_definite for phrase in (self.dative, self.accusative))

    def german(self, pick: Pick) -> str:
        """Return the statement, with the finite verb second."""
        finite, rest = verb_parts(verb_of(pick(self.verb.german)), self.tense, self.subject.person)
        when = "" if self.time is None else self.time.german(pick)
        inverted = bool(when) and (self.time_first or pick((False, False, True)))
        first = when if inverted else self.subject.german(pick, "nom")
        middle = self._middle(pick, subject=inverted, when="" if inverted else when)
        return " ".join(part for part in (first, finite, *middle, rest) if part)

    def german_question(self, pick: Pick) -> str:
        """Return the question, with the finite verb first."""
        finite, rest = verb_parts(verb_of(pick(self.verb.german)), self.tense, self.subject.person)
        when = "" if self.time is None else self.time.german(pick)
        return " ".join(part for part in (finite, *self._middle(pick, subject=True, when=when), rest) if part)

    def german_subordinate(self, pick: Pick, *, subject: bool = True) -> str:
        """Return it behind a conjunction, with the finite verb last. subject: whether it is said."""
        verb = verb_of(pick(self.verb.german))
        middle = self._middle(pick, subject=subject, when="" if self.time is None else self.time.german(pick))
        return " ".join((*middle, at_the_end(verb, self.tense, self.subject.person)))


DENIABLE = ("present", "past", "will", "can", "want to")


def clause(draw: Draw, *, subject: Phrase | None = None, simple: bool = False) -> Clause:
    """Draw a clause. simple: without negation, and seldom with time and place."""
    subject = draw.person() if subject is None else subject
    tense = draw.of(("present", "present", "past", "past", "past", "will", "can", "must", "should", "want to"))
    kind = draw.rng.random()
    dative = accusative = None
    if kind < 0.42:
        verb, accusative = draw.of(words("WITH_THING")), draw.thing()
    elif kind < 0.57:
        verb, accusative = draw.of(words("WITH_PERSON")), draw.person()
    elif kind < 0.7:
        verb, dative = draw.of(words("WITH_DATIVE")), draw.person()
    elif kind < 0.9:
        verb, dative, accusative = draw.of(words("WITH_BOTH")), draw.person(), draw.thing()
    else:
        verb = draw.of(words("WITH_NONE"))
    if any(other is not None and other.is_pronoun and subject.is_pronoun for other in (dative, accusative)):
        subject = draw.name()
    negative = not simple and tense in DENIABLE and draw.chance(0.15)
    if negative and accusative is not None and accusative.negative is None and not accusative.is_definite:
        negative = False
    share = 0.2 if simple else 0.6
    return Clause(
        subject,
        verb,
        tense,
        dative,
        accusative,
        time(draw, tense) if draw.chance(share) else None,
        place(draw) if draw.chance(share / 2) and not negative else None,
        negative,
        draw.chance(0.3),
        draw.chance(0.5),
    )
