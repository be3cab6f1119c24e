"""The words of the translation task: English beside German, with what German grammar asks of each.

Entries end with their line, or at a semicolon. Nouns: English singular / plural = gender, singular and plural of a
German noun; `w` stands behind weak nouns, which end like their plural in all cases but one. Several German nouns are
synonyms. Adjectives: English = German / stem where an ending changes it. Verbs: base / third person / past /
participle = German infinitive (with `|` behind a prefix that separates), forms of du and er, participle, `s` where the
perfect is made with sein. Names: English = German where they are not the same.
"""

THINGS = """
car/cars = n Auto Autos, m Wagen Wagen; book/books = n Buch Bücher; letter/letters = m Brief Briefe
key/keys = m Schlüssel Schlüssel; table/tables = m Tisch Tische; chair/chairs = m Stuhl Stühle
lamp/lamps = f Lampe Lampen, f Leuchte Leuchten; bag/bags = f Tasche Taschen; coat/coats = m Mantel Mäntel
dress/dresses = n Kleid Kleider; shirt/shirts = n Hemd Hemden; hat/hats = m Hut Hüte; watch/watches = f Uhr Uhren
computer/computers = m Computer Computer, m Rechner Rechner; phone/phones = n Telefon Telefone, n Handy Handys
bicycle/bicycles = n Fahrrad Fahrräder, n Rad Räder; picture/pictures = n Bild Bilder
ticket/tickets = f Fahrkarte Fahrkarten, n Ticket Tickets; newspaper/newspapers = f Zeitung Zeitungen
camera/cameras = f Kamera Kameras; knife/knives = n Messer Messer; fork/forks = f Gabel Gabeln
spoon/spoons = m Löffel Löffel; plate/plates = m Teller Teller; glass/glasses = n Glas Gläser
bottle/bottles = f Flasche Flaschen; cup/cups = f Tasse Tassen; mirror/mirrors = m Spiegel Spiegel
carpet/carpets = m Teppich Teppiche; guitar/guitars = f Gitarre Gitarren
umbrella/umbrellas = m Regenschirm Regenschirme, m Schirm Schirme; suitcase/suitcases = m Koffer Koffer
present/presents = n Geschenk Geschenke; box/boxes = f Kiste Kisten, f Schachtel Schachteln
ring/rings = m Ring Ringe; apple/apples = m Apfel Äpfel; cake/cakes = m Kuchen Kuchen
blanket/blankets = f Decke Decken; pillow/pillows = n Kissen Kissen; candle/candles = f Kerze Kerzen
clock/clocks = f Wanduhr Wanduhren; map/maps = f Landkarte Landkarten, f Karte Karten
ladder/ladders = f Leiter Leitern; hammer/hammers = m Hammer Hämmer; basket/baskets = m Korb Körbe
toy/toys = n Spielzeug Spielzeuge; machine/machines = f Maschine Maschinen; shelf/shelves = n Regal Regale
cupboard/cupboards = m Schrank Schränke; bed/beds = n Bett Betten; jacket/jackets = f Jacke Jacken
sweater/sweaters = m Pullover Pullover; notebook/notebooks = n Heft Hefte; pencil/pencils = m Bleistift Bleistifte
ball/balls = m Ball Bälle; boat/boats = n Boot Boote; tent/tents = n Zelt Zelte; report/reports = m Bericht Berichte
invoice/invoices = f Rechnung Rechnungen; contract/contracts = m Vertrag Verträge
"""

