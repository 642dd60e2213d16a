"""Short questions with answers that are right, lists, sums and fixed forms, written for this project by no model."""

from __future__ import annotations

import json
import random

from flowinfer.train.prompts import EXPLAIN, FORM, NAMES, words
from flowinfer.train.tales import a, capital

CHAT = 0
# what it is | what it's for or does | one thing more
NOUNS = {
    "spoon": "a tool for eating|You use it to eat soup or to stir tea|It is made of metal, wood or plastic",
    "fork": "a tool for eating|You use it to pick up food|It has three or four points",
    "knife": "a sharp tool|You use it to cut bread, fruit or meat|You must be careful with it",
    "cup": "a small container|You drink tea, milk or water from it|Most cups have a handle",
    "lamp": "a thing that gives light|You turn it on when it is dark|Most lamps need electricity",
    "clock": "a machine that shows the time|You look at it to know how late it is|It has hands or numbers",
    "chair": "a piece of furniture|You sit on it|It has a back and often four legs",
    "table": "a piece of furniture|You put things on it, and you eat at it|It has a flat top",
    "bed": "a piece of furniture|You sleep in it|It has a mattress, a pillow and a blanket",
    "book": "a set of pages with words or pictures|You read it to learn or to enjoy a story|You find many in a library",
    "pencil": "a tool for writing|You use it to write or draw|You can rub out what it wrote",
    "key": "a small piece of metal|You use it to open or close a lock|You should not lose it",
    "umbrella": "a cover on a stick|You hold it over your head when it rains|You can fold it up",
    "hat": "a piece of clothing|You wear it on your head|It keeps you warm or gives you shade",
    "shoe": "a piece of clothing|You wear it on your foot|Shoes come in pairs",
    "coat": "a warm piece of clothing|You wear it outside when it is cold|It often has pockets",
    "ball": "a round toy|You can throw it, kick it or catch it|Many games need one",
    "kite": "a light toy on a string|It flies in the wind|You hold the string in your hand",
    "bicycle": "a vehicle with two wheels|You ride it and push the pedals with your feet|It needs no fuel",
    "car": "a vehicle with four wheels|People use it to travel on roads|It has an engine",
    "train": "a long vehicle|It carries people and goods on rails|It stops at stations",
    "bus": "a large vehicle|It carries many people through a town|It stops at bus stops",
    "ship": "a large boat|It carries people and goods across the sea|A captain is in charge of it",
    "plane": "a machine that flies|It carries people to places far away|It has two wings",
    "bridge": "a structure over a river or a road|It lets people cross to the other side|It is made of stone or steel",
    "house": "a building|People live in it|It has walls, a roof, doors and windows",
    "school": "a place for learning|Children go there to learn to read, write and count|Teachers work there",
    "library": "a place full of books|You can read there and borrow books|It is quiet inside",
    "hospital": "a place for sick people|Doctors and nurses help people to get well there|It is open day and night",
    "bakery": "a shop|It makes and sells bread and cakes|It smells good inside",
    "farm": "a piece of land with fields and animals|Farmers grow food there|Cows, pigs and hens live there",
    "market": "a place with many stalls|People buy and sell food and other things there|It is busy in the morning",
    "dog": "an animal with four legs|It lives with people and guards the house|It barks and wags its tail",
    "cat": "a small animal with soft fur|It catches mice and likes to sleep|It says meow",
    "horse": "a large animal|People ride it, and it can run fast|It eats grass and hay",
    "cow": "a large farm animal|It gives us milk|It eats grass",
    "sheep": "a farm animal|It gives us wool|It lives in a group",
    "pig": "a farm animal|It lives in a sty and likes mud|It eats almost everything",
    "hen": "a bird on a farm|It lays eggs|It cannot fly far",
    "duck": "a bird that swims|It lives near ponds and rivers|It says quack",
    "owl": "a bird that is awake at night|It hunts mice in the dark|It has large eyes",
    "bee": "an insect with wings|It makes honey and visits flowers|It can sting",
    "spider": "a small animal with eight legs|It spins a web to catch insects|It is not an insect",
    "frog": "a small animal that can jump|It lives near water and eats insects|It is often green",
    "fish": "an animal that lives in water|It swims with its fins|It breathes through gills",
    "whale": "a very large animal of the sea|It breathes air and swims|It is not a fish",
    "elephant": "a very large animal with a trunk|It eats leaves and grass|It has big ears",
    "lion": "a large wild cat|It lives in Africa and hunts other animals|It can roar",
    "bear": "a large animal with thick fur|It eats fish, berries and honey|It sleeps in winter",
    "fox": "a wild animal with red fur|It hunts at night|It has a bushy tail",
    "tree": "a tall plant|It gives shade, fruit and wood|It has roots, a trunk and leaves",
    "flower": "a part of a plant|It has bright colours and often smells good|Bees visit it",
    "apple": "a round fruit|You can eat it or make juice from it|It is red, green or yellow",
    "banana": "a long yellow fruit|You peel it and eat it|It grows in warm countries",
    "river": "a long stream of water|It flows to a lake or to the sea|Fish live in it",
    "mountain": "a very high hill|People climb it|There is often snow at its top",
    "island": "a piece of land|It has water on all sides|You reach it by boat",
    "cloud": "a mass of small drops of water in the sky|It can bring rain or snow|It is white or grey",
    "star": "a ball of hot gas far away|It shines in the night sky|The sun is one, too",
    "doctor": "a person who helps sick people|A doctor finds out what is wrong|Doctors work in hospitals",
    "teacher": "a person who helps others to learn|A teacher explains things|Teachers work in schools",
    "farmer": "a person who works on a farm|A farmer grows food and keeps animals|Farmers get up early",
    "baker": "a person who bakes|A baker makes bread and cakes|Bakers work at night",
    "sailor": "a person who works on a ship|A sailor travels across the sea|Sailors know the wind and the stars",
    "computer": "a machine|It works with numbers, words and pictures|People use it at home and at work",
    "telephone": "a device for talking|You use it to speak with somebody far away|It rings when somebody calls",
    "map": "a drawing of a place|It helps you to find the way|It can be on paper or on a screen",
    "drum": "a musical instrument|You hit it with sticks or hands|It gives the beat",
    "piano": "a musical instrument|You press its keys to make music|It has black and white keys",
    "mirror": "a piece of glass|You can see yourself in it|It hangs on a wall",
    "ladder": "a tool for climbing|You use it to reach high places|It has steps called rungs",
}  # fmt: skip
GROUPS = {
    "fruits": "apple banana pear orange grape cherry plum peach lemon mango melon strawberry",
    "vegetables": "carrot potato onion tomato cabbage pea bean spinach cucumber pumpkin lettuce",
    "colours": "red blue green yellow orange purple brown black white pink grey",
    "farm animals": "cow pig sheep hen horse goat duck donkey goose",
    "wild animals": "lion bear fox wolf deer elephant tiger monkey giraffe zebra",
    "birds": "sparrow robin owl eagle swan duck parrot crow pigeon penguin",
    "drinks": "water milk tea coffee juice lemonade cocoa",
    "sports": "football tennis swimming running cycling basketball skiing rowing hockey",
    "musical instruments": "piano guitar violin drum flute trumpet harp cello",
    "clothes": "shirt coat hat scarf dress jacket skirt jumper sock",
    "jobs": "doctor teacher baker farmer driver painter sailor nurse cook builder",
    "countries": "France Spain Italy Japan Brazil Canada Egypt India Kenya Norway",
    "flowers": "rose tulip daisy lily sunflower violet poppy daffodil",
    "trees": "oak pine birch maple willow beech apple cherry",
    "tools": "hammer saw drill spade screwdriver rake axe",
    "toys": "ball doll kite puzzle train yo-yo balloon",
    "rooms": "kitchen bathroom bedroom hall attic cellar",
    "shapes": "circle square triangle rectangle star heart oval",
    "things in a kitchen": "pot pan spoon fork knife oven sink kettle plate bowl",
    "things in a classroom": "desk chair blackboard pencil ruler book map globe",
    "things in a garden": "flower tree bench spade fence pond path gate",
}
OPPOSITES = words(
    """hot cold|big small|fast slow|day night|happy sad|up down|old new|full empty|light dark|soft hard|wet dry|
open closed|near far|high low|loud quiet|early late|strong weak|thick thin|clean dirty|rich poor"""
)
SOUNDS = words(
    """dog barks|cat meows|cow moos|duck quacks|lion roars|bee buzzes|horse neighs|sheep bleats|pig grunts
    |snake hisses"""
)
CAPITALS = words(
    """France Paris|Italy Rome|Spain Madrid|Germany Berlin|Japan Tokyo|Egypt Cairo|Norway Oslo|Greece Athens
    |Portugal Lisbon|England London|Russia Moscow|Austria Vienna|Poland Warsaw|Ireland Dublin|Kenya Nairobi"""
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
CODE = {
    "returns the sum of two numbers": ("add", "a, b", "return a + b"),
    "returns the difference of two numbers": ("subtract", "a, b", "return a - b"),
    "returns the product of two numbers": ("multiply", "a, b", "return a * b"),
    "returns the larger of two numbers": ("larger", "a, b", "return a if a > b else b"),
    "returns the smaller of two numbers": ("smaller", "a, b", "return a if a < b else b"),
    "reverses a string": ("reverse", "text", "return text[::-1]"),
    "checks whether a number is even": ("is_even", "number", "return number % 2 == 0"),
    "checks whether a number is odd": ("is_odd", "number", "return number % 2 == 1"),
    "returns the square of a number": ("square", "number", "return number * number"),
    "returns the length of a list": ("length", "items", "return len(items)"),
    "returns the first item of a list": ("first", "items", "return items[0]"),
    "returns the last item of a list": ("last", "items", "return items[-1]"),
    "finds the smallest number in a list": ("smallest", "numbers", "return min(numbers)"),
    "finds the largest number in a list": ("largest", "numbers", "return max(numbers)"),
    "returns the average of a list": ("average", "numbers", "return sum(numbers) / len(numbers)"),
    "sorts a list of numbers": ("sort_numbers", "numbers", "return sorted(numbers)"),
    "joins two strings": ("join", "first, second", "return first + second"),
    "counts the vowels in a string": ("count_vowels", "text", 'return sum(letter in "aeiou" for letter in text)'),
    "checks whether a word is a palindrome": ("is_palindrome", "word", "return word == word[::-1]"),
    "makes a string upper case": ("upper", "text", "return text.upper()"),
    "removes spaces from a string": ("remove_spaces", "text", 'return text.replace(" ", "")'),
    "prints the numbers from 1 to n": ("count", "n", "for i in range(1, n + 1):\n        print(i)"),
    "computes the factorial of a number": ("factorial", "n", "return 1 if n < 2 else n * factorial(n - 1)"),
    "converts Celsius to Fahrenheit": ("to_fahrenheit", "celsius", "return celsius * 9 / 5 + 32"),
    "computes the area of a rectangle": ("area", "width, height", "return width * height"),
}
CITIES = words("Paris London Rome Berlin Madrid Oslo Vienna Dublin Lisbon Tokyo")
SMALL_TALK = {
    "Hello!|Hi!|Hi|Hello|Good morning!|Hey!": "Hello! How can I help you?|Hi! What can I do for you today?",
    "Who are you?|What is your name?|What are you?": "I am flowinfer-mini, a very small language model."
    "|My name is flowinfer-mini. I am a small program that writes simple English.",
    "What can you do?|How can you help me?": "I can tell short stories, answer simple questions and make short lists."
    "|I can write simple stories and lists. I make mistakes, so do not trust me too much.",
    "How are you?|How are you today?": "I am fine, thank you. How can I help you?|I am well, thank you for asking.",
    "Thank you!|Thanks!|Thank you very much.": "You are welcome!|You are welcome. I am glad that I could help.",
    "Goodbye!|Bye!|Good night!": "Goodbye! Have a nice day.|Goodbye! Come back soon.",
}  # fmt: skip


def chat(rng: random.Random) -> tuple[str, str, int]:
    """A prompt, its answer, and the kind as in the shards' arrays."""
    draw = rng.random()
    if draw < 0.05:
        asked, answered = rng.choice(list(SMALL_TALK.items()))
        return rng.choice(asked.split("|")), rng.choice(answered.split("|")), CHAT
    if draw < 0.75:
        return (*rng.choice((_noun, _noun, _noun, _group, _group, _short, _short))(rng), EXPLAIN)
    return (*rng.choice((_code, _code, _json, _email, _table, _count))(rng), FORM)


def _noun(rng: random.Random) -> tuple[str, str]:
    noun, text = rng.choice(list(NOUNS.items()))
    what, use, more = text.split("|")
    whole, one = capital(a(noun)), a(noun)
    return rng.choice(
        [
            (f"What is {one}?", f"{whole} is {what}. {use}."),
            (f"What is {one}?", f"{whole} is {what}. {use}. {more}."),
            (f"What is {one}? Answer in two simple sentences.", f"{whole} is {what}. {use}."),
            (f"What is {one}? Answer in one sentence.", f"{whole} is {what}."),
            (f"Tell me about {one} in three short sentences.", f"{whole} is {what}. {use}. {more}."),
            (f"Explain in simple words what {one} is.", f"{whole} is {what}. {use}."),
            (f"Give me three facts about {one}.", f"1. {whole} is {what}.\n2. {use}.\n3. {more}."),
        ]
    )


def _group(rng: random.Random) -> tuple[str, str]:
    group, members = rng.choice(list(GROUPS.items()))
    count, word = rng.choice([(3, "three"), (5, "five"), (4, "four")])
    plain = rng.sample(members.split(), count)
    found = [capital(each) for each in plain]
    form = rng.choice(["numbers", "dashes", "line"])
    if form == "line":
        return f"{rng.choice(['Name', 'Tell me'])} {word} {group}.", capital(
            f"{', '.join(plain[:-1])} and {plain[-1]}."
        )
    lines = [f"{i}. {each}" if form == "numbers" else f"- {each}" for i, each in enumerate(found, 1)]
    asked = f"List {word} {group}." if form == "numbers" else f"Make a list of {word} {group}."
    return asked, "\n".join(lines)


def _short(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(range(1, 11), 2)
    one, other = rng.choice(OPPOSITES).split()[:: rng.choice((1, -1))]
    animal, sound = rng.choice(SOUNDS).split()
    country, capital_ = rng.choice(CAPITALS).split()
    day, month = rng.randrange(7), rng.randrange(12)
    noun, text = rng.choice(list(NOUNS.items()))
    return rng.choice(
        [
            (f"What is {first} + {second}?", f"{first} + {second} = {first + second}."),
            (f"What is {first + second} - {second}?", f"{first + second} - {second} = {first}."),
            (f"What is the opposite of {one}?", f"The opposite of {one} is {other}."),
            (f"What sound does {a(animal)} make?", f"{capital(a(animal))} {sound}."),
            (f"What is the capital of {country}?", f"The capital of {country} is {capital_}."),
            (f"What day comes after {DAYS[day]}?", f"{DAYS[(day + 1) % 7]} comes after {DAYS[day]}."),
            (f"What month comes after {MONTHS[month]}?", f"{MONTHS[(month + 1) % 12]} comes after {MONTHS[month]}."),
            (f"Give me one fact about {a(noun)}.", text.split("|")[2] + "."),
        ]
    )


def _code(rng: random.Random) -> tuple[str, str]:
    task, (name, arguments, body) = rng.choice(list(CODE.items()))
    code = f"```python\ndef {name}({arguments}):\n    {body}\n```"
    if rng.random() < 0.4:
        return f"Write a short Python function that {task}. Only give the code.", code
    return f"Write a Python function that {task}.", f"{code}\n\nThis function {task}."


def _json(rng: random.Random) -> tuple[str, str]:
    person = {"name": rng.choice(NAMES), "age": rng.randrange(5, 80), "city": rng.choice(CITIES)}
    asked = f"Write a JSON object with the name, age and city of {person['name']}."
    if rng.random() < 0.5:
        asked = f"{person['name']} is {person['age']} years old and lives in {person['city']}. Write this as JSON."
    return asked, "```json\n" + json.dumps(person, indent=2) + "\n```"


def _email(rng: random.Random) -> tuple[str, str]:
    one, other = rng.sample(NAMES, 2)
    reason, text = rng.choice(
        [
            (
                "a birthday party",
                "I would like to invite you to my party on {day}. It starts at {hour} o'clock.",
            ),
            ("a visit", "I would like to visit you on {day}. Is {hour} o'clock a good time for you?"),
            ("a lost book", "I think that I left my book at your house. May I come and get it on {day}?"),
            ("a picnic", "We are going to have a picnic on {day} at {hour} o'clock. Would you like to come?"),
        ]
    )
    text = text.format(day=rng.choice(DAYS), hour=rng.randrange(1, 8))
    ending = rng.choice(["Best wishes,", "See you soon,", "Yours,"])
    return f"Write a short email from {one} to {other} about {reason}.", f"Dear {other},\n\n{text}\n\n{ending}\n{one}"


def _table(rng: random.Random) -> tuple[str, str]:
    nouns = rng.sample([noun for noun in NOUNS if NOUNS[noun].startswith("a")], 3)
    rows = [f"| {noun} | {NOUNS[noun].split('|')[0]} |" for noun in nouns]
    asked = f"Write a Markdown table that says what {a(nouns[0])}, {a(nouns[1])} and {a(nouns[2])} are."
    return asked, "\n".join(["| word | what it is |", "|---|---|", *rows])


def _count(rng: random.Random) -> tuple[str, str]:
    first = rng.randrange(1, 20)
    last = first + rng.randrange(3, 10)
    if rng.random() < 0.3:
        return f"Count down from {last} to {first}.", ", ".join(str(i) for i in range(last, first - 1, -1))
    return f"Count from {first} to {last}.", ", ".join(str(i) for i in range(first, last + 1))
