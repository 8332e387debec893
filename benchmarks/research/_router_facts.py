"""Facts hidden in texts, and later questions about them, to train routers.

Ordinary text rarely refers to one number that stood a thousand tokens before, so a
router trained on it alone does not learn to find such a number. The wording differs
from the pass-key prompts (``_pass_key.py``), which stay unseen.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import accumulate, product

_OWNERS = (
    "Maria Chen",
    "the north gate",
    "Dr. Okafor",
    "pump station B",
    "the harbour office",
    "Tomasz",
    "the blue cabinet",
    "flight crew two",
    "the night shift",
    "Priya Raman",
    "laboratory four",
    "the old library",
    "Henrik",
    "the spare generator",
    "the Lisbon branch",
    "Aunt Rosalind",
    "the test server",
    "Captain Idris",
    "the west tunnel",
    "warehouse nine",
)
_THINGS = (
    "locker number",
    "door code",
    "serial number",
    "telephone extension",
    "invoice number",
    "badge number",
    "account number",
    "parking spot",
    "radio frequency",
    "backup phrase",
    "call sign",
    "licence plate",
    "inventory tag",
    "ticket number",
    "meter reading",
)
_WORDS = (
    "amber",
    "candle",
    "falcon",
    "granite",
    "harvest",
    "indigo",
    "juniper",
    "kettle",
    "lantern",
    "marble",
    "nutmeg",
    "orchid",
    "pebble",
    "quartz",
    "raven",
    "saffron",
    "timber",
    "umbrella",
    "velvet",
    "walnut",
    "zephyr",
)
_STATEMENTS = (
    "The {thing} of {owner} is {value}.",
    "Note: {value} is the {thing} of {owner}.",
    "For {owner}, the {thing} was set to {value}.",
    "{owner}: {thing} {value}.",
    "By the way, the {thing} that belongs to {owner} is {value}; please keep it.",
    "The {thing} of {owner} is {value}. Again, {value}.",
    "It was written on the wall: {thing} of {owner} = {value}.",
    "Somebody changed the {thing} of {owner} last week, and now it is {value}.",
)
# tokens of a question, and of an answer
_QUESTIONS = (
    "What is the {thing} of {owner}?",
    "Which {thing} does {owner} have?",
    "Tell me the {thing} of {owner}.",
    "And the {thing} of {owner}?",
    "Do you know the {thing} that belongs to {owner}? Only the answer, please.",
    "{owner} - {thing}?",
    "According to the text, what is the {thing} for {owner}?",
)
_ANSWERS = (
    "{value}",
    "{value}",
    "{value}.",
    "The {thing} of {owner} is {value}.",
    "It is {value}.",
    "{owner} has the {thing} {value}.",
)
# layouts of a question and its answer
TALK = "Question: {question}\nAnswer: {answer}\n"


@dataclass(frozen=True, slots=True)
class Fact:
    """``thing`` of ``owner`` is ``value``."""

    owner: str
    thing: str
    value: str

    def said(self, wordings: tuple[str, ...], draw: random.Random) -> str:
        wording = draw.choice(wordings)
        text = wording.format(owner=self.owner, thing=self.thing, value=self.value)
        return text if wording.startswith("{value}") else text[0].upper() + text[1:]


def examined(
    text: str, draw: random.Random, reach: int, questions: int, turn: str
) -> str:
    """``text`` with facts in it, followed by questions about them and answers.

    Args:
        text: the text.
        draw: random generator.
        reach: facts lie within this number of last characters of the text, at roughly
            even distances.
        questions: number of questions; there are 1.5 times as many facts.
        turn: layout with ``{question}`` and ``{answer}``.
    """
    subjects = draw.sample(list(product(_OWNERS, _THINGS)), questions * 3 // 2)
    facts = [Fact(owner, thing, _value(draw)) for owner, thing in subjects]
    pieces = _pieces(text, 200)
    ends = list(accumulate(map(len, pieces)))
    near = [n for n, end in enumerate(ends) if end >= ends[-1] - reach]
    notes = [list[str]() for _ in pieces]
    for fact in facts:
        notes[draw.choice(near)].append(f" {fact.said(_STATEMENTS, draw)} ")
    woven = "".join(p + "".join(more) for p, more in zip(pieces, notes, strict=True))
    questioned = (
        turn.format(
            question=fact.said(_QUESTIONS, draw), answer=fact.said(_ANSWERS, draw)
        )
        for fact in draw.sample(facts, questions)
    )
    return "".join([woven, "\n\n", *questioned])


def _pieces(text: str, least: int) -> list[str]:
    """Split ``text`` after sentences and lines into pieces of at least ``least``
    characters.
    """
    pieces, begun = list[str](), ""
    for part in re.split(r"(?<=[.!?\n])(?=\s)", text):
        begun += part
        if len(begun) >= least:
            pieces.append(begun)
            begun = ""
    return [*pieces, begun]


def _value(draw: random.Random) -> str:
    """A number, a code or words; usually a number."""
    digits = "".join(draw.choices("0123456789", k=draw.randint(3, 8)))
    letters = "".join(draw.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=3))
    words = draw.sample(_WORDS, 2)
    code = f"{letters}-{digits[:4]}"
    return draw.choice((digits, digits, code, " ".join(words), words[0]))
