"""What tools do: names, descriptions and parameters of tools, and what people say to have one called.

``KINDS`` is a catalogue; ``generic`` invents a kind.  Nothing here is trained on as it is: ``tools.py`` picks names,
descriptions and phrasings anew for each chat, so that the model has to read the schema.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import attrs

from uma_trio.training.skills.calendar import DAYS
from uma_trio.training.skills.capitals import COUNTRIES
from uma_trio.training.words import (
    ADJECTIVES,
    CITIES,
    FOODS,
    OBJECTS,
    VERBS,
    any_name,
    made_up,
    made_up_place,
    sentence,
)

Value = str | int | float | bool | list[str]
Schema = dict[str, object]


@attrs.frozen
class Slot:
    """A type of parameter: its JSON schema, and values of it."""

    schema: Schema
    value: Callable[[Random], Value]


@attrs.frozen
class Parameter:
    names: tuple[str, ...]
    about: tuple[str, ...]
    """Descriptions.  The schema has one of them, or none."""
    slot: Slot
    required: bool = True


@attrs.frozen
class Kind:
    """A kind of tool."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]
    """What people say.  ``{0}`` is the value of the first parameter.  What follows `` => `` are values that the text
    says in other words, such as ``1=true``."""
    several: bool = False
    """``{0}`` may also be two values, for two calls, and *And of {0}?* may follow."""
    returns: str = ""
    """Fields of what the tool returns; empty for anything."""
    skills: frozenset[str] = frozenset()
    """Skills of the model whose questions this tool answers, too."""


def _text(value: Callable[[Random], Value]) -> Slot:
    return Slot({"type": "string"}, value)


def _whole(low: int, high: int) -> Slot:
    return Slot({"type": "integer"}, lambda rng: rng.randint(low, high))


def _one_of(*values: str) -> Slot:
    return Slot({"type": "string", "enum": list(values)}, lambda rng: rng.choice(values))


def _decimal(rng: Random) -> Value:
    value = rng.randint(0, 9999) / rng.choice((10, 100))
    return rng.randint(0, 999) if value.is_integer() or rng.random() < 0.6 else value


