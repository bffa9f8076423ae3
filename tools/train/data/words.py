"""Word lists that the generators draw from."""

from __future__ import annotations


def split_words(text: str) -> tuple[str, ...]:
    """The words of a text, in order."""
    return tuple(text.split())


NOUNS = split_words(
    """
    apple pear fig plum grape lemon melon peach cherry banana mango orange olive onion
    carrot potato tomato bean corn rice bread butter cheese milk honey sugar salt pepper
    soup cake cookie candy tea coffee juice water cup plate bowl spoon fork knife table
    chair lamp sofa bed door window wall roof floor garden fence gate tree leaf branch root
    flower rose tulip grass bush forest river lake ocean island beach mountain hill valley
    desert cloud rain snow storm wind sun moon star planet rocket plane train car bus truck
    boat ship bike road bridge tunnel tower castle house school shop market bank hotel
    museum library park farm barn cow horse sheep goat pig dog cat mouse rabbit fox wolf
    bear lion tiger zebra camel monkey elephant giraffe whale shark dolphin fish crab frog
    snake turtle eagle owl duck goose chicken robin ant bee spider butterfly king queen
    prince knight pirate doctor nurse teacher farmer baker driver pilot sailor singer dancer
    painter writer book pen pencil paper ruler eraser desk bag box bottle basket bucket
    hammer nail saw drill rope ladder clock watch phone radio camera computer screen
    keyboard robot engine wheel battery coin ring crown hat scarf coat shirt dress sock shoe
    boot glove belt button needle thread drum flute piano violin guitar trumpet ball kite
    doll puzzle game card dice medal trophy flag map letter stamp candle mirror pillow
    blanket towel soap brush comb violet copper silver gold iron stone sand glass wood
    """
)

NAMES = split_words(
    """
    Anna Ben Clara David Emma Frank Grace Henry Ida Jack Kate Leo Maria Noah Olivia Peter
    Quinn Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Alice Bob Carol Dan Eva Fred Gina
    Hugo Irene James Karen Liam Mia Nina Oscar Paula Ruth Simon Tom Ursula Vera Will Yusuf
    Zara Adam Bella Chris Diana Eric Fiona George Helen Ivan Julia Kevin Laura Mark Nora
    Owen Priya Robert Sara Thomas Vincent Lucy Max Amir Chloe Diego Elena Felix Hana Isaac
    Jonas Kenji Lena Mohamed Nadia Omar Pablo Ravi Sofia Tara Wei Yuki Arthur Bruno Carlos
    Daisy Edgar Freya Gustav Hannah Ingrid Jasper Kim Linda Martin Nicole Oliver Patrick
    Rachel Stefan Teresa Amy John Mary Michael Susan Paul Jane Alex Andrew Daniel Emily Joe
    Lisa Maya Nick Sophie Steve Tim Ali Fatima Chen Mei Aisha Boris Lars Olga Pedro Lucia
    Marco Giulia Pierre Claire Hans Greta
    """
)

COLOURS = split_words(
    """
    red blue green yellow orange purple pink black white brown grey violet turquoise silver
    gold teal navy maroon beige crimson
    """
)

FOODS = split_words(
    """
    pizza pasta sushi soup salad rice curry cake bread cheese chocolate honey noodles tacos
    pancakes soup steak apples cherries olives ice-cream burgers falafel waffles
    """
)

ANIMALS = split_words(
    """
    cat dog rabbit parrot hamster horse turtle goldfish snake pony goat duck lizard canary
    """
)

JOBS = split_words(
    """
    doctor teacher baker farmer pilot nurse painter writer lawyer engineer chef driver
    singer plumber carpenter gardener librarian scientist programmer dentist actor tailor
    """
)

ADJECTIVES = split_words(
    """
    big small red old new happy quiet bright dark cold warm fast slow little green funny
    brave clever lazy heavy soft round
    """
)

VERBS = split_words(
    """
    sees likes finds takes wants paints follows carries hears needs keeps buys sells
    """
)

DAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = split_words(
    """
    January February March April May June July August September October November December
    """
)

CITIES = tuple(
    """
    Paris, London, Berlin, Madrid, Rome, Vienna, Oslo, Tokyo, Lima, Cairo, Athens, Dublin,
    Prague, Warsaw, Lisbon, Boston, Chicago, Seattle, New York, Los Angeles, San Francisco,
    Toronto, Sydney, Mumbai, Delhi, Shanghai, Beijing, Seoul, Moscow, Istanbul, Munich,
    Hamburg, Milan, Naples, Barcelona, Lyon, Geneva, Zurich, Amsterdam, Brussels, Stockholm,
    Helsinki, Copenhagen, Budapest, Denver, Dallas, Houston, Miami, Austin, Atlanta, Porto,
    Krakow, Kyoto, Osaka, Nairobi, Lagos, Singapore, Bangkok, Dubai, Havana, Bogota,
    Vancouver, Montreal, Melbourne, Auckland, Cape Town, Rio, Lagos, Hanoi, Manila, Jakarta
    """.replace("\n    ", " ")
    .strip()
    .split(", ")
)
