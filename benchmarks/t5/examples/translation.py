"""The translation task: English sentences that are made here, with all German ones that are right.

The sentences are patterns of a few clauses, or of numbers, dates, amounts and quantities. A program can check an
answer, because it knows all that are right.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from benchmarks.t5.examples.choices import Pick, Say, every
from benchmarks.t5.examples.german import (
    BE,
    DEFINITE,
    HAVE,
    STRONG,
    WEAK,
    Case,
    figures,
    form,
    ordinal,
    spelled,
    verb_parts,
)
from benchmarks.t5.examples.meaning import (
    Adverb,
    Clause,
    Draw,
    Phrase,
    Word,
    adjective_of,
    clause,
    clock,
    contracted,
    counted,
    day_of,
    names,
    noun_of,
    nth,
    phrase,
    place,
    time,
    verb_of,
    words,
)

PREFIX = "translate English to German: "
MOST_ANSWERS = 512


@dataclass(frozen=True)
class Sentence:
    """What is said, in English, and how German says it."""

    english: str
    german: Say

    def answers(self) -> list[str]:
        """Return every right translation, at most MOST_ANSWERS."""
        return list(dict.fromkeys(text for text, _ in zip(every(self.german), range(MOST_ANSWERS), strict=False)))


def sentence(english: str, german: Say, end: str = ".") -> Sentence:
    """Begin with a capital, and end."""
    return Sentence(raised(english).removesuffix(end) + end, lambda pick: raised(german(pick)) + end)


def raised(text: str) -> str:
    """Return a text with its first letter as a capital."""
    return text[:1].upper() + text[1:]


# ------------------------------------------------------------------------------------------------------------ patterns


def statement(draw: Draw) -> Sentence:
    """Somebody does something: Peter bought a red car yesterday."""
    own = clause(draw)
    return sentence(own.english(), own.german)


def question(draw: Draw) -> Sentence:
    """A question whose answer is yes or no: Did Peter buy a red car?"""
    own = replace(clause(draw), negative=False)
    return sentence(own.english_question(), own.german_question, "?")


def question_word(draw: Draw) -> Sentence:
    """A question that asks when, where, why or how often."""
    english, german = draw.of((("when", "wann"), ("why", "warum"), ("where", "wo"), ("how often", "wie oft")))
    own = replace(clause(draw), negative=False, time=None, place=None)
    return sentence(f"{english} {own.english_question()}", lambda pick: f"{german} {own.german_question(pick)}", "?")


def because(draw: Draw) -> Sentence:
    """Two clauses, the second behind a conjunction, or both the other way round."""
    main, other = (replace(clause(draw, simple=True), time_first=False) for _ in range(2))
    conjunction = draw.of(words("CONJUNCTIONS"))
    english, options = conjunction.forms[0], conjunction.german
    if draw.chance(0.3):

        def turned(pick: Pick) -> str:
            finite, rest = verb_parts(verb_of(pick(main.verb.german)), main.tense, main.subject.person)
            middle = main._middle(pick, subject=True, when="" if main.time is None else main.time.german(pick))
            first = f"{pick(options)} {other.german_subordinate(pick)},"
            return " ".join(part for part in (first, finite, *middle, rest) if part)

        return sentence(f"{english} {other.english()}, {main.english()}", turned)
    return sentence(
        f"{main.english()} {english} {other.english()}",
        lambda pick: f"{main.german(pick)}, {pick(options)} {other.german_subordinate(pick)}",
    )


def that(draw: Draw) -> Sentence:
    """What somebody says, knows or believes: Anna says that Peter bought a red car."""
    who, (english, german) = draw.name(), draw.of(names("SAYING"))
    own = replace(clause(draw), time_first=False)
    return sentence(
        f"{who.english} {english} that {own.english()}",
        lambda pick: f"{who.english} {german}, dass {own.german_subordinate(pick)}",
    )


RELATIVE = {"m": "der", "f": "die", "n": "das", "p": "die"}


def who(draw: Draw) -> Sentence:
    """A relative clause."""
    person = draw.noun("PERSONS", "OF_PERSONS", ("the",), most=1)
    own = replace(clause(draw, subject=person, simple=True), time_first=False)
    outer = replace(clause(draw, subject=person, simple=True), time=None, place=None)
    if own.subject is not person or outer.subject is not person:
        return who(draw)
    pronoun = RELATIVE[person.gender]

    def german(pick: Pick) -> str:
        finite, rest = verb_parts(verb_of(pick(outer.verb.german)), outer.tense, person.person)
        first = f"{person.german(pick, 'nom')}, {pronoun} {own.german_subordinate(pick, subject=False)},"
        return " ".join(part for part in (first, finite, *outer._middle(pick, subject=False, when=""), rest) if part)

    return sentence(f"{person.english} who {own.predicate()} {outer.predicate()}", german)


def price(draw: Draw) -> tuple[str, str]:
    """Draw an amount of money."""
    unit, einheit = draw.of(names("MONEY"))
    kind = draw.rng.random()
    if kind < 0.35:
        number = draw.of((draw.rng.randrange(2, 100), draw.rng.randrange(2, 1000), draw.rng.randrange(1000, 10000)))
        number += number % 100 == 1
        return f"{counted(number)} {unit}", f"{spelled(number)} {einheit}"
    if kind < 0.65:
        number = draw.rng.randrange(200, 100_000)
        return f"{number // 100:,}.{number % 100:02} {unit}", f"{figures(number, 2)} {einheit}"
    number = draw.of((draw.rng.randrange(2, 1000), draw.rng.randrange(1000, 1_000_000)))
    return f"{number:,} {unit}", f"{figures(number)} {einheit}"


def costs(draw: Draw) -> Sentence:
    """What something costs, or what somebody paid for it."""
    thing = draw.noun("THINGS", "OF_THINGS")
    amount, betrag = price(draw)
    if draw.chance(0.5):
        verb, options = ("costs", ("kostet",)) if thing.is_third else ("cost", ("kosten",))
        return sentence(
            f"{thing.english} {verb} {amount}", lambda pick: f"{thing.german(pick, 'nom')} {pick(options)} {betrag}"
        )
    subject = draw.person()
    when = time(draw, "past") if draw.chance(0.5) else None
    have = HAVE[subject.person]

    def german(pick: Pick) -> str:
        who, what = subject.german(pick, "nom"), thing.german(pick, "acc")
        then = "" if when is None else when.german(pick)
        front = f"{then} {have} {who}" if then and pick((False, True)) else f"{who} {have} {then}".strip()
        return f"{front} {betrag} für {what} bezahlt"

    then = "" if when is None else f" {when.english}"
    return sentence(f"{subject.english} paid {amount} for {thing.object}{then}", german)


def amount_of_food(draw: Draw) -> tuple[str, Say]:
    """Draw a quantity of food, which is in the accusative: 250 Gramm frische Butter."""
    unit, food = draw.of(words("UNITS")), draw.of(words("FOOD"))
    adjective = draw.of(words("OF_FOOD")) if draw.chance(0.45) else None
    gender = noun_of(food.german[0]).gender
    if unit.forms[0] == "gram":
        number = draw.rng.randrange(2, 40) * 25
        english, german = f"{number}", f"{number}"
    elif unit.forms[0] in ("kilogram", "litre") and draw.chance(0.4):
        number = draw.rng.randrange(2, 13)
        if draw.chance(0.5):
            english, german = f"{counted(number)} and a half", f"{spelled(number)}einhalb"
        else:
            tenth = draw.rng.randrange(1, 10)
            english, german = f"{number}.{tenth}", f"{number},{tenth}"
    else:
        number = draw.rng.randrange(2, 31)
        in_figures = draw.chance(0.3)
        english, german = (str(number), str(number)) if in_figures else (counted(number), spelled(number))
    what = " ".join(part for part in ("" if adjective is None else adjective.forms[0], food.forms[0]) if part)

    def said(pick: Pick) -> str:
        own = noun_of(pick(unit.german))
        before = ""
        if adjective is not None:
            before = adjective_of(pick(adjective.german)).before(gender, "acc", STRONG) + " "
        # Flaschen, and Glas: measures of two genders have no plural.
        measure = own.form("nom", plural=own.gender == "f")
        return f"{german} {measure} {before}{noun_of(food.german[0]).singular}"

    return f"{english} {unit.forms[1]} of {what}", said


VERBS = {word.forms[0]: word for word in words("WITH_THING")}
BUYING = [
    *(VERBS[name] for name in ("buy", "need", "order", "sell")),
    Word(
        ("bring along", "brings along", "brought along", "brought along"), ("mit|bringen bringst bringt mitgebracht",)
    ),
]


def groceries(draw: Draw) -> Sentence:
    """Somebody buys, needs or brings quantities of food."""
    parts = [amount_of_food(draw) for _ in range(draw.of((1, 1, 2, 2, 3)))]
    english = " and ".join(filter(None, [", ".join(text for text, _ in parts[:-1]), parts[-1][0]]))

    def german(pick: Pick, case: Case) -> str:
        said = [say(pick) for _, say in parts]
        return " und ".join(filter(None, [", ".join(said[:-1]), said[-1]]))

    tense = draw.of(("present", "past", "past", "will", "must", "should", "want to"))
    own = Clause(
        draw.person(),
        draw.of(BUYING),
        tense,
        accusative=Phrase(english, "sie", german, is_definite=False),
        time=time(draw, tense) if draw.chance(0.5) else None,
        time_first=draw.chance(0.3),
    )
    return sentence(own.english(), own.german)


def born(draw: Draw) -> Sentence:
    """Where and when somebody was born."""
    who = draw.person()
    day, tag = day_of(draw, with_year=True)
    was = "was" if who.person in ("ich", "er") else "were"
    wurde = {"ich": "wurde", "du": "wurdest", "er": "wurde", "sie": "wurden"}[who.person]
    city, stadt = draw.of(names("CITIES"))
    if draw.chance(0.5):
        return sentence(
            f"{who.english} {was} born on {day}", lambda pick: f"{who.german(pick, 'nom')} {wurde} am {tag} geboren"
        )
    return sentence(
        f"{who.english} {was} born in {city} on {day}",
        lambda pick: (
            f"{who.german(pick, 'nom')} {wurde} {pick((f'am {tag} in {stadt}', f'in {stadt} am {tag}'))} geboren"
        ),
    )


def event(draw: Draw) -> Sentence:
    """Something takes place, or begins, on a day with its date, at a time."""
    what = draw.of(words("EVENTS"))
    name, options = what.forms[0], what.german
    ordinal_word = draw.chance(0.3)
    number = draw.rng.randrange(2, 13)
    english = f"the {nth(number)} {name}" if ordinal_word else f"the {name}"
    begins = draw.chance(0.5)
    day, tag = day_of(draw, with_year=draw.chance(0.3))
    if draw.chance(0.5):
        weekday, wochentag = draw.of(names("DAYS"))
        when, wann = f"on {weekday}, {day},", f"am {wochentag}, dem {tag},"
    else:
        when, wann = f"on {day}", f"am {tag}"
    at = clock(draw) if draw.chance(0.6) else None
    if at is None:
        when, wann = when.removesuffix(","), wann.removesuffix(",")
    verb = "begins" if begins else "takes place"

    def german(pick: Pick) -> str:
        own = noun_of(pick(options))
        what = f"{form(DEFINITE, own.gender, 'nom')} {ordinal(number) + ' ' if ordinal_word else ''}{own.singular}"
        finite, rest = pick((("beginnt", ""), ("fängt", "an"))) if begins else ("findet", "statt")
        then = wann if at is None else f"{wann} {at.german(pick)}"
        return " ".join(part for part in (what, finite, then, rest) if part)

    return sentence(f"{english} {verb} {when}" + ("" if at is None else f" {at.english}"), german)


def is_so(draw: Draw) -> Sentence:
    """Somebody or something is, was, or has been so."""
    if draw.chance(0.5):
        subject, adjective = draw.person(), draw.of(words("OF_PERSONS"))
    else:
        subject, adjective = draw.thing(), draw.of(words("OF_THINGS"))
    very, sehr = draw.of((("", ""), ("", ""), ("very ", "sehr "), ("too ", "zu "), ("not ", "nicht ")))
    past = draw.chance(0.4)
    are = {"ich": "am", "er": "is"}.get(subject.person, "are")
    was = {"ich": "was", "er": "was"}.get(subject.person, "were")
    finite = {"ich": "war", "du": "warst", "er": "war", "sie": "waren"} if past else BE
    return sentence(
        f"{subject.english} {was if past else are} {very}{adjective.forms[0]}",
        lambda pick: (
            f"{subject.german(pick, 'nom')} {finite[subject.person]} {sehr}{adjective_of(pick(adjective.german)).plain}"
        ),
    )


def compared(draw: Draw) -> Sentence:
    """A comparison of two things: The red car is cheaper than my old bicycle."""
    one, other = draw.thing(), draw.thing()
    word = draw.of(words("COMPARED"))
    much, viel = draw.of((("", ""), ("much ", "viel ")))
    verb, finite = ("is", "ist") if one.is_third else ("are", "sind")
    return sentence(
        f"{one.english} {verb} {much}{word.forms[0]} than {other.object}",
        lambda pick: f"{one.german(pick, 'nom')} {finite} {viel}{pick(word.german)} als {other.german(pick, 'nom')}",
    )


MEASURES = [
    ("years old", "Jahre alt"),
    ("metres long", "Meter lang"),
    ("centimetres wide", "Zentimeter breit"),
    ("metres tall", "Meter hoch"),
    ("kilograms heavier than allowed", "Kilogramm schwerer als erlaubt"),
]


def measured(draw: Draw) -> Sentence:
    """How old, long, wide or tall something is."""
    own = draw.noun(draw.of(("THINGS", "PLACES")), draw.of(("OF_PLACES", "OF_THINGS")), ("the", "this", "my"), most=1)
    english, german = draw.of(MEASURES)
    number = draw.rng.randrange(2, 400)
    number += number % 100 == 1
    if draw.chance(0.3):
        tenth = draw.rng.randrange(1, 10)
        amount, betrag = f"{number}.{tenth}", f"{number},{tenth}"
    elif draw.chance(0.5):
        amount = betrag = str(number)
    else:
        amount, betrag = counted(number), spelled(number)
    verb, finite = ("is", "ist") if own.is_third else ("are", "sind")
    return sentence(
        f"{own.english} {verb} {amount} {english}", lambda pick: f"{own.german(pick, 'nom')} {finite} {betrag} {german}"
    )


def spot(draw: Draw) -> tuple[str, str, Phrase]:
    """Draw a place near a thing: a preposition, in English and German, and the thing."""
    english, german, things = draw.of(SPOTS)
    word = draw.of([word for word in words("THINGS") if word.forms[0] in things])
    where = phrase(draw, word, draw.adjectives("OF_THINGS", 1), draw.of(("the", "the", "this", "my", "a")))
    return english, german, where


def there_is(draw: Draw) -> Sentence:
    """What is in, on, under, behind or next to something; German has it in the dative."""
    english, german, where = spot(draw)
    what = draw.noun("THINGS", "OF_THINGS", ("a", "count", "count"))
    verb, finite = ("is", "ist") if what.is_third else ("are", "sind")

    def said(pick: Pick) -> str:
        place, thing = contracted(f"{german} {where.german(pick, 'dat')}"), what.german(pick, "nom")
        return pick((f"{place} {finite} {thing}", f"{thing} {finite} {place}"))

    return sentence(f"there {verb} {what.english} {english} {where.english}", said)


SPOTS = [
    ("on", "auf", {"table", "chair", "bed", "cupboard", "shelf", "carpet", "box", "suitcase", "blanket"}),
    ("in", "in", {"box", "bag", "suitcase", "basket", "cupboard", "bed", "boat", "tent", "car"}),
    ("under", "unter", {"table", "chair", "bed", "carpet", "blanket", "cupboard", "pillow", "newspaper"}),
    ("behind", "hinter", {"cupboard", "mirror", "chair", "car", "shelf", "picture", "box"}),
    ("next to", "neben", {"lamp", "bed", "table", "mirror", "clock", "bottle", "box", "machine", "plate"}),
]
PUTTING = [
    Word(("put", "puts", "put", "put"), ("legen legst legt gelegt", "stellen stellst stellt gestellt")),
    VERBS["hide"],
]


def puts(draw: Draw) -> Sentence:
    """Where something is put: the preposition is followed by the accusative, or the dative where it is hidden."""
    english, german, where = spot(draw)
    verb = draw.of(PUTTING)
    case: Case = "acc" if verb is PUTTING[0] else "dat"
    tense = draw.of(("present", "past", "past", "will", "must", "should", "want to"))
    target = Adverb(f"{english} {where.english}", lambda pick: contracted(f"{german} {where.german(pick, case)}"))
    own = Clause(
        draw.person(),
        verb,
        tense,
        accusative=draw.noun("THINGS", "OF_THINGS", ("the", "the", "a", "my", "count")),
        place=target,
        time=time(draw, tense) if draw.chance(0.4) else None,
        time_first=draw.chance(0.3),
    )
    return sentence(own.english(), own.german)


def goes(draw: Draw) -> Sentence:
    """A journey: when, with whom, and where to."""
    city, stadt = draw.of(names("CITIES"))
    tense = draw.of(("present", "past", "past", "will", "must", "want to", "can"))
    companion = draw.noun("PERSONS", "OF_PERSONS", ("my", "the", "whose", "a"), most=1) if draw.chance(0.5) else None
    with_whom = "" if companion is None else f" with {companion.object}"

    def where(pick: Pick) -> str:
        mit = "" if companion is None else f"mit {companion.german(pick, 'dat')} "
        return f"{mit}nach {stadt}"

    own = Clause(
        draw.person(),
        draw.of(words("GOING")),
        tense,
        place=Adverb(f"to {city}{with_whom}", where),
        time=time(draw, tense) if draw.chance(0.7) else None,
        time_first=draw.chance(0.3),
    )
    return sentence(own.english(), own.german)


QUALITIES = [
    ("colour", "die Farbe", ("schön", "beautiful")),
    ("price", "der Preis", ("hoch", "high")),
    ("name", "der Name", ("lang", "long")),
    ("weight", "das Gewicht", ("wichtig", "important")),
    ("size", "die Größe", ("wichtig", "important")),
    ("value", "der Wert", ("niedrig", "low")),
]


def of_something(draw: Draw) -> Sentence:
    """A genitive."""
    quality, qualität, (german, english) = draw.of(QUALITIES)
    own = draw.noun("THINGS", "OF_THINGS", ("the", "the", "this", "my", "a"))
    very, sehr = draw.of((("", ""), ("very ", "sehr "), ("too ", "zu "), ("not ", "nicht ")))
    return sentence(
        f"the {quality} of {own.english} is {very}{english}",
        lambda pick: f"{qualität} {own.german(pick, 'gen')} ist {sehr}{german}",
    )


def percent(draw: Draw) -> Sentence:
    """What share of people is so: 45 percent of the guests are tired."""
    group = draw.of(words("PERSONS"))
    number = draw.rng.randrange(2, 100)
    word = draw.chance(0.4) and number % 100 != 1
    amount, betrag = (counted(number), spelled(number)) if word else (str(number), str(number))
    if not word and draw.chance(0.4):
        tenth = draw.rng.randrange(1, 10)
        amount, betrag = f"{number}.{tenth}", f"{number},{tenth}"
    adjective = draw.of(words("OF_PERSONS"))
    described = draw.of(words("OF_PERSONS")) if draw.chance(0.4) else None
    extra = "" if described is None else f"{described.forms[0]} "

    def german(pick: Pick) -> str:
        own = noun_of(pick(group.german))
        before = "" if described is None else adjective_of(pick(described.german)).before("p", "gen", WEAK) + " "
        so = adjective_of(pick(adjective.german)).plain
        return f"{betrag} Prozent der {before}{own.form('gen', plural=True)} sind {so}"

    return sentence(f"{amount} percent of the {extra}{group.forms[1]} are {adjective.forms[0]}", german)


def arithmetic(draw: Draw) -> Sentence:
    """A sum, a difference or a product of numbers in words."""
    english, german = draw.of((("plus", "plus"), ("minus", "minus"), ("times", "mal")))
    most = 21 if english == "times" else 1000
    small, large = sorted((draw.rng.randrange(2, most), draw.rng.randrange(2, most)))
    result = {"plus": large + small, "minus": large - small, "times": large * small}[english]
    return sentence(
        f"{counted(large)} {english} {counted(small)} is {counted(result)}",
        lambda pick: (
            f"{spelled(large)} {german} {spelled(small)} {pick(('ist', 'ist gleich', 'macht'))} {spelled(result)}"
        ),
    )


def floor(draw: Draw) -> Sentence:
    """Where somebody lives: on the third floor, in the second house."""
    who, number = draw.person(), draw.rng.randrange(2, 31)
    verb = Word(("live", "lives", "lived", "lived"), ("wohnen wohnst wohnt gewohnt",))
    english, noun = draw.of((("floor", "m Stock"), ("floor", "f Etage"), ("house", "n Haus"), ("room", "n Zimmer")))
    preposition = "on" if english == "floor" else "in"
    options = ("m Stock", "f Etage") if english == "floor" else (noun,)

    def where(pick: Pick) -> str:
        own = noun_of(pick(options))
        return contracted(f"in {form(DEFINITE, own.gender, 'dat')} {ordinal(number, 'en')} {own.singular}")

    tense = draw.of(("present", "past", "will", "want to", "must"))
    own = Clause(
        who,
        verb,
        tense,
        place=Adverb(f"{preposition} the {nth(number)} {english}", where),
        time=time(draw, tense) if draw.chance(0.3) else None,
    )
    return sentence(own.english(), own.german)


def degrees(draw: Draw) -> Sentence:
    """How warm it was somewhere at some time."""
    number = draw.rng.randrange(2, 40)
    minus = draw.chance(0.3)
    in_figures = draw.chance(0.4)
    english, german = (f"{number}", f"{number}") if in_figures else (counted(number), spelled(number))
    sign = "minus " if minus else ""
    where, when = place(draw), time(draw, "past")

    def said(pick: Pick) -> str:
        then, there = when.german(pick), where.german(pick)
        return pick((f"{then} waren es {there}", f"{there} waren es {then}")) + f" {sign}{german} Grad"

    return sentence(f"it was {sign}{english} degrees {where.english} {when.english}", said)


PATTERNS: Mapping[Callable[[Draw], Sentence], int] = {
    statement: 30,
    question: 8,
    question_word: 5,
    because: 10,
    that: 7,
    who: 6,
    costs: 8,
    groceries: 9,
    born: 4,
    event: 6,
    is_so: 5,
    compared: 5,
    measured: 4,
    there_is: 5,
    puts: 6,
    goes: 6,
    of_something: 4,
    percent: 4,
    arithmetic: 4,
    floor: 4,
    degrees: 4,
}


def draw_sentence(rng: random.Random) -> Sentence:
    """Draw one of the patterns, by their weights, and a sentence of it."""
    [pattern] = rng.choices(list(PATTERNS), list(PATTERNS.values()))
    return pattern(Draw(rng))
