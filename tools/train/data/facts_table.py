"""The facts that sapling is taught."""

from __future__ import annotations

from tools.train.data.words import split_words


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    joined = " ".join(text.split())
    return tuple(
        (left.strip(), right.strip())
        for left, right in (item.split(":") for item in joined.split(";") if item.strip())
    )


CAPITALS = _pairs(
    """Afghanistan:Kabul; Albania:Tirana; Algeria:Algiers; Andorra:Andorra la Vella; Angola:Luanda;
    Argentina:Buenos Aires; Armenia:Yerevan; Australia:Canberra; Austria:Vienna; Azerbaijan:Baku;
    Bahrain:Manama; Bangladesh:Dhaka; Barbados:Bridgetown; Belarus:Minsk; Belgium:Brussels;
    Belize:Belmopan; Benin:Porto-Novo; Bhutan:Thimphu; Bolivia:Sucre; Botswana:Gaborone;
    Brazil:Brasilia; Bulgaria:Sofia; Burkina Faso:Ouagadougou; Burundi:Gitega; Cambodia:Phnom Penh;
    Cameroon:Yaounde; Canada:Ottawa; Chad:N'Djamena; Chile:Santiago; China:Beijing;
    Colombia:Bogota; Costa Rica:San Jose; Croatia:Zagreb; Cuba:Havana; Cyprus:Nicosia;
    Czechia:Prague; Denmark:Copenhagen; Djibouti:Djibouti City; Ecuador:Quito; Egypt:Cairo;
    El Salvador:San Salvador; Eritrea:Asmara; Estonia:Tallinn; Ethiopia:Addis Ababa; Fiji:Suva;
    Finland:Helsinki; France:Paris; Gabon:Libreville; Georgia:Tbilisi; Germany:Berlin; Ghana:Accra;
    Greece:Athens; Guatemala:Guatemala City; Guinea:Conakry; Guyana:Georgetown;
    Haiti:Port-au-Prince; Honduras:Tegucigalpa; Hungary:Budapest; Iceland:Reykjavik;
    India:New Delhi; Indonesia:Jakarta; Iran:Tehran; Iraq:Baghdad; Ireland:Dublin; Italy:Rome;
    Jamaica:Kingston; Japan:Tokyo; Jordan:Amman; Kazakhstan:Astana; Kenya:Nairobi;
    Kuwait:Kuwait City; Kyrgyzstan:Bishkek; Laos:Vientiane; Latvia:Riga; Lebanon:Beirut;
    Lesotho:Maseru; Liberia:Monrovia; Libya:Tripoli; Liechtenstein:Vaduz; Lithuania:Vilnius;
    Luxembourg:Luxembourg City; Madagascar:Antananarivo; Malawi:Lilongwe; Malaysia:Kuala Lumpur;
    Maldives:Male; Mali:Bamako; Malta:Valletta; Mauritania:Nouakchott; Mauritius:Port Louis;
    Mexico:Mexico City; Moldova:Chisinau; Mongolia:Ulaanbaatar; Montenegro:Podgorica;
    Morocco:Rabat; Mozambique:Maputo; Myanmar:Naypyidaw; Namibia:Windhoek; Nepal:Kathmandu;
    Netherlands:Amsterdam; New Zealand:Wellington; Nicaragua:Managua; Niger:Niamey; Nigeria:Abuja;
    North Macedonia:Skopje; Norway:Oslo; Oman:Muscat; Pakistan:Islamabad; Panama:Panama City;
    Paraguay:Asuncion; Peru:Lima; Philippines:Manila; Poland:Warsaw; Portugal:Lisbon; Qatar:Doha;
    Romania:Bucharest; Russia:Moscow; Rwanda:Kigali; Samoa:Apia; San Marino:City of San Marino;
    Saudi Arabia:Riyadh; Senegal:Dakar; Serbia:Belgrade; Sierra Leone:Freetown; Slovakia:Bratislava;
    Slovenia:Ljubljana; Somalia:Mogadishu; South Africa:Pretoria; South Korea:Seoul; Spain:Madrid;
    Sri Lanka:Colombo; Sudan:Khartoum; Suriname:Paramaribo; Sweden:Stockholm; Switzerland:Bern;
    Syria:Damascus; Taiwan:Taipei; Tajikistan:Dushanbe; Tanzania:Dodoma; Thailand:Bangkok;
    Togo:Lome; Tonga:Nuku'alofa; Tunisia:Tunis; Turkey:Ankara; Turkmenistan:Ashgabat;
    Uganda:Kampala; Ukraine:Kyiv; United Arab Emirates:Abu Dhabi; United Kingdom:London;
    United States:Washington; Uruguay:Montevideo; Uzbekistan:Tashkent; Vanuatu:Port Vila;
    Venezuela:Caracas; Vietnam:Hanoi; Yemen:Sanaa; Zambia:Lusaka; Zimbabwe:Harare"""
)

ELEMENTS = _pairs(
    """hydrogen:H; helium:He; lithium:Li; boron:B; carbon:C; nitrogen:N; oxygen:O; fluorine:F;
    neon:Ne; sodium:Na; magnesium:Mg; aluminium:Al; silicon:Si; phosphorus:P; sulfur:S; chlorine:Cl;
    argon:Ar; potassium:K; calcium:Ca; titanium:Ti; chromium:Cr; iron:Fe; cobalt:Co; nickel:Ni;
    copper:Cu; zinc:Zn; silver:Ag; tin:Sn; iodine:I; platinum:Pt; gold:Au; mercury:Hg; lead:Pb;
    uranium:U"""
)

OPPOSITES = _pairs(
    """hot:cold; big:small; fast:slow; up:down; left:right; day:night; black:white; happy:sad;
    open:closed; full:empty; rich:poor; young:old; hard:soft; wet:dry; high:low; light:dark;
    early:late; strong:weak; long:short; true:false; near:far; inside:outside; first:last;
    heavy:light; loud:quiet; clean:dirty; thick:thin; wide:narrow; deep:shallow; easy:difficult;
    yes:no; good:bad; start:stop; buy:sell; win:lose; push:pull; love:hate; north:south;
    east:west"""
)

NUMBER_WORDS = split_words(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen twenty
    """
)

TENS = split_words("twenty thirty forty fifty sixty seventy eighty ninety")

SOUNDS = _pairs(
    "dog:woof; cat:meow; cow:moo; duck:quack; sheep:baa; horse:neigh; pig:oink; lion:roar;"
    " bee:buzz; owl:hoot; snake:hiss; frog:croak; rooster:cock-a-doodle-doo; mouse:squeak"
)

THING_COLOURS = _pairs(
    "the sky:blue; grass:green; snow:white; a banana:yellow; a lemon:yellow; coal:black;"
    " blood:red; a carrot:orange; a tomato:red; chocolate:brown; milk:white; a strawberry:red"
)


def number_word(value: int) -> str:
    """The English word for 0 to 99."""
    if value <= 20:
        return NUMBER_WORDS[value]
    tens, ones = divmod(value, 10)
    return TENS[tens - 2] + (f"-{NUMBER_WORDS[ones]}" if ones else "")