PERSONS = """
teacher/teachers = m Lehrer Lehrer; doctor/doctors = m Arzt Ärzte; friend/friends = m Freund Freunde
neighbour/neighbours = m Nachbar Nachbarn w; brother/brothers = m Bruder Brüder
sister/sisters = f Schwester Schwestern; mother/mothers = f Mutter Mütter; father/fathers = m Vater Väter
daughter/daughters = f Tochter Töchter; son/sons = m Sohn Söhne; aunt/aunts = f Tante Tanten
uncle/uncles = m Onkel Onkel; child/children = n Kind Kinder; woman/women = f Frau Frauen; man/men = m Mann Männer
girl/girls = n Mädchen Mädchen; boy/boys = m Junge Jungen w; customer/customers = m Kunde Kunden w
colleague/colleagues = m Kollege Kollegen w; pupil/pupils = m Schüler Schüler
engineer/engineers = m Ingenieur Ingenieure; cook/cooks = m Koch Köche; baker/bakers = m Bäcker Bäcker
driver/drivers = m Fahrer Fahrer; gardener/gardeners = m Gärtner Gärtner
lawyer/lawyers = m Anwalt Anwälte, m Rechtsanwalt Rechtsanwälte; judge/judges = m Richter Richter
singer/singers = m Sänger Sänger; painter/painters = m Maler Maler
nurse/nurses = f Krankenschwester Krankenschwestern; guest/guests = m Gast Gäste; cousin/cousins = f Cousine Cousinen
grandmother/grandmothers = f Großmutter Großmütter, f Oma Omas
grandfather/grandfathers = m Großvater Großväter, m Opa Opas; tourist/tourists = m Tourist Touristen w
student/students = m Student Studenten w; farmer/farmers = m Landwirt Landwirte; boss/bosses = m Chef Chefs
"""

PLACES = """
garden/gardens = m Garten Gärten = in; house/houses = n Haus Häuser = in; kitchen/kitchens = f Küche Küchen = in
office/offices = n Büro Büros = in; school/schools = f Schule Schulen = in; hotel/hotels = n Hotel Hotels = in
library/libraries = f Bibliothek Bibliotheken, f Bücherei Büchereien = in
restaurant/restaurants = n Restaurant Restaurants = in; museum/museums = n Museum Museen = in
hospital/hospitals = n Krankenhaus Krankenhäuser = in; village/villages = n Dorf Dörfer = in
forest/forests = m Wald Wälder = in; shop/shops = m Laden Läden, n Geschäft Geschäfte = in
cellar/cellars = m Keller Keller = in; station/stations = m Bahnhof Bahnhöfe = an
market/markets = m Markt Märkte = auf; bridge/bridges = f Brücke Brücken = auf
church/churches = f Kirche Kirchen = in; factory/factories = f Fabrik Fabriken = in
city/cities = f Stadt Städte = in
"""

FOOD = """
flour = n Mehl; butter = f Butter; sugar = m Zucker; rice = m Reis; coffee = m Kaffee; tea = m Tee; milk = f Milch
cheese = m Käse; bread = n Brot; meat = n Fleisch; honey = m Honig; salt = n Salz; water = n Wasser; wine = m Wein
beer = n Bier; oil = n Öl; chocolate = f Schokolade; fruit = n Obst; juice = m Saft; ham = m Schinken
"""

UNITS = """
gram/grams = n Gramm Gramm; kilogram/kilograms = n Kilogramm Kilogramm, n Kilo Kilo; litre/litres = m Liter Liter
bottle/bottles = f Flasche Flaschen; glass/glasses = n Glas Gläser; cup/cups = f Tasse Tassen
bag/bags = m Beutel Beutel, f Tüte Tüten; pack/packs = f Packung Packungen; box/boxes = f Kiste Kisten
"""

OF_THINGS = """
red = rot; blue = blau; green = grün; yellow = gelb; black = schwarz; white = weiß; grey = grau; brown = braun
new = neu; old = alt; small = klein; big = groß; expensive = teuer/teur; cheap = billig, günstig; heavy = schwer
light = leicht; long = lang; short = kurz; beautiful = schön; ugly = hässlich; dark = dunkel/dunkl; bright = hell
clean = sauber; dirty = schmutzig; broken = kaputt, defekt; empty = leer; round = rund; modern = modern
simple = einfach; strong = stark; narrow = schmal; wide = breit
"""

OF_PERSONS = """
young = jung; old = alt; tall = groß; friendly = freundlich; tired = müde/müd; hungry = hungrig; sick = krank
rich = reich; poor = arm; famous = berühmt; clever = klug, schlau; nice = nett; strict = streng; lazy = faul
happy = glücklich, froh; careful = vorsichtig; impatient = ungeduldig; polite = höflich; brave = mutig, tapfer
quiet = ruhig, still
"""

