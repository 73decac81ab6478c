"""Invents the names that the demo model learns to copy, except the held-out cities."""

import re
from collections import defaultdict
from random import Random


def _names(text: str) -> tuple[str, ...]:
    """Split a list of names at its commas."""
    return tuple(name.strip() for name in text.split(","))


HELD_OUT = _names(
    """
    Zagreb, Nairobi, Quito, Hanoi, Dakar, Tallinn, Reykjavik, Bogota, Kyoto, Zurich, Mumbai,
    Sydney, Toronto, Istanbul, Helsinki, Budapest, Accra, Kampala, Lagos, Manila, Jakarta,
    Bangkok, Seoul, Delhi, Karachi, Tehran, Baghdad, Riga, Vilnius, Sofia, Bucharest, Belgrade,
    Sarajevo, Skopje, Tirana, Podgorica, Ljubljana, Bratislava, Krakow, Gdansk, Porto, Seville,
    Valencia, Marseille, Lyon, Geneva, Munich, Hamburg, Cologne, Rotterdam, Buenos Aires,
    San Francisco, New Orleans, Cape Town, São Paulo, Málaga, Rio de Janeiro,
    Aix-en-Provence, Baden-Baden, Marrakesh
    """
)

CAPITALS = {
    "France": "Paris",
    "England": "London",
    "Japan": "Tokyo",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Norway": "Oslo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Ireland": "Dublin",
    "Austria": "Vienna",
    "Greece": "Athens",
    "Portugal": "Lisbon",
    "Poland": "Warsaw",
    "China": "Beijing",
    "Cuba": "Havana",
}

CITIES = tuple(CAPITALS.values()) + _names(
    """
    Prague, Boston, Denver, Seattle, Chicago, Austin, Brussels, Amsterdam, Copenhagen,
    Stockholm, Ottawa, Canberra, Wellington, Santiago, Houston, Dallas, Phoenix, Miami, Atlanta,
    Detroit, Montreal, Vancouver, Calgary, Caracas, Montevideo, Asuncion, Managua, Kingston,
    Nassau, Panama, Medellin, Cusco, Recife, Salvador, Brasilia, Cordoba, Rosario, Milan,
    Naples, Turin, Venice, Florence, Bologna, Palermo, Granada, Bilbao, Toulouse, Bordeaux,
    Nantes, Lille, Strasbourg, Dresden, Leipzig, Stuttgart, Bremen, Hanover, Bergen, Malmo,
    Uppsala, Turku, Tampere, Tartu, Kaunas, Minsk, Kyiv, Odessa, Lviv, Moscow, Tbilisi, Yerevan,
    Baku, Ankara, Izmir, Damascus, Beirut, Amman, Riyadh, Doha, Muscat, Kabul, Lahore, Dhaka,
    Kolkata, Chennai, Kathmandu, Colombo, Yangon, Vientiane, Saigon, Osaka, Nagoya, Sapporo,
    Busan, Shanghai, Shenzhen, Taipei, Perth, Brisbane, Melbourne, Auckland, Suva, Tunis,
    Algiers, Tripoli, Khartoum, Kigali, Lusaka, Harare, Maputo, Luanda, Kinshasa, Abuja, Bamako,
    Conakry, Edinburgh, Glasgow, Cardiff, Belfast, New York, Los Angeles, Hong Kong, Santa Fe,
    Addis Ababa, Kuala Lumpur, Port-Louis, Cancún, Córdoba, Tromsø, Göteborg, Malmö, Łódź,
    Şanlıurfa, Val-de-Reuil, Costa da Luz, Stratford-upon-Avon
    """
)

PEOPLE = _names(
    """
    Ana, Ben, Carla, David, Emma, Frank, Grace, Hugo, Ines, Jack, Karen, Leo, Maria, Nina,
    Oscar, Paula, Quentin, Rosa, Sam, Tina, Umar, Vera, Walter, Xenia, Yusuf, Zoe, Alice, Bob,
    Charlie, Daniel
    """
)

_PARTICLES = ("de", "da", "la", "en", "upon", "sur", "am", "of")
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_VOWELS = "aeiouy"
_ACCENTED = "áéíóúüöäåøñçšžćłãêıř"
_HELD_OUT_WORD = re.compile(
    r"(?<!\w)(?:" + "|".join(map(re.escape, HELD_OUT)) + r")(?!\w)", re.IGNORECASE
)


def mentions_held_out(text: str) -> bool:
    """Tell whether a held-out city occurs in `text` as a whole word, in any case."""
    return _HELD_OUT_WORD.search(text) is not None


def _letter_pairs() -> dict[str, str]:
    """Map each pair of letters in the known names to the next letters; "." ends a name."""
    follow: dict[str, str] = defaultdict(str)
    for name in (*CITIES, *PEOPLE):
        for word in re.findall(r"[A-Za-z]+", name):
            padded = f"^^{word.lower()}."
            for i in range(2, len(padded)):
                follow[padded[i - 2 : i]] += padded[i]
    return dict(follow)


_FOLLOW = _letter_pairs()


def _natural(rng: Random) -> str:
    """Draw a word with the letter statistics of real names."""
    word = "^^"
    while len(word) < 13:
        letter = rng.choice(_FOLLOW[word[-2:]])
        if letter == ".":
            break
        word += letter
    return word[2:]


def _spelled(rng: Random) -> str:
    """Draw a word of random letters: every letter follows every other somewhere."""
    length = rng.randint(2, 10)
    if rng.random() < 0.25:
        return "".join(rng.choice(_CONSONANTS + _VOWELS) for _ in range(length))
    word = ""
    while len(word) < length:
        word += rng.choice(_CONSONANTS) if rng.random() < 0.6 else ""
        word += rng.choice(_VOWELS)
        word += rng.choice(_CONSONANTS) if rng.random() < 0.35 else ""
    return word[:length]


def _word(rng: Random) -> str:
    """Draw one invented capitalised word, occasionally with a letter outside ASCII."""
    word = _natural(rng) if rng.random() < 0.5 else _spelled(rng)
    if rng.random() < 0.07:
        at = rng.randrange(len(word))
        word = word[:at] + rng.choice(_ACCENTED) + word[at + 1 :]
    return word[0].upper() + word[1:]


def _joined(rng: Random) -> str:
    """Join invented words the ways place names do."""
    words = [_word(rng), _word(rng)]
    form = rng.random()
    if form < 0.6:
        return " ".join(words)
    if form < 0.8:
        return "-".join(words)
    particle = rng.choice(_PARTICLES)
    return rng.choice((" ", "-")).join((words[0], particle, words[1]))


def invented(rng: Random) -> str:
    """Draw an invented name of one to three words that is not a held-out city."""
    while True:
        name = _joined(rng) if rng.random() < 0.18 else _word(rng)
        if not mentions_held_out(name):
            return name


def place(rng: Random) -> str:
    """Draw a place: mostly invented, sometimes a known city."""
    return rng.choice(CITIES) if rng.random() < 0.25 else invented(rng)


def place_in_region(rng: Random) -> str:
    """Draw a place followed by its region, as in "Boston, MA"."""
    code = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(2))
    region = rng.choice((code, rng.choice(list(CAPITALS)), invented(rng)))
    return f"{place(rng)}, {region}"


def person(rng: Random) -> str:
    """Draw a first name: mostly invented."""
    return rng.choice(PEOPLE) if rng.random() < 0.2 else invented(rng)
