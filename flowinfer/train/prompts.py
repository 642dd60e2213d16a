"""Prompts that a small model can answer well: templates over plain words, written for this project.

Each comes with a kind, as in the shards' arrays: 1 story, 3 explanation or list, 4 code or fixed form.
"""

from __future__ import annotations

import random

STORY, EXPLAIN, FORM = 1, 3, 4


def words(text: str) -> list[str]:
    """The words of a text, or where it has bars, the phrases between them."""
    return [" ".join(part.split()) for part in (text.split("|") if "|" in text else text.split())]


NAMES = words(
    """Anna Ben Clara David Ella Finn Grace Henry Ivy Jack Kate Leo Lily Max Mia Nora Oliver Penny Ruby Sam Sophie Theo
Tom Violet Will Zoe Emma Noah Lucas Maya Oscar Alice Toby Rosie Jonas Hannah Peter Lucy Martin Nina"""
)
ANIMALS = words(
    """cat dog rabbit mouse fox bear owl duck frog squirrel hedgehog pony lamb turtle bee sparrow kitten puppy goat
penguin elephant lion whale deer badger robin snail donkey swan otter"""
)
THINGS = words(
    """ball boat kite lamp book key hat coat cup bell drum basket blanket apple cake bucket ladder candle mirror map
clock chair scarf shell flute balloon umbrella bicycle box button pencil letter coin seed feather lantern spoon ring
pillow teapot jar stone ribbon wagon"""
)
PLACES = words(
    """park garden forest beach farm kitchen school library market village harbour meadow barn mill bakery river
hill lake station bridge playground attic castle island orchard pond"""
)
FEELINGS = words("happy sad brave shy kind curious hungry sleepy lonely proud careful clever gentle busy patient")
LESSONS = words(
    """sharing|telling the truth|being brave|helping a friend|being patient|saying sorry|trying again|being kind
|listening|working together|hard work|taking care of others"""
)
TOPICS = words(
    """rain snow wind sunshine moonlight stars clouds rivers trees flowers bread milk cheese honey apples rice soup tea
salt sugar water fire glass paper wood iron gold stone sand books music painting dancing football swimming
reading writing cooking sleeping walking trains bicycles ships planes cars buses bridges roads houses doors windows
clocks lamps chairs tables beds shoes coats hats bags keys maps money banks shops schools teachers doctors farmers
bakers sailors painters builders drivers friends families birthdays holidays winter summer spring autumn morning night
dogs cats horses cows sheep birds fish bees spiders frogs lions bears whales elephants teeth eyes ears hands hair
bones sleep dreams laughter memory numbers letters words maps computers telephones cameras radios robots"""
)
PLACES_TO_LIST = words(
    """kitchen|classroom|garden|forest|farm|supermarket|library|bathroom|zoo|office|toy shop|hospital|
harbour|train station|park|school bag|picnic basket|tool box"""
)
GROUPS = words(
    """fruits|vegetables|colours|farm animals|wild animals|birds|drinks|sports|musical instruments|toys|clothes|
jobs|countries|rivers|trees|flowers|kinds of weather|parts of a car|shapes|tools|rooms of a house|months|
things that are round|things that are soft|ways to travel"""
)
TASKS = words(
    """make tea|boil an egg|wash your hands|plant a seed|clean a room|wrap a present|cross a road|brush your teeth
|make a sandwich|ride a bicycle|fly a kite|learn a new word|save money|pack a bag|write a letter|draw a cat|
care for a plant|make a friend|stay warm in winter|get a good night's sleep"""
)
FUNCTIONS = words(
    """returns the sum of two numbers|returns the larger of two numbers|reverses a string|counts the vowels in a
 string|checks whether a number is even|returns the square of a number|returns the length of a list|finds the smallest
 number in a list|prints the numbers from 1 to n|returns the average of a list|joins two strings|removes spaces from a
 string|checks whether a word is a palindrome|converts Celsius to Fahrenheit|returns the first item of a list|sorts a
 list of numbers|counts how often a letter occurs in a word|computes the area of a rectangle|computes the factorial of a
 number|makes a string upper case"""
)


def write(rng: random.Random) -> tuple[str, int]:
    """One prompt and its kind."""
    draw = rng.random()
    if draw < 0.15:
        return _story(rng), STORY
    if draw < 0.85:
        return _explain(rng), EXPLAIN
    return _form(rng), FORM


def _story(rng: random.Random) -> str:
    name, animal, thing, place = (rng.choice(words) for words in (NAMES, ANIMALS, THINGS, PLACES))
    other, feeling, lesson = rng.choice(NAMES), rng.choice(FEELINGS), rng.choice(LESSONS)
    return rng.choice(
        [
            f"Tell me a short story about {name} and a {thing}.",
            f"Tell me a short bedtime story about a {feeling} {animal} who finds a {thing}.",
            f"Write a short story about a {animal} named {name} who lives near a {place}.",
            f"Write a very short story about {name} and {other}. They meet at the {place}.",
            f"Write three short paragraphs about a {feeling} {animal}, a {thing} and {lesson}.",
            f"Write a story in five sentences about a {animal} who lost a {thing}.",
            f"Tell me a story for a small child about {lesson}.",
            f"Write a short story that takes place at a {place}. It is about {lesson}.",
        ]
    )


def _explain(rng: random.Random) -> str:
    topic, other, group = rng.choice(TOPICS), rng.choice(TOPICS), rng.choice(GROUPS)
    thing, place, task = rng.choice([*THINGS, *ANIMALS, *PLACES]), rng.choice(PLACES_TO_LIST), rng.choice(TASKS)
    return rng.choice(
        [
            f"What is a {thing}?",
            f"What is a {thing}? Answer in two simple sentences.",
            f"What can you do with a {rng.choice(THINGS)}?",
            f"Tell me about {topic} in three short sentences.",
            f"Explain in simple words: {topic}.",
            f"Why do people like {topic}?",
            f"Give me one fact about {topic}.",
            f"Give me three facts about {topic}.",
            f"What is the difference between {topic} and {other}?",
            f"List five {group}.",
            f"Name three {group}.",
            f"List five things that you can find in a {place}.",
            f"How do I {task}?",
            f"Give me three steps to {task}.",
            f"Describe a {rng.choice(PLACES)} in two sentences.",
            f"Write one sentence with the words {topic} and {thing}.",
        ]
    )


def _form(rng: random.Random) -> str:
    task = rng.choice(FUNCTIONS)
    return rng.choice(
        [
            f"Write a Python function that {task}.",
            f"Write a short Python function that {task}. Only give the code.",
            f"Write a JSON object with the name, age and city of {rng.choice(NAMES)}.",
            f"Write a Markdown table of three {rng.choice(GROUPS)} and one word about each.",
            f"Write a short email from {rng.choice(NAMES)} to {rng.choice(NAMES)} about a {rng.choice(THINGS)}.",
            f"Write a shopping list for a meal with {rng.choice(['bread', 'rice', 'soup', 'fish', 'eggs', 'fruit'])}.",
        ]
    )