OF_FOOD = """
fresh = frisch; warm = warm; cold = kalt; good = gut; cheap = billig, günstig; white = weiß; brown = braun
sweet = süß; expensive = teuer/teur
"""

OF_PLACES = """
old = alt; new = neu; small = klein; big = groß; beautiful = schön; famous = berühmt; quiet = ruhig, still
modern = modern
"""

COMPARED = """
more expensive = teurer; cheaper = billiger, günstiger; bigger = größer; smaller = kleiner; older = älter
newer = neuer; heavier = schwerer; lighter = leichter; longer = länger; shorter = kürzer; more beautiful = schöner
uglier = hässlicher
"""

WITH_THING = """
buy/buys/bought/bought = kaufen kaufst kauft gekauft
sell/sells/sold/sold = verkaufen verkaufst verkauft verkauft
see/sees/saw/seen = sehen siehst sieht gesehen
find/finds/found/found = finden findest findet gefunden
repair/repairs/repaired/repaired = reparieren reparierst repariert repariert
need/needs/needed/needed = brauchen brauchst braucht gebraucht, benötigen benötigst benötigt benötigt
look for/looks for/looked for/looked for = suchen suchst sucht gesucht
lose/loses/lost/lost = verlieren verlierst verliert verloren
steal/steals/stole/stolen = stehlen stiehlst stiehlt gestohlen
clean/cleans/cleaned/cleaned = putzen putzt putzt geputzt, reinigen reinigst reinigt gereinigt
carry/carries/carried/carried = tragen trägst trägt getragen
pick up/picks up/picked up/picked up = ab|holen holst holt abgeholt
order/orders/ordered/ordered = bestellen bestellst bestellt bestellt
pay for/pays for/paid for/paid for = bezahlen bezahlst bezahlt bezahlt
forget/forgets/forgot/forgotten = vergessen vergisst vergisst vergessen
borrow/borrows/borrowed/borrowed = aus|leihen leihst leiht ausgeliehen
throw away/throws away/threw away/thrown away = weg|werfen wirfst wirft weggeworfen
bring back/brings back/brought back/brought back = zurück|bringen bringst bringt zurückgebracht
take along/takes along/took along/taken along = mit|nehmen nimmst nimmt mitgenommen
test/tests/tested/tested = testen testest testet getestet, prüfen prüfst prüft geprüft
wrap up/wraps up/wrapped up/wrapped up = ein|packen packst packt eingepackt
unpack/unpacks/unpacked/unpacked = aus|packen packst packt ausgepackt
count/counts/counted/counted = zählen zählst zählt gezählt
measure/measures/measured/measured = messen misst misst gemessen
hide/hides/hid/hidden = verstecken versteckst versteckt versteckt
describe/describes/described/described = beschreiben beschreibst beschreibt beschrieben
draw/draws/drew/drawn = zeichnen zeichnest zeichnet gezeichnet
choose/chooses/chose/chosen = aus|wählen wählst wählt ausgewählt, aus|suchen suchst sucht ausgesucht
move/moves/moved/moved = bewegen bewegst bewegt bewegt
use/uses/used/used = benutzen benutzt benutzt benutzt, verwenden verwendest verwendet verwendet
"""

WITH_PERSON = """
visit/visits/visited/visited = besuchen besuchst besucht besucht
call/calls/called/called = an|rufen rufst ruft angerufen
meet/meets/met/met = treffen triffst trifft getroffen
invite/invites/invited/invited = ein|laden lädst lädt eingeladen
greet/greets/greeted/greeted = grüßen grüßt grüßt gegrüßt, begrüßen begrüßt begrüßt begrüßt
ask/asks/asked/asked = fragen fragst fragt gefragt
see/sees/saw/seen = sehen siehst sieht gesehen
look for/looks for/looked for/looked for = suchen suchst sucht gesucht
hear/hears/heard/heard = hören hörst hört gehört
understand/understands/understood/understood = verstehen verstehst versteht verstanden
pick up/picks up/picked up/picked up = ab|holen holst holt abgeholt
"""

