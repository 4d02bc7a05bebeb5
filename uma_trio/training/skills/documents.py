"""Long documents of many small facts, and questions about single facts.

``make_document`` is pure and fast.  Benches and tests take their long prompts from it:

    document = make_document(seed=1, facts=150)
    prompt = ask(document, document.facts[70].question)
    expected = document.facts[70].answer
"""

from __future__ import annotations

from random import Random

import attrs

from uma_trio.training.sample import Sample, Turn
from uma_trio.training.skills.conversations import single
from uma_trio.training.words import ADJECTIVES, NAMES, OBJECTS, SURNAMES, made_up_place

_ROLES = (
    "mayor",
    "baker",
    "teacher",
    "pilot",
    "keeper",
    "doctor",
    "miller",
    "painter",
    "judge",
    "gardener",
    "captain",
    "tailor",
)
_COUNTED = (
    "bridges",
    "windmills",
    "towers",
    "wells",
    "schools",
    "bakeries",
    "ponds",
    "orchards",
    "statues",
    "boats",
    "lamps",
    "gates",
)
_MADE = (
    "lamps",
    "carpets",
    "clocks",
    "boots",
    "kites",
    "spoons",
    "baskets",
    "bells",
    "chairs",
    "candles",
    "hats",
    "drums",
    "ropes",
    "mirrors",
)
_SIGHTS = ("flag", "gate", "tower", "roof", "door", "boat", "bridge", "fountain")
_PAINTS = (
    "red",
    "blue",
    "green",
    "yellow",
    "white",
    "black",
    "orange",
    "brown",
    "pink",
    "purple",
    "grey",
    "gold",
    "silver",
)
_TOPICS = (
    "Harbours",
    "Rivers",
    "Markets",
    "Hills",
    "Roads",
    "Gardens",
    "Islands",
    "Forests",
    "Towers",
    "Villages",
    "Mines",
    "Lakes",
    "Bridges",
    "Farms",
    "Castles",
    "Coasts",
)
_SIDES = (
    "of the north",
    "of the south",
    "of the east",
    "of the west",
    "of the old days",
    "of the plain",
    "of the border",
    "of the valley",
)
_FILLERS = (
    "It often rains here in the {adjective} months.",
    "Travellers say that the roads are {adjective}.",
    "Nobody knows who built the {adjective} {thing}.",
    "In the evening one hears the {thing} from afar.",
    "The people here are known to be {adjective}.",
    "A {adjective} {thing} is kept in the town hall.",
    "Every year there is a feast of the {thing}.",
    "The oldest house has a {adjective} {thing}.",
)


_ASK_TITLE = ("What is the title of the document?", "What is the document called?", "What is the title?")
_ASK_SECTIONS = ("How many sections does the document have?", "How many sections are there?", "Count the sections.")
_ASK_SUMMARY = (
    "Summarise the document.",
    "Summarize the document.",
    "List the sections.",
    "What is the document about?",
    "Give me a summary.",
)
NOT_THERE = "The document does not say that."


@attrs.frozen
class Document:
    """A document and the questions about it."""

    title: str
    sections: tuple[str, ...]
    text: str
    facts: tuple[Turn, ...]
    """In the order of the text.  Each answer is a sentence of it."""

    @property
    def overview(self) -> tuple[Turn, ...]:
        """Questions about the whole document: title, number and names of sections, summary."""
        amount = len(self.sections)
        counted = f"{amount} section" + ("" if amount == 1 else "s")
        title, sections = f'The title is "{self.title}".', f"The document has {counted}."
        summary = f'"{self.title}" has {counted}: {", ".join(self.sections)}.'
        return (
            *(Turn(ask, title) for ask in _ASK_TITLE),
            *(Turn(ask, sections) for ask in _ASK_SECTIONS),
            *(Turn(ask, summary) for ask in _ASK_SUMMARY),
            *(
                Turn(f"What is section {at} called?", f"Section {at} is called {name}.")
                for at, name in enumerate(self.sections, 1)
            ),
        )