def _city(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.6 else made_up_place(rng)


def _thing(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(OBJECTS)
    return f"{rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}" if kind < 0.7 else made_up(rng, rng.randint(1, 3))


def _path(rng: Random) -> str:
    stem = rng.choice(OBJECTS) if rng.random() < 0.6 else made_up(rng, 2)
    folder = rng.choice(("", "", "src/", "docs/", "/tmp/", f"{rng.choice(OBJECTS)}/"))
    return f"{folder}{stem}.{rng.choice(('txt', 'md', 'py', 'json', 'csv', 'log'))}"


def _command(rng: Random) -> str:
    return rng.choice(
        ("ls", "ls -l", "cat {}", "git status", "make {}", "pytest {}", "rm {}", "echo {}", "wc -l {}")
    ).format(_path(rng))


def _time(rng: Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.choice((0, 15, 30, 45, rng.randint(0, 59))):02}"


def _day(rng: Random) -> str:
    return (
        rng.choice(DAYS)
        if rng.random() < 0.5
        else f"20{rng.randint(20, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    )


def _email(rng: Random) -> str:
    return f"{any_name(rng).lower()}@{rng.choice(OBJECTS)}.{rng.choice(('com', 'org', 'net'))}"


CITY = _text(_city)
COUNTRY = _text(lambda rng: rng.choice(tuple(COUNTRIES)))
PERSON = _text(any_name)
THING = _text(_thing)
WORD = _text(lambda rng: rng.choice(OBJECTS) if rng.random() < 0.5 else made_up(rng, rng.randint(1, 3)))
WORDS = _text(lambda rng: sentence(rng, rng.randint(1, 8)))
ROOM = _text(
    lambda rng: rng.choice(
        ("kitchen", "bedroom", "hall", "bathroom", "office", "garage", "cellar", rng.choice(OBJECTS))
    )
)
CODE = _text(lambda rng: rng.choice(("EUR", "USD", "GBP", "JPY", "CHF", "SEK", "INR", "CAD")))
UNIT = _text(
    lambda rng: rng.choice(("metres", "feet", "miles", "km", "pounds", "kg", "grams", "litres", "inches", "cm"))
)
LANGUAGE = _text(
    lambda rng: rng.choice(("German", "French", "Spanish", "Italian", "Latin", "Polish", "Greek", "Swedish"))
)
NUMBER = Slot({"type": "number"}, _decimal)
SWITCH = Slot({"type": "boolean"}, lambda rng: rng.random() < 0.5)
TAGS = Slot({"type": "array", "items": {"type": "string"}}, lambda rng: rng.sample(OBJECTS, rng.randint(1, 3)))


def _p(names: str, about: str, slot: Slot, *, required: bool = True) -> Parameter:
    return Parameter(tuple(names.split()), tuple(about.split("|")), slot, required)


def _maybe(names: str, about: str, slot: Slot) -> Parameter:
    return _p(names, about, slot, required=False)


def _kind(
    names: str,
    about: str,
    parameters: tuple[Parameter, ...],
    asks: str,
    *,
    several: bool = False,
    returns: str = "",
    skills: str = "",
) -> Kind:
    return Kind(
        tuple(names.split()),
        tuple(about.split("|")),
        parameters,
        tuple(asks.strip().replace("\n", "|").split("|")),
        several,
        returns,
        frozenset(skills.split("|")) if skills else frozenset(),
    )


_CITY = _p("city location place town", "Name of the city|The city, e.g. Paris|City and country|Where", CITY)
_COUNTRY = _p("country name land nation", "Name of the country|The country, e.g. Italy|A country", COUNTRY)
_A = _p("a x first left num1", "First number|The first number|Left operand", NUMBER)
_B = _p("b y second right num2", "Second number|The second number|Right operand", NUMBER)
_PATH = _p("path file filename file_path", "Path of the file|The file|Name of the file", _text(_path))
_TIME = _p("time at when start", "When, as HH:MM|Time of day|The time", _text(_time))
_DAY = _p("day date on", "The day|A date or a weekday|Which day", _text(_day))
_MINUTES = _p("minutes duration length", "Minutes|How many minutes|Length in minutes", _whole(1, 120))
_ID = _p("id user_id number", "The id|Number of the record|Which one", _whole(1, 9999))

KINDS = (
    _kind("get_weather weather get_current_weather current_weather weather_in", "Get the current weather in a city.|Current weather of a place.|Look up the weather.|Get current temperature for a given location.",
        (_CITY, _maybe("unit units scale", "Unit of the temperature|celsius or fahrenheit", _one_of("celsius", "fahrenheit"))), """
What is the weather in {0}?|What's the weather like in {0}?|How is the weather in {0}?|What is the weather in {0} today?
What's the weather in {0}?|Tell me the weather in {0}.|How warm is it in {0}?|Is it raining in {0}?|Weather in {0}?
What is the weather in {0} in {1}?|How is the weather in {0} right now?|What is the temperature in {0}?
What is the weather like in {0} today?|Get the weather in {0}.|What is the temperature in {0} in {1}?""",
        several=True, returns="temperature sky humidity", skills="unknown"),
    _kind("get_forecast forecast weather_forecast", "Forecast of the weather.|Get the weather forecast for some days.", (_CITY, _p("days n_days count", "Number of days|How many days", _whole(2, 14))), """
What is the forecast for {0} for the next {1} days?|Forecast for {0}, {1} days.|How will the weather be in {0} in the next {1} days?""",
        returns="low high sky", skills="unknown"),
    _kind("add sum plus add_numbers", "Add two numbers.|Sum of two numbers.|Adds a and b.", (_A, _B), """
What is {0} + {1}?|What is {0} plus {1}?|Add {0} and {1}.|How much is {0} + {1}?|Sum {0} and {1}.|Calculate {0} + {1}.|{0} + {1}""",
        returns="sum", skills="adding|unknown"),
    _kind("subtract minus difference", "Subtract two numbers.|Difference of two numbers.", (_A, _B), """
What is {0} - {1}?|What is {0} minus {1}?|How much is {0} - {1}?|Calculate {0} - {1}.|{0} - {1}""",
        returns="difference", skills="subtracting|unknown"),
    _kind("multiply times product", "Multiply two numbers.|Product of two numbers.", (_A, _B), """
What is {0} x {1}?|What is {0} * {1}?|What is {0} times {1}?|Multiply {0} by {1}.|Multiply {0} and {1}.|{0} * {1}""",
        returns="product", skills="multiplying|unknown"),
    _kind("divide quotient ratio", "Divide two numbers.|Quotient of two numbers.", (_A, _B), """
What is {0} / {1}?|What is {0} divided by {1}?|Divide {0} by {1}.|{0} / {1}""",
        returns="quotient", skills="unknown"),
    _kind("calculate calculator evaluate", "Evaluate an expression.|A calculator.", (_p("expression formula input", "The expression|What to calculate", _text(lambda rng: f"{rng.randint(1, 99)} {rng.choice('+-*/')} {rng.randint(1, 999)}")),), """
Calculate {0}.|What is {0}?|Evaluate {0}.|How much is {0}?|Compute {0}.""",
        returns="value", skills="adding|subtracting|multiplying|unknown"),
    _kind("convert_currency convert exchange currency_converter", "Convert money to another currency.|Exchange an amount of money.", (
        _p("amount value sum", "How much|The amount of money", NUMBER), _p("from_currency source currency", "Currency to convert from|From which currency", CODE), _p("to_currency target into", "Currency to convert to|To which currency", CODE)), """
Convert {0} {1} to {2}.|How much is {0} {1} in {2}?|What is {0} {1} in {2}?|Change {0} {1} into {2}.""", returns="amount rate", skills="unknown"),
    _kind("convert_units convert unit_converter", "Convert a value to another unit.|Unit conversion.", (
        _p("value amount number", "What to convert|The number", NUMBER), _p("from_unit source unit", "Unit of the value|From which unit", UNIT), _p("to_unit target into", "Unit to convert to|To which unit", UNIT)), """
Convert {0} {1} to {2}.|How many {2} are {0} {1}?|What is {0} {1} in {2}?""", returns="value", skills="unknown"),
    _kind("search web_search search_web find", "Search the web.|Search for something.|Find pages about something.", (
        _p("query q text terms", "What to search for|The search terms|Query", _text(lambda rng: sentence(rng, rng.randint(1, 4)) if rng.random() < 0.5 else _thing(rng))), _maybe("limit max_results count", "Most results|How many results", _whole(1, 50))), """
Search for {0}.|Search the web for {0}.|Look for {0} on the web.|Find pages about {0}.|Google {0}.|Search for "{0}".|Find {1} pages about {0}.""", returns="title hits"),
    _kind("set_timer timer start_timer", "Start a timer.|Set a timer for some minutes.", (_MINUTES, _maybe("label name title", "Name of the timer|What it is for", WORD)), """
Set a timer for {0} minutes.|Start a timer of {0} minutes.|Timer for {0} minutes.|Set a {0} minute timer.|Set a timer for {0} minutes called {1}.""", returns="status"),
    _kind("set_alarm alarm wake_up", "Set an alarm.|Wake the user.", (_TIME,), "Wake me at {0}.|Set an alarm for {0}.|Alarm at {0}.|Wake me up at {0}.", returns="status"),
    _kind("send_message message text send_text", "Send a message to somebody.|Send a text message.", (_p("to recipient name contact", "Who gets it|The recipient", PERSON), _p("text message body content", "The text|What to say", WORDS)), """
Send {0} the message: {1}|Send a message to {0}: {1}|Tell {0}: {1}|Message {0}: {1}|Write to {0}: "{1}"|Send "{1}" to {0}.|Text {0}: {1}""", returns="status id"),
    _kind("send_email email mail", "Send an email.|Write an email to an address.", (_p("to address recipient", "Address|Who gets it", _text(_email)), _p("subject title", "Subject|The subject line", WORDS), _p("body text content", "The text|What it says", WORDS)), """
Send an email to {0} with the subject "{1}" and the text "{2}".|Email {0}, subject "{1}": {2}|Mail {0} about "{1}": {2}""", returns="status id", skills="unknown"),
    _kind("get_capital capital lookup_capital capital_of", "Get the capital of a country.|Look up a capital.", (_COUNTRY,), """
What is the capital of {0}?|What's the capital of {0}?|Name the capital of {0}.|Which city is the capital of {0}?|Capital of {0}?""", several=True, returns="capital", skills="capitals|unknown"),
    _kind("get_population population count_people", "Number of people in a country.|Get the population of a country.", (_COUNTRY,), """
What is the population of {0}?|How many people live in {0}?|Population of {0}?""", several=True, returns="population year", skills="unknown"),
    _kind("get_time time_in current_time clock", "Get the time in a city.|Local time of a place.", (_CITY,), """
What time is it in {0}?|What is the time in {0}?|Tell me the time in {0}.|How late is it in {0}?""", several=True, returns="time", skills="unknown"),
    _kind("get_date today current_date", "Get today's date.|Which day it is.", (), "What is today's date?|What day is it today?|Which day is it?|What is the date?", returns="date", skills="unknown|calendar"),
    _kind("get_status status health", "Status of the system.|Whether everything works.", (), "What is the status?|Is everything all right?|Show the status.|How is the system?", returns="status uptime", skills="unknown|greetings"),
    _kind("list_users users get_users", "List all users.|Names of the users.", (), "List all users.|Who are the users?|Show me the users.|Which users are there?", returns="list", skills="unknown"),
    _kind("translate translation translate_text", "Translate a text.|Translate into another language.", (_p("text phrase input", "The text|What to translate", WORDS), _p("language target to", "Language to translate to|Into which language", LANGUAGE)), """
Translate "{0}" into {1}.|Translate "{0}" to {1}.|How do you say "{0}" in {1}?|What is "{0}" in {1}?""", returns="text", skills="unknown"),
    _kind("play_music play play_song", "Play music.|Play a song.", (_p("song title music query", "The song|What to play", THING), _maybe("volume level", "Volume in percent|How loud", _whole(1, 100))), """
Play {0}.|Play the song {0}.|Put on {0}.|I want to hear {0}.|Play {0} at volume {1}.""", returns="status"),
    _kind("set_light switch_light light", "Switch a light on or off.|Control a light.", (_p("room where place", "The room|In which room", ROOM), _p("on state enabled", "Whether it is on|true switches it on", SWITCH)), """
Turn on the light in the {0}. => 1=true|Turn off the light in the {0}. => 1=false|Switch the light in the {0} on. => 1=true|Switch the light in the {0} off. => 1=false
Lights on in the {0}. => 1=true|Lights off in the {0}. => 1=false|Make it dark in the {0}. => 1=false""", returns="status"),
    _kind("set_temperature thermostat heat", "Set the temperature of a room.|Control the heating.", (_p("room where place", "The room|In which room", ROOM), _p("degrees temperature value", "Temperature|How warm", NUMBER)), """
Set the {0} to {1} degrees.|Make it {1} degrees in the {0}.|Heat the {0} to {1} degrees.""", returns="status temperature"),
    _kind("create_event add_event schedule_meeting", "Add an event to the calendar.|Schedule something.", (_p("title name what", "Name of the event|What it is", THING), _DAY, _TIME), """
Put {0} in my calendar on {1} at {2}.|Schedule {0} on {1} at {2}.|Add an event: {0}, {1}, {2}.""", returns="status id"),
    _kind("remind reminder set_reminder", "Remind the user of something.|Set a reminder.", (_p("text what task", "What to remember|The task", _text(lambda rng: f"{rng.choice(VERBS)} the {rng.choice(OBJECTS)}")), _TIME), """
Remind me to {0} at {1}.|At {1}, remind me to {0}.|Reminder: {0} at {1}.""", returns="status"),
    _kind("get_stock_price stock_price quote", "Price of a stock.|Get the price of a share.", (_p("symbol ticker stock", "Symbol of the stock|The ticker", _text(lambda rng: "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.randint(2, 4))))),), """
What is the price of {0}?|How much is a share of {0}?|Price of {0}?|What does {0} cost?""", several=True, returns="price currency"),
    _kind("read_file open_file cat Read", "Read a file.|Get the content of a file.", (_PATH,), "Read {0}.|Read the file {0}.|Show me {0}.|What is in {0}?|Open {0}.|What does the file {0} say?", several=True, returns="text", skills="unknown"),
    _kind("write_file save_file create_file Write", "Write a file.|Save text to a file.", (_PATH, _p("content text data", "The content|What to write", WORDS)), """
Write "{1}" to {0}.|Save "{1}" in the file {0}.|Create the file {0} with the text "{1}".""", returns="status bytes"),
    _kind("list_files ls list_directory", "List the files of a folder.|What is in a folder.", (_p("folder path directory", "The folder|Which folder", _text(lambda rng: rng.choice(("src", "docs", "/tmp", ".", f"{rng.choice(OBJECTS)}", f"/home/{made_up(rng, 2)}")))), _maybe("recursive deep all", "With folders inside|Whether to go deeper", SWITCH)), """
List the files in {0}.|Which files are in {0}?|Show the folder {0}.|What files are in {0}?""", returns="list", skills="unknown"),
    _kind("run_command shell bash execute Bash", "Run a command in a shell.|Execute a shell command.", (_p("command cmd line", "The command|What to run", _text(_command)),), """
Run: {0}|Run `{0}`.|Execute: {0}|Run the command {0}|Please run "{0}".""", returns="text"),
    _kind("book_table reserve_table reservation", "Book a table in a restaurant.|Reserve a table.", (_p("restaurant name place", "The restaurant|Where", _text(lambda rng: f"The {rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}".title())), _p("people guests size", "Number of people|How many guests", _whole(1, 12)), _TIME), """
Book a table for {1} at {0} at {2}.|Reserve a table at {0} for {1} people at {2}.|A table for {1} at {0}, {2}, please.""", returns="status id"),
    _kind("get_route directions route", "Find a route.|Directions between two places.", (_p("origin start from_place", "Where it begins|Start", CITY), _p("destination end to_place", "Where it ends|Goal", CITY), _maybe("mode by vehicle", "How to travel|Means of travel", _one_of("car", "train", "bike", "foot"))), """
How do I get from {0} to {1}?|Route from {0} to {1}.|Directions from {0} to {1}.|How do I get from {0} to {1} by {2}?|How far is it from {0} to {1}?""", returns="km minutes", skills="unknown"),
    _kind("find_flights search_flights flights", "Search for flights.|Find flights between cities.", (_p("origin from_city departure", "City of departure|From where", CITY), _p("destination to_city arrival", "City of arrival|To where", CITY), _DAY), """
Find flights from {0} to {1} on {2}.|I want to fly from {0} to {1} on {2}.|Flights from {0} to {1}, {2}.""", returns="price flight"),
    _kind("order_item order buy", "Order something.|Buy a product.", (_p("item product what", "The product|What to order", _text(lambda rng: rng.choice(FOODS) if rng.random() < 0.5 else _thing(rng))), _p("quantity amount count", "How many|Number of pieces", _whole(1, 99))), """
Order {1} {0}.|Order {1} x {0}.|Buy {1} {0}.|I would like {1} {0}.""", returns="status price"),
    _kind("get_user user_info lookup_user", "Get a user by number.|Data of a user.", (_ID,), "Show user {0}.|Who is user {0}?|Get user {0}.|Look up the user {0}.", several=True, returns="name city age", skills="unknown"),
    _kind("delete_record remove delete", "Delete a record.|Remove a record by number.", (_ID,), "Delete record {0}.|Remove record {0}.|Delete number {0}.", returns="status"),
    _kind("add_to_list add_item put_on_list", "Put something on a list.|Add an item to a list.", (_p("item entry what", "The item|What to add", THING), _maybe("list list_name name", "Which list|The list", _one_of("shopping", "todo", "packing"))), """
Put {0} on the {1} list.|Add {0} to my {1} list.|Put {0} on my list.|Add {0} to the list.""", returns="status count", skills="unknown"),
    _kind("define dictionary lookup_word", "Explain a word.|Look up a word in a dictionary.", (_p("word term", "The word|What to look up", WORD),), """
Define {0}.|Look up the word {0}.|What does the word {0} mean?|Definition of {0}?""", several=True, returns="text", skills="unknown"),
    _kind("roll_dice random_number random", "A random number.|Pick a number at random.", (_p("low minimum from_number", "Smallest number|Lower bound", _whole(0, 50)), _p("high maximum to_number", "Largest number|Upper bound", _whole(51, 999))), """
Pick a number between {0} and {1}.|A random number from {0} to {1}.|Give me a number from {0} to {1}.""", returns="number", skills="unknown"),
    _kind("get_recipe recipe find_recipe", "Find a recipe.|How to cook something.", (_p("dish food name", "The dish|What to cook", _text(lambda rng: rng.choice(FOODS))), _maybe("vegetarian vegan", "Without meat|Whether it is without meat", SWITCH)), """
How do I cook {0}?|Find a recipe for {0}.|Give me a recipe for {0}.|Recipe for {0}?""", returns="title minutes", skills="unknown"),
    _kind("get_news news headlines", "News about a topic.|Get headlines.", (_p("topic subject about", "The topic|About what", THING),), "What is the news about {0}?|News about {0}?|Get the news about {0}.|Is there news about {0}?", several=True, returns="list", skills="unknown"),
    _kind("tag_photo add_tags tag", "Put tags on a photo.|Tag a picture.", (_p("photo id picture", "Number of the photo|Which photo", _whole(1, 999)), _p("tags labels words", "The tags|Words to add", TAGS)), """
Tag photo {0} with {1}.|Put the tags {1} on photo {0}.|Tag photo {0}: {1}""", returns="status"),
)  # fmt: skip

_FIELDS = "size colour count level name mode speed amount weight height width depth age price user color title key index limit offset priority label style volume rate owner note type value"
_MORE_VERBS = (
    "check close copy create delete inspect lock measure move print rename reset rotate scan start stop test update"
)
_VERBS = (
    *(verb for verb in VERBS if verb not in ("count", "find", "play", "read", "send", "write")),
    *_MORE_VERBS.split(),
)
_LOOKED_UP = tuple(
    field for field in _FIELDS.split() if field not in ("colour", "color", "price")
)  # others ask so, too
_GENERIC_SLOTS = (WORD, WORD, THING, WORDS, PERSON, CITY, _whole(0, 999), _whole(0, 99), NUMBER, SWITCH, TAGS)


def generic(rng: Random) -> Kind:
    """A made-up kind, of two parts: a verb or ``get``, and a noun."""
    return _getter(rng) if rng.random() < 0.3 else _doer(rng)


def _getter(rng: Random) -> Kind:
    """Looks a value up: the size of a lamp, the owner of a road."""
    noun = rng.choice((*_LOOKED_UP, *OBJECTS))
    of = rng.choice(
        (*["item", "thing", "object", "name", "user", "city", "room", "product", "id", "key"], made_up(rng, 2))
    )
    slot = rng.choice((THING, PERSON, CITY, WORD))
    return Kind(
        tuple(f"{verb}_{noun}" for verb in ("get", "lookup", "fetch", "find")),
        (f"Get the {noun} of a {of}.", f"Look up the {noun}.", f"Returns the {noun} of a given {of}."),
        (Parameter((of,), (f"The {of}", f"Which {of}", f"Name of the {of}"), slot),),
        (
            *(f"What is the {noun} {link} {{0}}?" for link in ("of", "of", "in", "for")),
            *(f"{start} the {noun} of {{0}}." for start in ("Get", "Find", "Look up", "Tell me", "Show me")),
            f"{noun.capitalize()} of {{0}}?",
        ),
        several=True,
        returns=noun,
        skills=frozenset(("unknown",)),
    )


def _doer(rng: Random) -> Kind:
    """Does something: a verb, a noun and up to four parameters."""
    verb, noun = rng.choice(_VERBS), rng.choice(OBJECTS) if rng.random() < 0.85 else made_up(rng, 2)
    names: dict[str, None] = {}
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        names[_field_name(rng)] = None
    parameters = []
    for name in names:
        slot = rng.choice(_GENERIC_SLOTS)
        if rng.random() < 0.12:
            slot = _one_of(*dict.fromkeys(rng.choice(ADJECTIVES) for _ in range(rng.randint(2, 5))))
        about = (f"The {name} of the {noun}", f"{name.replace('_', ' ').capitalize()}", f"Which {name}")
        parameters.append(Parameter((name,), about, slot, required=rng.random() < 0.75))
    does, once = f"{verb} the {noun}", f"{verb.capitalize()} {'an' if noun[0] in 'aeiou' else 'a'} {noun}."
    return Kind(
        (f"{verb}_{noun}",),
        (f"{does.capitalize()}.", once, f"Can {verb} {noun}s."),
        tuple(parameters),
        (f"{does.capitalize()}.", once, f"Please {does}.", f"Can you {does}?", f"I want to {does}."),
    )


def _field_name(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(_FIELDS.split())
    if kind < 0.8:
        return f"{rng.choice(OBJECTS)}_{rng.choice(_FIELDS.split())}" if kind < 0.65 else rng.choice(OBJECTS)
    return made_up(rng, rng.randint(1, 3))
