"""The words of the German–English grammar: nouns, verbs, adjectives, names, numbers, adverbials; most frequent first.

Every English word stands for exactly one German word of its class, so that the source determines its translation into
German. Forms that follow from a rule are in german.py and phrases.py; this file has everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ENGLISH_VOWELS = "aeiou"


@dataclass(frozen=True)
class Noun:
    """German singular, gender, plural; English singular, plural. `weak`: German -n in all cases but the nominative."""

    de: str
    gender: str
    de_plural: str
    en: str
    en_plural: str
    weak: bool = False


@dataclass(frozen=True)
class Verb:
    """`de` is the infinitive without the separable `prefix`; `third` is the present of er/sie/es; `aux` haben or sein.

    `en` is the base form, `en_past` the past participle; `en_rest` is what follows it (look *at*, give *back*).
    `takes` says the complements: `-` none, `acc`, `dat`, `both` (dative and accusative), `into` (a direction), or a
    preposition with its case (`auf+acc`); `objects` the noun classes of the accusative (or only) object.
    """

    de: str
    third: str
    participle: str
    en: str
    en_past: str
    takes: str = "acc"
    objects: tuple[str, ...] = ("thing",)
    prefix: str = ""
    aux: str = "haben"
    en_rest: str = ""


@dataclass(frozen=True)
class Adjective:
    """`stem` takes the endings; `de` is the form after `sein`."""

    de: str
    stem: str
    en: str


def _plural(word: str) -> str:
    if word.endswith("y") and word[-2] not in ENGLISH_VOWELS:
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")


def _nouns(table: str) -> tuple[Noun, ...]:
    """Rows of `German gender plural English [plural]`, `*` after the gender for weak nouns, `_` for a space."""
    result = []
    for row in filter(None, (line.strip() for line in table.replace(";", "\n").splitlines())):
        de, gender, plural, en, *rest = row.split()
        en = en.replace("_", " ")
        result.append(Noun(de, gender[0], plural, en, rest[0] if rest else _plural(en), weak=gender.endswith("*")))
    return tuple(result)


NOUNS = {
    "person": _nouns("""
        Mann m Männer man men; Frau f Frauen woman women; Kind n Kinder child children; Junge m* Jungen boy
        Mädchen n Mädchen girl; Lehrer m Lehrer teacher; Freund m Freunde friend; Arzt m Ärzte doctor
        Mutter f Mütter mother; Vater m Väter father; Nachbar m* Nachbarn neighbour; Bruder m Brüder brother
        Schwester f Schwestern sister; König m Könige king; Student m* Studenten student; Bauer m* Bauern farmer
        Königin f Königinnen queen; Bäcker m Bäcker baker; Sohn m Söhne son; Tochter f Töchter daughter
        Gast m Gäste guest; Tante f Tanten aunt; Onkel m Onkel uncle; Polizist m* Polizisten policeman policemen
        Maler m Maler painter; Koch m Köche cook; Soldat m* Soldaten soldier
        Großmutter f Großmütter grandmother; Sänger m Sänger singer; Richter m Richter judge
        Fischer m Fischer fisherman fishermen; Dieb m Diebe thief thieves; Prinz m* Prinzen prince
        Prinzessin f Prinzessinnen princess; Händler m Händler merchant; Baby n Babys baby
        Riese m* Riesen giant; Zauberer m Zauberer wizard; Dichter m Dichter poet; Pilot m* Piloten pilot
        Schneider m Schneider tailor; Zeuge m* Zeugen witness; Matrose m* Matrosen sailor
        Ritter m Ritter knight; Krankenschwester f Krankenschwestern nurse
        Schauspielerin f Schauspielerinnen actress; Bote m* Boten messenger; Bürgermeister m Bürgermeister mayor
        Zwerg m Zwerge dwarf dwarves; Hirte m* Hirten shepherd
    """),
    "animal": _nouns("""
        Hund m Hunde dog; Katze f Katzen cat; Pferd n Pferde horse; Vogel m Vögel bird; Kuh f Kühe cow
        Maus f Mäuse mouse mice; Bär m* Bären bear; Fuchs m Füchse fox; Hase m* Hasen hare; Ziege f Ziegen goat
        Esel m Esel donkey; Ente f Enten duck; Löwe m* Löwen lion; Wolf m Wölfe wolf wolves
        Affe m* Affen monkey; Schwein n Schweine pig; Huhn n Hühner hen; Elefant m* Elefanten elephant
        Frosch m Frösche frog; Schlange f Schlangen snake; Eule f Eulen owl; Igel m Igel hedgehog
        Biene f Bienen bee; Lamm n Lämmer lamb; Schmetterling m Schmetterlinge butterfly; Adler m Adler eagle
        Taube f Tauben pigeon; Kamel n Kamele camel; Eichhörnchen n Eichhörnchen squirrel
        Schildkröte f Schildkröten tortoise; Storch m Störche stork; Spinne f Spinnen spider
        Hirsch m Hirsche stag; Ameise f Ameisen ant; Krokodil n Krokodile crocodile; Dachs m Dachse badger
        Kalb n Kälber calf calves
    """),
    "text": _nouns("""
        Buch n Bücher book; Brief m Briefe letter; Zeitung f Zeitungen newspaper; Gedicht n Gedichte poem
        Nachricht f Nachrichten message; Bericht m Berichte report; Roman m Romane novel
        Märchen n Märchen fairy_tale; Postkarte f Postkarten postcard; Vertrag m Verträge contract
        Rechnung f Rechnungen bill; Zettel m Zettel note; Artikel m Artikel article
        Zeugnis n Zeugnisse certificate
    """),
    "clothing": _nouns("""
        Mantel m Mäntel coat; Hut m Hüte hat; Schuh m Schuhe shoe; Hemd n Hemden shirt; Kleid n Kleider dress
        Jacke f Jacken jacket; Stiefel m Stiefel boot; Handschuh m Handschuhe glove; Mütze f Mützen cap
        Schal m Schals scarf scarves; Gürtel m Gürtel belt
    """),
    "food": _nouns("""
        Apfel m Äpfel apple; Kuchen m Kuchen cake; Ei n Eier egg; Suppe f Suppen soup; Birne f Birnen pear
        Kartoffel f Kartoffeln potato potatoes; Nuss f Nüsse nut; Kirsche f Kirschen cherry
        Wurst f Würste sausage; Tomate f Tomaten tomato tomatoes; Zwiebel f Zwiebeln onion
        Pilz m Pilze mushroom; Möhre f Möhren carrot; Brötchen n Brötchen bread_roll; Zitrone f Zitronen lemon
        Keks m Kekse biscuit; Pflaume f Pflaumen plum; Gurke f Gurken cucumber
        Pfannkuchen m Pfannkuchen pancake; Salat m Salate salad
    """),
    "tool": _nouns("""
        Schlüssel m Schlüssel key; Tasche f Taschen bag; Ball m Bälle ball; Lampe f Lampen lamp
        Messer n Messer knife knives; Koffer m Koffer suitcase; Bild n Bilder picture
        Geschenk n Geschenke present; Flasche f Flaschen bottle; Tasse f Tassen cup; Uhr f Uhren clock
        Teller m Teller plate; Kiste f Kisten box; Korb m Körbe basket; Schirm m Schirme umbrella
        Ring m Ringe ring; Fahrrad n Fahrräder bicycle; Gabel f Gabeln fork; Löffel m Löffel spoon
        Spiegel m Spiegel mirror; Decke f Decken blanket; Kerze f Kerzen candle; Hammer m Hämmer hammer
        Geige f Geigen violin; Glocke f Glocken bell; Krone f Kronen crown; Seil n Seile rope
        Kissen n Kissen pillow; Schwert n Schwerter sword; Leiter f Leitern ladder; Topf m Töpfe pot
        Eimer m Eimer bucket; Münze f Münzen coin; Trommel f Trommeln drum; Flöte f Flöten flute
        Fahne f Fahnen flag; Besen m Besen broom; Fernrohr n Fernrohre telescope; Pfanne f Pfannen pan
        Kamm m Kämme comb; Nadel f Nadeln needle
    """),
    "openable": _nouns("""
        Tür f Türen door; Fenster n Fenster window; Schrank m Schränke cupboard; Tor n Tore gate
        Schublade f Schubladen drawer; Truhe f Truhen chest
    """),
    "place": _nouns("""
        Haus n Häuser house; Garten m Gärten garden; Küche f Küchen kitchen; Stadt f Städte town
        Schule f Schulen school; Wald m Wälder forest; Zimmer n Zimmer room; Dorf n Dörfer village
        Kirche f Kirchen church; Laden m Läden shop; Schloss n Schlösser castle; Hof m Höfe yard
        Turm m Türme tower; Bahnhof m Bahnhöfe station; Keller m Keller cellar; Museum n Museen museum
        Büro n Büros office; Tal n Täler valley; Hafen m Häfen harbour; Stall m Ställe stable
        Bibliothek f Bibliotheken library; Krankenhaus n Krankenhäuser hospital; Höhle f Höhlen cave
        Hütte f Hütten hut; Fabrik f Fabriken factory; Zelt n Zelte tent; Gasthaus n Gasthäuser inn
        Palast m Paläste palace; Scheune f Scheunen barn; Gefängnis n Gefängnisse prison
    """),
    "surface": _nouns("""
        Tisch m Tische table; Straße f Straßen street; Stuhl m Stühle chair; Berg m Berge mountain
        Brücke f Brücken bridge; Bank f Bänke bench; Dach n Dächer roof; Wiese f Wiesen meadow
        Sofa n Sofas sofa; Insel f Inseln island; Teppich m Teppiche carpet; Mauer f Mauern wall
        Hügel m Hügel hill; Feld n Felder field
    """),
}

# German compounds are one word, English ones two: any first part of a row with any of its heads.
_COMPOUNDS = (
    (
        "Holz wooden; Glas glass; Stein stone; Silber silver; Leder leather; Papier paper; Eisen iron; Gold golden",
        "Tisch Stuhl Tür Tor Bank Kiste Schrank Tasche Ring Flasche Krone Löffel Teller Brücke Mauer Turm Lampe Hut "
        "Tasse Korb Spiegel Hammer Glocke Schwert Topf Eimer Münze Trommel Kamm Messer Schlüssel Truhe",
    ),
    (
        "Garten garden; Küchen kitchen; Schul school; Stadt town; Dorf village; Schloss castle; "
        "Keller cellar; Hof yard",
        "Tür Tor Fenster Tisch Bank Mauer Uhr Lampe Schlüssel Buch Zeitung Brücke Straße Garten Hund Katze Ball Bild "
        "Stuhl Besen",
    ),
    (
        "Winter winter; Sommer summer; Abend evening; Nacht night; Sonntags Sunday; Reise travel",
        "Kleid Mantel Schuh Hut Jacke Tasche Decke Zeitung Buch Haus Garten Kuchen Suppe Lampe Teller",
    ),
)


def _compounds() -> tuple[tuple[str, Noun], ...]:
    head_of = {noun.de: (kind, noun) for kind, nouns in NOUNS.items() for noun in nouns}
    result = []
    for firsts, heads in _COMPOUNDS:
        for first in firsts.split("; "):
            de, en = first.split()
            for head in heads.split():
                kind, noun = head_of[head]
                if de == head:
                    continue
                joined = replace(
                    noun,
                    de=de + noun.de.lower(),
                    de_plural=de + noun.de_plural.lower(),
                    en=f"{en} {noun.en}",
                    en_plural=f"{en} {noun.en_plural}",
                )
                result.append((kind, joined))
    return tuple(result)


COMPOUNDS = _compounds()
THINGS = ("text", "clothing", "food", "tool")
ALL_OBJECTS = ("person", "animal", "text", "clothing", "food", "tool")


def _verbs(table: str, takes: str, default: tuple[str, ...] = (), aux: str = "haben") -> tuple[Verb, ...]:
    """Rows of `infinitive third participle English past [: classes]`; `|` divides a prefix, `_` English words.

    An English verb is cut at its first `_`: what follows is not inflected. A participle beginning with + has sein.
    """
    result = []
    for row in filter(None, (line.strip() for line in table.replace(";", "\n").splitlines())):
        words, _, classes = row.partition(":")
        de, third, participle, en, past = words.split()
        prefix, _, base = de.rpartition("|")
        en, _, rest = en.partition("_")
        result.append(
            Verb(
                base,
                third,
                participle.lstrip("+"),
                en,
                past,
                takes,
                tuple(classes.split()) or default,
                prefix,
                "sein" if participle.startswith("+") else aux,
                rest.replace("_", " "),
            )
        )
    return tuple(result)


VERBS = (
    *_verbs(
        """
        sehen sieht gesehen see seen; finden findet gefunden find found; suchen sucht gesucht look_for looked
        kaufen kauft gekauft buy bought: text clothing food tool; lesen liest gelesen read read: text
        hören hört gehört hear heard: person animal; lieben liebt geliebt love loved: person animal
        essen isst gegessen eat eaten: food; tragen trägt getragen carry carried: tool clothing
        schreiben schreibt geschrieben write written: text; besuchen besucht besucht visit visited: person
        auf|machen macht aufgemacht open opened: openable; zu|machen macht zugemacht close closed: openable
        ein|laden lädt eingeladen invite invited: person; an|rufen ruft angerufen call called: person
        auf|heben hebt aufgehoben pick_up picked: text clothing food tool
        verkaufen verkauft verkauft sell sold: tool food; an|sehen sieht angesehen look_at looked
        weg|werfen wirft weggeworfen throw_away thrown: text tool clothing
        verstecken versteckt versteckt hide hidden: tool text food; treffen trifft getroffen meet met: person
        kochen kocht gekocht cook cooked: food; an|ziehen zieht angezogen put_on put: clothing
        malen malt gemalt paint painted; waschen wäscht gewaschen wash washed: clothing food person
        ab|holen holt abgeholt collect collected: person tool; fangen fängt gefangen catch caught: animal person
        verlieren verliert verloren lose lost: tool clothing text; füttern füttert gefüttert feed fed: animal
        jagen jagt gejagt chase chased: animal; kennen kennt gekannt know known: person
        auf|essen isst aufgegessen eat_up eaten: food; vor|lesen liest vorgelesen read_out read: text
        reparieren repariert repariert repair repaired: tool
        stehlen stiehlt gestohlen steal stolen: tool text food; vergessen vergisst vergessen forget forgotten
        fragen fragt gefragt ask asked: person; aus|ziehen zieht ausgezogen take_off taken: clothing
        ein|packen packt eingepackt pack packed: clothing tool text
        verstehen versteht verstanden understand understood: person text
        retten rettet gerettet rescue rescued: person animal; küssen küsst geküsst kiss kissed: person animal
        ab|schließen schließt abgeschlossen lock locked: openable; bewundern bewundert bewundert admire admired
        begrüßen begrüßt begrüßt greet greeted: person
        aus|wählen wählt ausgewählt choose chosen: text clothing food tool
        zeichnen zeichnet gezeichnet draw drawn; vor|bereiten bereitet vorbereitet prepare prepared: food text
        zerbrechen zerbricht zerbrochen break broken: tool; um|werfen wirft umgeworfen knock_over knocked: tool
        übersetzen übersetzt übersetzt translate translated: text
        beschreiben beschreibt beschrieben describe described
        ein|sammeln sammelt eingesammelt gather gathered: food tool
        aus|packen packt ausgepackt unpack unpacked: tool clothing
        erkennen erkennt erkannt recognise recognised: person
        """,
        "acc",
        ALL_OBJECTS,
    ),
    *_verbs(
        """
        helfen hilft geholfen help helped; danken dankt gedankt thank thanked: person
        folgen folgt +gefolgt follow followed; antworten antwortet geantwortet answer answered: person
        zu|hören hört zugehört listen_to listened; vertrauen vertraut vertraut trust trusted
        zu|sehen sieht zugesehen watch watched; nach|laufen läuft +nachgelaufen run_after run
        gehorchen gehorcht gehorcht obey obeyed: person
        gratulieren gratuliert gratuliert congratulate congratulated: person
        begegnen begegnet +begegnet encounter encountered
        widersprechen widerspricht widersprochen contradict contradicted: person
        """,
        "dat",
        ("person", "animal"),
    ),
    *_verbs(
        """
        geben gibt gegeben give given; zeigen zeigt gezeigt show shown; bringen bringt gebracht bring brought
        schicken schickt geschickt send sent: text tool food
        leihen leiht geliehen lend lent: tool text clothing; zurück|geben gibt zurückgegeben give_back given
        erklären erklärt erklärt explain explained: text
        empfehlen empfiehlt empfohlen recommend recommended: food text
        versprechen verspricht versprochen promise promised
        """,
        "both",
        THINGS,
    ),
    *_verbs(
        """
        schlafen schläft geschlafen sleep slept; arbeiten arbeitet gearbeitet work worked
        lachen lacht gelacht laugh laughed; singen singt gesungen sing sung
        ein|schlafen schläft +eingeschlafen fall_asleep fallen; weinen weint geweint cry cried
        auf|wachen wacht +aufgewacht wake_up woken; tanzen tanzt getanzt dance danced
        spielen spielt gespielt play played; an|kommen kommt +angekommen arrive arrived
        lächeln lächelt gelächelt smile smiled; sitzen sitzt gesessen sit sat
        um|fallen fällt +umgefallen fall_over fallen; frühstücken frühstückt gefrühstückt have_breakfast had
        auf|stehen steht +aufgestanden get_up got; schwimmen schwimmt +geschwommen swim swum
        """,
        "-",
    ),
    *_verbs(
        """
        gehen geht +gegangen go gone; laufen läuft +gelaufen run run; springen springt +gesprungen jump jumped
        fliegen fliegt +geflogen fly flown; kriechen kriecht +gekrochen crawl crawled
        klettern klettert +geklettert climb climbed
        """,
        "into",
    ),
    *_verbs("warten wartet gewartet wait_for waited", "auf+acc", ("person", "animal")),
    *_verbs("denken denkt gedacht think_of thought", "an+acc", ALL_OBJECTS),
    *_verbs("sprechen spricht gesprochen talk_to talked", "mit+dat", ("person", "animal")),
    *_verbs("träumen träumt geträumt dream_of dreamt", "von+dat", ALL_OBJECTS),
    *_verbs("lachen lacht gelacht laugh_at laughed", "über+acc", ALL_OBJECTS),
    *_verbs("spielen spielt gespielt play_with played", "mit+dat", ("person", "animal", "tool")),
    *_verbs("kämpfen kämpft gekämpft fight_against fought", "gegen+acc", ("person", "animal")),
    *_verbs("glauben glaubt geglaubt believe_in believed", "an+acc", ("person",)),
)

# With a clause: „… sagt, dass …“, and with an infinitive: „… versucht, … zu …“.
CLAUSE_VERBS = _verbs(
    """
    sagen sagt gesagt say said; glauben glaubt geglaubt believe believed; wissen weiß gewusst know known
    hoffen hofft gehofft hope hoped; denken denkt gedacht think thought
    behaupten behauptet behauptet claim claimed; vergessen vergisst vergessen forget forgotten
    träumen träumt geträumt dream dreamt
    """,
    "dass",
)
INFINITIVE_VERBS = _verbs(
    """
    versuchen versucht versucht try tried; hoffen hofft gehofft hope hoped
    an|fangen fängt angefangen start started; versprechen verspricht versprochen promise promised
    vergessen vergisst vergessen forget forgotten; beschließen beschließt beschlossen decide decided
    """,
    "zu",
)


def _adjectives(table: str) -> tuple[Adjective, ...]:
    result = []
    for row in table.replace("\n", ";").split(";"):
        if row.strip():
            de, en = row.split()
            word, _, stem = de.partition("/")
            result.append(Adjective(word, stem or word, en))
    return tuple(result)


_ANY = """alt old; klein small; groß big; neu new; schön beautiful; rot red; schwarz black; weiß white; blau blue
    grün green; schwer heavy; seltsam odd; gelb yellow; braun brown; schmutzig dirty; fremd strange; berühmt famous"""
_LIVING = """jung young; müde/müd tired; glücklich happy; traurig sad; freundlich friendly; klug clever; stark strong
    krank sick; hungrig hungry; laut loud; ruhig quiet; faul lazy; neugierig curious; wütend angry; tapfer brave
    arm poor; reich rich; schwach weak; höflich polite; einsam lonely; fleißig diligent; gesund healthy"""
_THING = """lang long; warm warm; kalt cold; teuer/teur expensive; leer empty; kaputt broken; kurz short; billig cheap
    rund round; dunkel/dunkl dark; sauber clean; voll full; breit wide; kostbar precious; rostig rusty"""
ADJECTIVES = {
    **dict.fromkeys(("person", "animal"), _adjectives(_ANY + ";" + _LIVING)),
    **dict.fromkeys(
        ("text", "clothing", "food", "tool", "openable", "place", "surface"), _adjectives(_ANY + ";" + _THING)
    ),
}

NAMES = """
    Anna Karl Maria Peter Lena Paul Emma Hans Clara Max Julia Otto Sophie Felix Greta Jakob Helene Anton Ida
    Emil Marta Konrad Frieda Oskar Rosa Leo Elsa Bruno Agnes Moritz Ottilie Balthasar Kunigunde Theodor Wilhelmine
    Sebald
