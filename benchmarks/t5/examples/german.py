"""German forms: endings of nouns, adjectives and determiners by gender, number and case, and the parts of verbs."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from num2words import num2words

Case = Literal["nom", "acc", "dat", "gen"]
Gender = Literal["m", "f", "n", "p"]  # p: plural, of all genders

CASES: tuple[Case, ...] = ("nom", "acc", "dat", "gen")
DEFINITE = {"m": "der den dem des", "f": "die die der der", "n": "das das dem des", "p": "die die den der"}
DEMONSTRATIVE = {
    "m": "dieser diesen diesem dieses",
    "f": "diese diese dieser dieser",
    "n": "dieses dieses diesem dieses",
    "p": "diese diese diesen dieser",
}
OF_EIN = {"m": " en em es", "f": "e e er er", "n": "  em es", "p": "e e en er"}  # endings of ein, kein, mein
WEAK = {"m": "e en en en", "f": "e e en en", "n": "e e en en", "p": "en en en en"}
MIXED = {"m": "er en en en", "f": "e e en en", "n": "es es en en", "p": "en en en en"}
STRONG = {"m": "er en em en", "f": "e e er er", "n": "es es em en", "p": "e e en er"}


def form(table: dict[str, str], gender: Gender, case: Case) -> str:
    """Return the entry of a table of forms in the order of CASES."""
    return table[gender].split(" ")[CASES.index(case)]


@dataclass(frozen=True)
class Noun:
    """A German noun. is_weak: it ends like its plural in all cases but the nominative."""

    gender: Gender
    singular: str
    plural: str
    is_weak: bool = False

    def form(self, case: Case, *, plural: bool) -> str:
        """Return its form in a case."""
        if plural:
            return self.plural + "n" if case == "dat" and not self.plural.endswith(("n", "s")) else self.plural
        if self.is_weak and case != "nom":
            return self.plural
        return genitive(self.singular) if case == "gen" and self.gender != "f" else self.singular


def genitive(word: str) -> str:
    """Return the genitive of a strong masculine or neuter noun: -es behind a hiss or one syllable, else -s."""
    hisses = word.endswith(("s", "ß", "x", "z"))
    vowels = re.findall(r"[aeiouäöüy]+", word.lower())
    is_closed = re.search(r"([aeiouyäöü]h?|f)$", word) is None
    return word + ("es" if hisses or (len(vowels) == 1 and is_closed) else "s")


@dataclass(frozen=True)
class Adjective:
    """plain: as a predicate; stem: before an ending."""

    plain: str
    stem: str

    def before(self, gender: Gender, case: Case, endings: dict[str, str]) -> str:
        """Return it as it stands before a noun."""
        return self.stem + form(endings, gender, case)


@dataclass(frozen=True)
class Verb:
    """prefix: what separates. thou, he: second and third person singular, without it."""

    prefix: str
    base: str
    thou: str
    he: str
    participle: str
    with_sein: bool = False

    @property
    def infinitive(self) -> str:
        """The infinitive, with its prefix."""
        return self.prefix + self.base

    def finite(self, person: str) -> str:
        """Return the form of the present, without its prefix. person: ich, du, er or sie (plural, and wir)."""
        return {"ich": self.base.removesuffix("n"), "du": self.thou, "er": self.he, "sie": self.base}[person]


HAVE = {"ich": "habe", "du": "hast", "er": "hat", "sie": "haben"}
BE = {"ich": "bin", "du": "bist", "er": "ist", "sie": "sind"}
WILL = {"ich": "werde", "du": "wirst", "er": "wird", "sie": "werden"}
MODALS = {
    "can": {"ich": "kann", "du": "kannst", "er": "kann", "sie": "können"},
    "must": {"ich": "muss", "du": "musst", "er": "muss", "sie": "müssen"},
    "should": {"ich": "soll", "du": "sollst", "er": "soll", "sie": "sollen"},
    "may": {"ich": "darf", "du": "darfst", "er": "darf", "sie": "dürfen"},
    "want to": {"ich": "will", "du": "willst", "er": "will", "sie": "wollen"},
}


def verb_parts(verb: Verb, tense: str, person: str) -> tuple[str, str]:
    """Return the finite verb and what closes a main clause. tense: present, past, will, or a modal's English name."""
    if tense == "present":
        return verb.finite(person), verb.prefix
    if tense == "past":
        return (BE if verb.with_sein else HAVE)[person], verb.participle
    return (WILL if tense == "will" else MODALS[tense])[person], verb.infinitive


def at_the_end(verb: Verb, tense: str, person: str) -> str:
    """Return the verb as it ends a subordinate clause."""
    finite, rest = verb_parts(verb, tense, person)
    return verb.prefix + finite if tense == "present" else f"{rest} {finite}"


@cache
def spelled(number: int) -> str:
    """Return a number in words."""
    return str(num2words(number, lang="de"))


@cache
def ordinal(number: int, ending: str = "e") -> str:
    """Return an ordinal number in words, as it ends before a noun: dritte, dritten."""
    return str(num2words(number, lang="de", to="ordinal")).removesuffix("e") + ending


def figures(number: int, decimals: int = 0) -> str:
    """Return a number in figures: thousands behind full stops, and hundredths, say, behind a comma."""
    whole, rest = divmod(number, 10**decimals)
    text = f"{whole:,}".replace(",", ".")
    return f"{text},{rest:0{decimals}}" if decimals else text
