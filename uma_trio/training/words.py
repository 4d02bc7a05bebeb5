"""Word lists of the corpus, and generators of made-up words.

All lists were written for this project.  They are strings split at spaces; ``_`` stands for a space inside an entry.
"""

from __future__ import annotations

from random import Random


def _cut(text: str) -> tuple[str, ...]:
    return tuple(word.replace("_", " ") for word in text.split())


COMMON = _cut("""
the a an of to in is was are were be been it that this these those he she they we you I and or but not no if then when
while because so as at by for from with without into onto over under about after before between through during against
among around behind below his her their our your my its me him them us who whom which what where why how all any both
each few more most other some such only own same than too very can could will would shall should may might must do
does did done have has had go goes went gone come came get got give gave take took make made know knew think thought
see saw look want need feel try leave call ask answer tell told say said work seem help show play move live believe
bring happen write sit stand lose pay meet include continue set learn change lead understand follow stop create speak
allow add spend walk win offer remember love consider appear buy wait serve die send expect stay fall cut reach kill
remain good bad great little long short high low right left next last first second third one two three four five
people man woman child world life hand part place case week company system program question government point home room
mother area money story fact month lot study book eye job word business issue side kind head friend father power hour
game line end member law car team minute idea body information back parent face others level office door health person
art war history party result morning reason research girl guy moment air force education also again always never often
here there now today yesterday soon still quick brown fox jumps lazy dog please really maybe instead everything
nothing something anything universe engine instructions
""")
"""Everyday words.  The model also sees them in orders that make no question."""

NAMES = _cut("""
Mia Tom Ada Leo Zoe Max Eva Sam Ida Ben Nina Otto Lena Hugo Emma Noah Anna Paul Clara Felix Rosa Oscar Maya Finn Ella
Jonas Ruth Karl Lily Mark Nora Peter Olga Simon Tara Victor Wanda Yusuf Amir Bella Chen Dora Erik Fatima Greta Hana
Ivan Julia Kofi Lucia Marta Nico Priya Quinn Rafael Sara Tariq Uma Vera Walter Ximena Yara Zain Alice Bruno Carla
David Elena Frank Grace Henry Irene Jack Kim Liam Mona Nils Olivia Pablo Rita Stefan Theo Una Viola Wim Agnes Boris
Celia Dario Esther
""")
"""First names, for stories, records and chats."""

SURNAMES = _cut("""
Quist Baker Moreno Lindt Okafor Tanaka Berg Castle Dunn Ek Farrow Grant Holm Ito Jansen Kaur Lund Marsh Novak Ortiz
Park Reed Silva Thorn Ueda Vance Wolf Young Zeller Abbott Brandt Cole Dietrich
""")

OBJECTS = _cut("""
apple river stone lamp table window garden bridge mountain paper candle basket bottle button carpet castle chair clock
cloud coat coin corner cup desk door drum engine feather fence field finger flower forest fork glass glove guitar
hammer harbour hat heart hill house island jacket kettle key kitchen knife ladder lake leaf letter library market
meadow mirror moon morning music nail needle nest ocean orange pencil piano picture pillow pipe plate pocket pond
potato queen rabbit radio rain ring road rocket roof rope salt sand school shadow ship shoe shoulder silver snow soap
sock song spoon spring square star station storm street sugar summer sun sword teacher tent thread thunder ticket
tiger tower train tree tunnel umbrella valley village violin wagon wall water wheel whistle wind winter wood yard year
banana bread butter cheese cherry honey lemon melon onion pepper tomato camera computer keyboard machine network
planet printer signal socket battery cable circuit
""")

ADJECTIVES = _cut("""
old new small big quiet loud happy sad bright dark green red blue warm cold soft hard quick slow heavy light clean
dusty round flat sharp dull sweet sour strange common lucky brave gentle proud silver golden wooden broken empty full
hidden distant narrow wide young wild calm early late
""")

VERBS = _cut("""
build carry catch climb cook count draw drive find fix fold grow hold keep kick lift make mend open paint plant play
pull push read repair ride sell send sew sing throw turn visit wash watch write
""")