""".split()

# English, German; what each tense allows.
TIMES = (
    ("today", "heute"),
    ("every day", "jeden Tag"),
    ("in the evening", "am Abend"),
    ("in the morning", "am Morgen"),
    ("on Monday", "am Montag"),
    ("this week", "diese Woche"),
    ("at night", "in der Nacht"),
    ("after work", "nach der Arbeit"),
    ("on Sunday", "am Sonntag"),
    ("in winter", "im Winter"),
    ("at noon", "am Mittag"),
    ("before the meal", "vor dem Essen"),
    ("in summer", "im Sommer"),
    ("on Friday", "am Freitag"),
    ("in spring", "im Frühling"),
)
FUTURE_TIMES = (
    ("tomorrow", "morgen"),
    ("next week", "nächste Woche"),
    ("soon", "bald"),
    ("next year", "nächstes Jahr"),
)
SUBORDINATORS = (
    ("because", "weil"),
    ("when", "wenn"),
    ("although", "obwohl"),
    ("before", "bevor"),
    ("while", "während"),
    ("as long as", "solange"),
)

_UNITS_DE = "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn".split()
_UNITS_DE += "sechzehn siebzehn achtzehn neunzehn".split()
_UNITS_EN = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()
_UNITS_EN += "sixteen seventeen eighteen nineteen".split()
_TENS_DE = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()
_TENS_EN = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def number(n: int) -> tuple[str, str]:
    """English and German words of 2 … 99: twenty-one, einundzwanzig."""
    if not 2 <= n <= 99:
        raise ValueError(f"number needs 2 to 99, got {n}")
    if n < 20:
        return _UNITS_EN[n], _UNITS_DE[n]
    tens, unit = divmod(n, 10)
    en, de = _TENS_EN[tens - 2], _TENS_DE[tens - 2]
    return (f"{en}-{_UNITS_EN[unit]}", f"{_UNITS_DE[unit]}und{de}") if unit else (en, de)
