"""Countries, capitals and continents."""

from __future__ import annotations

from random import Random

from uma_trio.training.sample import Turn, in_passing
from uma_trio.training.words import ADJECTIVES, NAMES, OBJECTS, made_up, made_up_place

_TABLE = """
Europe: France Paris, Italy Rome, Germany Berlin, Spain Madrid, Portugal Lisbon, Austria Vienna, Greece Athens,
 Norway Oslo, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen, Iceland Reykjavik, Ireland Dublin,
 the_United_Kingdom London, Belgium Brussels, the_Netherlands Amsterdam, Luxembourg Luxembourg, Switzerland Bern,
 Poland Warsaw, Czechia Prague, Slovakia Bratislava, Hungary Budapest, Romania Bucharest, Bulgaria Sofia,
 Serbia Belgrade, Croatia Zagreb, Slovenia Ljubljana, Albania Tirana, Estonia Tallinn, Latvia Riga, Lithuania Vilnius,
 Ukraine Kyiv, Belarus Minsk, Moldova Chisinau, Malta Valletta, Monaco Monaco, Andorra Andorra_la_Vella,
 San_Marino San_Marino, Liechtenstein Vaduz, Montenegro Podgorica, North_Macedonia Skopje, Kosovo Pristina,
 Bosnia_and_Herzegovina Sarajevo, Russia Moscow, Cyprus Nicosia
Asia: Japan Tokyo, China Beijing, India New_Delhi, Thailand Bangkok, Vietnam Hanoi, South_Korea Seoul,
 North_Korea Pyongyang, Mongolia Ulaanbaatar, Nepal Kathmandu, Bhutan Thimphu, Bangladesh Dhaka, Pakistan Islamabad,
 Afghanistan Kabul, Iran Tehran, Iraq Baghdad, Syria Damascus, Lebanon Beirut, Jordan Amman, Saudi_Arabia Riyadh,
 Yemen Sanaa, Oman Muscat, Qatar Doha, Bahrain Manama, Kuwait Kuwait_City, Turkey Ankara, Armenia Yerevan,
 Georgia Tbilisi, Azerbaijan Baku, Kazakhstan Astana, Uzbekistan Tashkent, Turkmenistan Ashgabat, Kyrgyzstan Bishkek,
 Tajikistan Dushanbe, Myanmar Naypyidaw, Laos Vientiane, Cambodia Phnom_Penh, Malaysia Kuala_Lumpur,
 Singapore Singapore, Indonesia Jakarta, the_Philippines Manila, Brunei Bandar_Seri_Begawan, the_Maldives Male,
 the_United_Arab_Emirates Abu_Dhabi, East_Timor Dili, Taiwan Taipei
Africa: Egypt Cairo, Libya Tripoli, Tunisia Tunis, Algeria Algiers, Morocco Rabat, Sudan Khartoum, South_Sudan Juba,
 Ethiopia Addis_Ababa, Eritrea Asmara, Somalia Mogadishu, Djibouti Djibouti, Kenya Nairobi, Uganda Kampala,
 Tanzania Dodoma, Rwanda Kigali, Burundi Gitega, Malawi Lilongwe, Zambia Lusaka, Zimbabwe Harare, Mozambique Maputo,
 Madagascar Antananarivo, Mauritius Port_Louis, the_Seychelles Victoria, Botswana Gaborone, Namibia Windhoek,
 South_Africa Pretoria, Lesotho Maseru, Eswatini Mbabane, Angola Luanda, Gabon Libreville, Cameroon Yaounde,
 Nigeria Abuja, Niger Niamey, Chad N'Djamena, Mali Bamako, Burkina_Faso Ouagadougou, Ghana Accra, Togo Lome,
 Benin Porto-Novo, the_Ivory_Coast Yamoussoukro, Liberia Monrovia, Sierra_Leone Freetown, Guinea Conakry,
 Guinea-Bissau Bissau, the_Gambia Banjul, Senegal Dakar, Mauritania Nouakchott, Cape_Verde Praia,
 the_Central_African_Republic Bangui, the_Comoros Moroni, Equatorial_Guinea Malabo
North_America: Canada Ottawa, the_United_States Washington, Mexico Mexico_City, Guatemala Guatemala_City,
 Belize Belmopan, Honduras Tegucigalpa, El_Salvador San_Salvador, Nicaragua Managua, Costa_Rica San_Jose,
 Panama Panama_City, Cuba Havana, Jamaica Kingston, Haiti Port-au-Prince, the_Dominican_Republic Santo_Domingo,
 the_Bahamas Nassau, Barbados Bridgetown, Trinidad_and_Tobago Port_of_Spain, Grenada Saint_George's, Dominica Roseau
South_America: Brazil Brasilia, Argentina Buenos_Aires, Chile Santiago, Peru Lima, Colombia Bogota, Venezuela Caracas,
 Ecuador Quito, Bolivia Sucre, Paraguay Asuncion, Uruguay Montevideo, Guyana Georgetown, Suriname Paramaribo
Oceania: Australia Canberra, New_Zealand Wellington, Fiji Suva, Papua_New_Guinea Port_Moresby, Samoa Apia,
 Tonga Nukualofa, Vanuatu Port_Vila, the_Solomon_Islands Honiara, Palau Ngerulmud, Tuvalu Funafuti, Nauru Yaren,
 Kiribati Tarawa
"""