FOODS = _cut("tea coffee bread soup cheese apples honey rice pasta plums nuts cake salad fish beans pears jam figs")

CITIES = _cut("""
Paris Rome Berlin Oslo Madrid Lisbon Vienna Athens Cairo Lima Tokyo Delhi Dublin Prague Warsaw Helsinki Boston Chicago
Sydney Toronto Geneva Hamburg Milan Seville Porto Lyon Kyoto Mumbai Bergen
""")

UNICODE_WORDS = _cut("""
grüße naïve café smørrebrød Zürich jalapeño façade über Ångström piñata fjörd señor crème brûlée élan Łódź žena čaj
ďábel ğül şeker ıslak œuvre coração São Köln Straße Привет мир дом вода чай Καλημέρα θάλασσα φως 日本 東京 水 山 你好
世界 안녕 שלום سلام नमस्ते 😀 🚀 🌍 🎉 🐱 🍕 ❤ ☕ ✓ → € £ ½ ²
""")

ACCENTED = (
    "äöüßéèêáàâíìîóòôúùûñçøåæœšžčřěłńğışőűабвгдежзиклмнопрстуфцчшыюяαβγδεζηθλμνξπρσφψωあいうえおかきくけ"
    "こ山水火木金土日月田力"
)
EMOJI = "😀😁😂😊😍😎😢😡👍👏🙏🚀🌍🌞🌈🎉🎁🎈🐱🐶🦊🐻🐸🐢🍎🍌🍕🍰☕🌻🌲🌊🔥⭐❤💡🔑📦📚✅❌➕"

_ONSETS = _cut("b br c ch cl d dr f fl g gl gr h j k kl l m n p pl pr qu r s sh sk sl sp st t tr v w y z")
_VOWELS = _cut("a e i o u a e i o u ai ea ee oa oo ou")
_CODAS = ("", "", "", "", *_cut("b d g k l ll m n nd ng nt p r rd rk rn s st t th x"))
_ENDINGS = _cut("holm ford burg ville ton mere wick stad dale gate port moor field haven fell borg")


def made_up(rng: Random, syllables: int) -> str:
    """A pronounceable lower-case word that is almost never in a list above."""
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def made_up_place(rng: Random) -> str:
    """A capitalized place name such as ``Drelholm``."""
    stem = rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
    if rng.random() < 0.5:
        stem += rng.choice(_ONSETS) + rng.choice(_VOWELS)
    return (stem + rng.choice(_ENDINGS)).capitalize()


def accented(rng: Random) -> str:
    """A word with letters beyond ASCII, or emoji.  Each such character is several tokens."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(UNICODE_WORDS)
    if kind < 0.5:
        return "".join(rng.choices(EMOJI, k=rng.randint(1, 3)))
    letters = list(made_up(rng, rng.randint(1, 3)))
    for _ in range(rng.randint(1, 3)):
        letters[rng.randrange(len(letters))] = rng.choice(ACCENTED)
    return "".join(letters)


def any_name(rng: Random) -> str:
    """A first name.  Every third is made up, so the model learns to copy names."""
    return rng.choice(NAMES) if rng.random() < 0.65 else made_up(rng, rng.randint(1, 3)).capitalize()


def sentence(rng: Random, amount: int) -> str:
    """Everyday words in random order."""
    pools = (COMMON, COMMON, COMMON, OBJECTS, ADJECTIVES, VERBS)
    return " ".join(rng.choice(rng.choice(pools)) for _ in range(amount))


def any_word(rng: Random) -> str:
    """A word of any kind, mostly plain."""
    kind = rng.random()
    if kind < 0.20:
        return rng.choice(COMMON)
    if kind < 0.45:
        return rng.choice(OBJECTS)
    if kind < 0.55:
        return rng.choice(ADJECTIVES)
    if kind < 0.60:
        return rng.choice(NAMES)
    if kind < 0.65:
        return str(rng.randint(0, 999))
    if kind < 0.90:
        return made_up(rng, rng.randint(1, 4))
    return accented(rng)