WITH_DATIVE = """
help/helps/helped/helped = helfen hilfst hilft geholfen
thank/thanks/thanked/thanked = danken dankst dankt gedankt
trust/trusts/trusted/trusted = vertrauen vertraust vertraut vertraut
follow/follows/followed/followed = folgen folgst folgt gefolgt s
answer/answers/answered/answered = antworten antwortest antwortet geantwortet
congratulate/congratulates/congratulated/congratulated = gratulieren gratulierst gratuliert gratuliert
listen to/listens to/listened to/listened to = zu|hören hörst hört zugehört
"""

WITH_BOTH = """
give/gives/gave/given = geben gibst gibt gegeben
send/sends/sent/sent = schicken schickst schickt geschickt, senden sendest sendet gesendet
show/shows/showed/shown = zeigen zeigst zeigt gezeigt
lend/lends/lent/lent = leihen leihst leiht geliehen
sell/sells/sold/sold = verkaufen verkaufst verkauft verkauft
bring/brings/brought/brought = bringen bringst bringt gebracht
promise/promises/promised/promised = versprechen versprichst verspricht versprochen
"""

WITH_NONE = """
work/works/worked/worked = arbeiten arbeitest arbeitet gearbeitet
sleep/sleeps/slept/slept = schlafen schläfst schläft geschlafen
wait/waits/waited/waited = warten wartest wartet gewartet
sing/sings/sang/sung = singen singst singt gesungen
eat/eats/ate/eaten = essen isst isst gegessen
stay/stays/stayed/stayed = bleiben bleibst bleibt geblieben s
cook/cooks/cooked/cooked = kochen kochst kocht gekocht
dance/dances/danced/danced = tanzen tanzt tanzt getanzt
"""

GOING = """
drive/drives/drove/driven = fahren fährst fährt gefahren s
fly/flies/flew/flown = fliegen fliegst fliegt geflogen s
travel/travels/travelled/travelled = reisen reist reist gereist s
"""

WOMEN = """
Anna Maria Julia Laura Emma Clara Sophie Lisa Eva Nina Petra Monika Sabine Karin Paula Helga Ida Rosa Vera
Olga
"""
MEN = """
Peter Paul Martin Thomas Stefan Michael Daniel David Simon Jakob Anton Otto Karl Robert Walter Erik Georg Jan
Tim Oskar
"""
CITIES = """
Berlin Hamburg Munich=München Cologne=Köln Vienna=Wien Zurich=Zürich Rome=Rom Paris London Prague=Prag
Warsaw=Warschau Lisbon=Lissabon Brussels=Brüssel Geneva=Genf Dresden Leipzig Bremen Hanover=Hannover
Nuremberg=Nürnberg Stuttgart Milan=Mailand Venice=Venedig Moscow=Moskau Copenhagen=Kopenhagen Athens=Athen
Madrid Salzburg Oslo
"""
DAYS = """
Monday=Montag Tuesday=Dienstag Wednesday=Mittwoch Thursday=Donnerstag Friday=Freitag Saturday=Samstag
Sunday=Sonntag
"""
MONTHS = """
January=Januar February=Februar March=März April May=Mai June=Juni July=Juli August September October=Oktober
November December=Dezember
"""
SEASONS = """
spring=Frühling summer=Sommer autumn=Herbst winter=Winter
"""
SPANS = """
day/days = m Tag Tage; week/weeks = f Woche Wochen; month/months = m Monat Monate; year/years = n Jahr Jahre
hour/hours = f Stunde Stunden
"""
CONJUNCTIONS = """
because = weil, da; although = obwohl; before = bevor, ehe; after = nachdem; when = wenn; if = wenn, falls
"""
EVENTS = """
meeting = f Besprechung, f Sitzung; concert = n Konzert; wedding = f Hochzeit; exam = f Prüfung; course = m Kurs
party = f Feier, n Fest; lecture = f Vorlesung; auction = f Versteigerung, f Auktion
"""
SAYING = """
says=sagt knows=weiß believes=glaubt hopes=hofft writes=schreibt hears=hört
"""
MONEY = """
euros=Euro dollars=Dollar francs=Franken pounds=Pfund
"""