def _fact(rng: Random, place: str) -> tuple[str, Turn]:
    """A sentence about ``place``, and a question with the sentence as its answer."""
    kind = rng.randrange(4)
    if kind == 0:
        role, name = rng.choice(_ROLES), f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"
        sentence = f"The {role} of {place} is {name}."
        return sentence, Turn(f"Who is the {role} of {place}?", sentence)
    if kind == 1:
        what, amount = rng.choice(_COUNTED), rng.randint(2, 99)
        sentence = f"{place} has {amount} {what}."
        return sentence, Turn(f"How many {what} does {place} have?", sentence)
    if kind == 2:
        sentence = f"The people of {place} make {rng.choice(ADJECTIVES)} {rng.choice(_MADE)}."
        return sentence, Turn(f"What do the people of {place} make?", sentence)
    sight = rng.choice(_SIGHTS)
    sentence = f"The {sight} of {place} is {rng.choice(_PAINTS)}."
    return sentence, Turn(f"What colour is the {sight} of {place}?", sentence)


def _section_names(rng: Random, amount: int) -> tuple[str, ...]:
    names = [f"{topic} {side}" for topic in _TOPICS for side in _SIDES]
    return tuple(rng.sample(names, amount))


def make_document(seed: int, facts: int) -> Document:
    """A document with about ``facts`` facts, determined by the arguments.

    Has about ``13.5 * facts`` tokens: 300 facts are about 4,000 tokens.
    """
    rng = Random(f"document {seed} {facts}")
    places: dict[str, None] = {}
    while len(places) < max(1, facts * 2 // 3):
        places[made_up_place(rng)] = None
    sentences: dict[str, tuple[str, Turn]] = {}
    names = list(places)
    for at in range(facts):
        sentence, turn = _fact(rng, names[at] if at < len(names) else rng.choice(names))
        sentences.setdefault(turn.question, (sentence, turn))
    told = list(sentences.values())
    if rng.random() < 0.5:
        rng.shuffle(told)
    amount = min(max(1, facts // rng.randint(4, 12)), 24)
    titles = _section_names(rng, amount)
    kind = rng.choice(("The book of", "A guide to", "The land of", "Notes on", "A short history of"))
    title = f"{kind} {made_up_place(rng)}"
    lines = [f"# {title}"]
    for at, name in enumerate(titles):
        lines.append(f"\n## {at + 1}. {name}")
        part = told[len(told) * at // amount : len(told) * (at + 1) // amount]
        text = []
        for sentence, _ in part:
            text.append(sentence)
            if rng.random() < 0.25:
                text.append(rng.choice(_FILLERS).format(adjective=rng.choice(ADJECTIVES), thing=rng.choice(OBJECTS)))
        lines.append(" ".join(text))
    return Document(title, titles, "\n".join(lines), tuple(turn for _, turn in told))


_FRAMES = (
    "{document}\n\n{question}",
    "Read this document and answer the question.\n\n{document}\n\nQuestion: {question}",
    "Here is a document.\n\n{document}\n\n{question}",
    "{document}\n\nQuestion: {question}",
    "Read this:\n\n{document}\n\n{question}",
)


def ask(document: Document, question: str, frame: int = 0) -> str:
    """A prompt with the document and a question after it, in one of five phrasings."""
    return _FRAMES[frame].format(document=document.text, question=question)


def _question(rng: Random, document: Document) -> Turn:
    kind = rng.random()
    if kind < 0.65:
        return rng.choice(document.facts)
    if kind < 0.73:
        return missing(rng, document)
    overview = len(_ASK_TITLE + _ASK_SECTIONS + _ASK_SUMMARY)
    return rng.choice(document.overview[:overview] if kind < 0.90 else document.overview[overview:])


def missing(rng: Random, document: Document) -> Turn:
    """A question of the same form that the document does not answer."""
    known = {turn.question for turn in document.facts}
    while True:
        question = _fact(rng, made_up_place(rng))[1].question
        if question not in known:
            return Turn(question, NOT_THERE)


def document_chat(rng: Random, facts: int, questions: int) -> Sample:
    """A chat about a document: the document with the first question, then one question per turn."""
    document = make_document(rng.randrange(1 << 40), facts)
    asked = [_question(rng, document) for _ in range(questions)]
    asked[1:] = [attrs.evolve(turn, follows=True) if rng.random() < 0.9 else single(rng) for turn in asked[1:]]
    if rng.random() < 0.1:
        return Sample("document", (attrs.evolve(asked[0], follows=True), *asked[1:]), system=document.text)
    first = Turn(ask(document, asked[0].question, rng.randrange(len(_FRAMES))), asked[0].answer)
    return Sample("document", (first, *asked[1:]))