def _read(table: str) -> dict[str, tuple[str, str]]:
    countries = {}
    for part in table.replace("\n ", " ").strip().splitlines():
        continent, rows = part.split(": ")
        for row in rows.split(", "):
            country, capital = row.strip(" ,").replace("_", "~").split(" ")
            countries[country.replace("~", " ")] = (capital.replace("~", " "), continent.replace("_", " "))
    return countries


COUNTRIES: dict[str, tuple[str, str]] = _read(_TABLE)
"""Country -> (capital, continent).  Names as in a sentence: ``the Netherlands``."""

ALIASES = {
    "England": "London",
    "Scotland": "Edinburgh",
    "Wales": "Cardiff",
    "Northern Ireland": "Belfast",
    "Great Britain": "London",
    "the UK": "London",
    "the USA": "Washington",
    "the US": "Washington",
    "America": "Washington",
    "Holland": "Amsterdam",
    "the Czech Republic": "Prague",
    "the Vatican": "Vatican City",
    "Greenland": "Nuuk",
    "Bavaria": "Munich",
    "Sicily": "Palermo",
    "Catalonia": "Barcelona",
    "Tibet": "Lhasa",
}
"""Other names of countries, and regions -> capital."""

_ASK_CAPITAL = (
    "What is the capital of {}?",
    "What's the capital of {}?",
    "Name the capital of {}.",
    "Which city is the capital of {}?",
    "Tell me the capital of {}.",
    "What is the name of the capital of {}?",
    "The capital of {} is which city?",
    "I need the capital of {}.",
    "Do you know the capital of {}?",
    "What is the capital city of {}?",
    "Capital of {}?",
)
_ASK_COUNTRY = (
    "Which country has the capital {}?",
    "{} is the capital of which country?",
    "What country is {} the capital of?",
    "Of which country is {} the capital?",
)
_ASK_CONTINENT = ("On which continent is {}?", "Which continent is {} on?", "What continent is {} in?", "Where is {}?")

DONT_KNOW = "I don't know that. I am only a small demo model."


def capital_answer(country: str) -> str:
    return f"The capital of {country} is {COUNTRIES[country][0] if country in COUNTRIES else ALIASES[country]}."


def continent_answer(country: str) -> str:
    return f"{_capitalised(country)} is in {COUNTRIES[country][1]}."


def capital(rng: Random) -> Turn:
    """Mostly country to capital, sometimes capital to country.  A made-up country has no capital."""
    country = rng.choice(tuple(COUNTRIES))
    kind = rng.random()
    if kind < 0.10:
        country = rng.choice(tuple(ALIASES))
    if kind < 0.68:
        return Turn(in_passing(rng, rng.choice(_ASK_CAPITAL).format(country)), capital_answer(country))
    if kind < 0.76:
        city = COUNTRIES[country if rng.random() < 0.5 else rng.choice(tuple(COUNTRIES))][0]
        yes = "Yes" if city == COUNTRIES[country][0] else "No"
        return Turn(
            in_passing(rng, f"Is {city} the capital of {country}?"),
            f"{yes}, {capital_answer(country)[0].lower()}{capital_answer(country)[1:]}",
        )
    if kind < 0.90:
        city = COUNTRIES[country][0]
        return Turn(in_passing(rng, rng.choice(_ASK_COUNTRY).format(city)), f"{city} is the capital of {country}.")
    nowhere = no_country(rng)
    return Turn(in_passing(rng, rng.choice(_ASK_CAPITAL).format(nowhere)), DONT_KNOW)


def no_country(rng: Random) -> str:
    """Something without a capital: a made-up or misspelt country, or a thing."""
    kind = rng.random()
    if kind < 0.25:
        return made_up(rng, rng.randint(1, 4)).capitalize()
    if kind < 0.35:
        return made_up_place(rng)
    if kind < 0.5:
        return rng.choice(
            (
                rng.choice(OBJECTS),
                f"the {rng.choice(OBJECTS)}",
                rng.choice(NAMES),
                f"the {rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}",
            )
        )
    while True:
        letters = list(rng.choice(tuple(COUNTRIES)))
        at = rng.randrange(len(letters))
        if rng.random() < 0.5:
            letters[at] = rng.choice("abcdefghijklmnoprstuvwz")
        elif rng.random() < 0.5:
            letters.insert(at, rng.choice("abcdefghijklmnoprstuvwz"))
        else:
            del letters[at]
        if (name := "".join(letters)).lower() not in _KNOWN:
            return name


_KNOWN = {name.lower() for name in (*COUNTRIES, *ALIASES)}


def continent(rng: Random) -> Turn:
    country = rng.choice(tuple(COUNTRIES))
    ask = rng.choice(_ASK_CONTINENT).format(country)
    return Turn(in_passing(rng, _capitalised(ask)), continent_answer(country))


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]
