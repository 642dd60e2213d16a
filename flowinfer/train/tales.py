"""Short stories from plots of our own, with their prompts: text that holds together. No model wrote any of it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from flowinfer.train.prompts import ANIMALS, FEELINGS, NAMES, THINGS, words

GIRLS = words(
    """Anna Clara Ella Grace Ivy Kate Lily Mia Nora Penny Ruby Sophie Violet Zoe Emma Maya Alice Rosie Hannah
    Lucy Nina"""
)
FOODS = words(
    """apple|sandwich|piece of cake|bowl of soup|loaf of bread|bag of nuts|pear|slice of pie
    |plate of berries"""
)
PLACES = words("park garden forest beach farm market village harbour meadow mill bakery river hill lake castle pond")
OBJECTS = [thing for thing in THINGS if thing[0] not in "aeiou"]
SPOTS = words("under a bench|behind a tree|in the tall grass|next to the gate|under some leaves|on top of a wall")
FEARS = words("the dark|deep water|loud thunder|high places|big dogs|being alone")
SKILLS = words(
    """ride a bicycle|swim|fly a kite|bake bread|climb a tree|play the drum|draw a horse|whistle a tune
|build a tower|skip a rope"""
)
GAMES = words("hide and seek|catch|a game with stones|tag|a guessing game|a jumping game")
SOUNDS = words("a small cry|a soft noise|a quiet voice|somebody calling|a strange sound")
TRAPS = words("in a deep hole|in a thorny bush|under a fallen branch|behind a locked gate|on a high rock")
TOOLS = words("a long rope|a strong stick|a little ladder|both hands|a basket")


@dataclass
class Cast:
    """Who and what a story is about. hero and friend are as a sentence names them the second time: Mia, the fox."""

    rng: random.Random
    hero: str
    full: str
    they: str
    them: str
    their: str
    friend: str
    friend_full: str
    details: dict[str, str]

    def pick(self, *texts: str) -> str:
        """One of the texts, with its {names} filled in; capitals give capitals."""
        filled = {**self.details, **{k: v for k, v in self.__dict__.items() if isinstance(v, str)}}
        return self.rng.choice(texts).format(**filled, **{capital(k): capital(v) for k, v in filled.items()})


def capital(text: str) -> str:
    """With its first letter upper case."""
    return text[:1].upper() + text[1:]


def a(noun: str) -> str:
    """With its article."""
    return f"{'an' if noun[0] in 'aeiou' and not noun.startswith('uni') else 'a'} {noun}"


def make_cast(rng: random.Random, *, animal: bool) -> Cast:
    """Children or animals; details are drawn once for the whole story."""
    spot, wrong = rng.sample(SPOTS, 2)
    choices = {"thing": OBJECTS, "place": PLACES, "food": FOODS, "fear": FEARS, "skill": SKILLS, "game": GAMES}
    choices |= {"sound": SOUNDS, "trap": TRAPS, "tool": TOOLS}
    details = {name: rng.choice(found) for name, found in choices.items()} | {"spot": spot, "wrong": wrong}
    feeling = rng.choice(FEELINGS)
    if animal:
        kind, other = rng.sample(ANIMALS, 2)
        they, them, their = rng.choice([("he", "him", "his"), ("she", "her", "her")])
        full = a(f"{feeling} {kind}")
        return Cast(rng, f"the {kind}", full, they, them, their, f"the {other}", a(other), details)
    name, friend = rng.sample(NAMES, 2)
    they, them, their = ("she", "her", "her") if name in GIRLS else ("he", "him", "his")
    kind = "girl" if name in GIRLS else "boy"
    full = f"{a(f'{feeling} {kind}')} named {name}"
    friend_full = f"{rng.choice(['a friend', 'a child'])} named {friend}"
    return Cast(rng, name, full, they, them, their, friend, friend_full, details)


def opening(c: Cast) -> str:
    """The first sentence."""
    return c.pick(
        "Once upon a time, there was {full} who lived near a {place}.",
        "{Full} lived in a small house by the {place}.",
        "There once was {full}. {They} lived close to a {place}.",
        "Long ago, {full} lived at the edge of a {place}.",
    )


def lost(c: Cast) -> list[str]:
    """Being patient."""
    return [
        opening(c) + c.pick(
            " {Hero} had a {thing} and took it everywhere.",
            " More than anything else, {hero} loved {their} {thing}.",
        ) + c.pick(" One morning, the {thing} was gone.", " But one day, {hero} could not find the {thing}."),
        c.pick(
            "{Hero} looked {wrong}, but it was not there. Then {hero} met {friend_full}.",
            "{They} searched the {place}. {They} looked {wrong}, but found nothing. Then {friend_full} came along.",
        ) + c.pick(
            ' "Do not worry," said {friend}. "We will look for it together."',
            ' "I will help you," said {friend}. "Four eyes see more than two."',
        ),
        c.pick(
            "They looked slowly and with care. At last, {friend} saw the {thing}. It was {spot}!",
            "They took their time. And there it was: the {thing} lay {spot}.",
        ) + c.pick(
            " {Hero} was very happy and thanked {friend}. From that day on, they were best friends.",
            ' "Thank you!" said {hero}. {They} had learned that it helps to be patient.',
        ),
    ]  # fmt: skip


def share(c: Cast) -> list[str]:
    """Sharing."""
    return [
        opening(c) + c.pick(" One day, {hero} had a big {food}.", " At noon, {hero} sat down with a fresh {food}."),
        c.pick(
            "Then {friend_full} came by. {Friend} had nothing to eat and looked sad.",
            "{Friend_full} stood nearby and looked hungry.",
        ) + c.pick(
            " At first, {hero} did not want to share. Then {they} thought about how it feels to be hungry.",
            " {Hero} thought for a moment. It was a small meal for two, but it was enough.",
        ),
        c.pick(
            '"Here, take half of it," said {hero}. {Friend} smiled, and they ate together.',
            '{Hero} gave {friend} half of the {food}. "Thank you," said {friend}. "You are very kind."',
        ) + c.pick(
            " The food tasted better than ever. {Hero} had learned that sharing makes everyone happy.",
            " The next day, {friend} brought something for {hero}. That is how friends are made.",
        ),
    ]  # fmt: skip


def honest(c: Cast) -> list[str]:
    """Telling the truth."""
    return [
        opening(c) + c.pick(
            " One day, {hero} found a beautiful {thing} at the {place}.",
            " On a walk, {hero} saw something shiny. It was a {thing}.",
        ) + c.pick(' "I wish it were mine," thought {hero}.', " {They} wanted to keep it."),
        c.pick(
            "Soon after, {friend_full} came by and looked for something. \"I have lost my {thing},\" said {friend}.",
            "Then {hero} met {friend_full}, who was crying. \"My {thing} is gone,\" said {friend}.",
        ) + c.pick(
            " {Hero} could have said nothing. But that would not have been right.",
            " {Hero} felt the {thing} in {their} hands and took a deep breath.",
        ),
        c.pick(
            '"I found it," said {hero} and gave it back. {Friend} was so happy.',
            '"Here it is," said {hero}. "I found it today."',
        ) + c.pick(
            " \"Thank you for telling the truth,\" said {friend}. {Hero} felt light and glad all day.",
            " {Friend} thanked {hero} with a big smile. Telling the truth was the best choice.",
        ),
    ]  # fmt: skip


def afraid(c: Cast) -> list[str]:
    """Being brave."""
    return [
        opening(c) + c.pick(
            " {Hero} was afraid of {fear}.", " There was only one thing that scared {hero}: {fear}."),
        c.pick(
            "One evening, {friend_full} needed help. The {thing} of {friend} was at the other end of the {place}.",
            "One day, {friend} called for help from the {place}. {Friend} had lost a {thing}.",
        ) + c.pick(" {Hero}'s heart beat fast. But {they} wanted to help.", " {Hero} was scared but went anyway."),
        c.pick(
            "Step by step, {hero} walked on. It was not as bad as {they} had thought.",
            '"I can do this," said {hero} again and again.',
        ) + c.pick(
            " Together they found the {thing} and went home. Now {hero} knew what being brave means: to be scared and"
            " to do it all the same.",
            ' "You are so brave!" said {friend}. {Hero} smiled, and {fear} did not seem so bad any more.',
        ),
    ]  # fmt: skip


def again(c: Cast) -> list[str]:
    """Trying again."""
    return [
        opening(c) + c.pick(" {Hero} wanted to learn to {skill}.", " {Their} biggest wish was to {skill}."),
        c.pick(
            "On the first day, it did not work at all. On the second day, it went wrong again.",
            "{They} tried once, and it went wrong. {They} tried twice, and it went wrong again.",
        ) + c.pick(
            ' "Do not give up," said {friend_full}. "Everybody starts small."',
            ' {Friend_full} saw it and said: "Try it once more. I will watch."',
        ),
        c.pick(
            "{Hero} tried again every day. After a week, {they} could {skill}!",
            "So {hero} tried again, slowly this time. And it worked!",
        ) + c.pick(
            " {Friend} clapped and cheered. Hard work had paid off.",
            " {They} was proud and danced around the {place}. Now {hero} helps others who want to learn it.",
        ),
    ]  # fmt: skip


def rescue(c: Cast) -> list[str]:
    """Helping a friend."""
    return [
        opening(c) + c.pick(" One day, {hero} heard {sound}. Who was it?", " Once, {hero} heard {sound} nearby."),
        c.pick("{Friend_full} was stuck {trap}.", "There was {friend_full}, stuck {trap}.")
        + c.pick(' "Please help me," said {friend}.', ' "I cannot get out," said {friend}. "Can you help me?"'),
        c.pick("{Hero} ran home and came back with {tool}. Slowly and carefully, {they} helped {friend} out.",
               "{Hero} used {tool} and pulled as hard as {they} could. At last, {friend} was free.")
        + c.pick(
            ' "You saved me!" said {friend}. They became good friends and met at the {place} every day.',
            " {Friend} gave {hero} a {thing} to say thank you. Helping a friend is the best thing that one can do.",
        ),
    ]  # fmt: skip


def meeting(c: Cast) -> list[str]:
    """Making a friend."""
    return [
        opening(c) + c.pick(" {Hero} had nobody to play with.", " {Hero} often played alone with a {thing}."),
        c.pick(
            "One sunny day, {friend_full} came to the {place}. Both were too shy to speak.",
            "One day, {hero} saw {friend_full} at the {place}. {Friend} looked lonely, too.",
        ) + c.pick(' {Hero} said: "Hello! Do you want to play {game}?"', ' "May I play with you?" asked {friend}.'),
        c.pick(
            "They played {game} until the sun went down. They laughed a lot.",
            "They played {game} all afternoon and shared the {thing}.",
        ) + c.pick(
            ' "Will you come back tomorrow?" asked {hero}. "Of course," said {friend}.',
            " When it was time to go home, they were friends. It takes only one kind word to begin.",
        ),
    ]  # fmt: skip


def found(c: Cast) -> list[str]:
    """Being curious."""
    return [
        opening(c) + c.pick(
            " One morning, {hero} found an old {thing} in the {place}.",
            " While walking through the {place}, {hero} found a {thing}.",
        ),
        c.pick(
            "It was dusty, so {hero} cleaned it with care. Soon it looked like new.",
            "{Hero} had never seen such a beautiful {thing}. {They} wondered whose it was.",
        ) + c.pick(
            " {They} showed it to {friend_full}.", " Then {hero} asked {friend_full} about it.",
        ) + c.pick(
            ' "It belonged to my grandmother," said {friend}. "You may keep it, if you take good care of it."',
            ' "What a lovely {thing}!" said {friend}. "Let us put it where everybody can see it."',
        ),
        c.pick(
            "{Hero} put the {thing} by the window. Every night, {they} looked at it before going to sleep.",
            "From then on, the {thing} had a place of its own, and {hero} was happy. Good night.",
        ),
    ]  # fmt: skip


PLOTS = {
    lost: "being patient", share: "sharing", honest: "telling the truth", afraid: "being brave", again: "trying again",
    rescue: "helping a friend", meeting: "making a friend", found: "being curious",
}  # fmt: skip


def story(rng: random.Random) -> tuple[str, str]:
    """A prompt and a story that fits it, of one or three paragraphs."""
    c = make_cast(rng, animal=rng.random() < 0.5)
    plot, lesson = rng.choice(list(PLOTS.items()))
    parts = plot(c)
    animal = c.hero.startswith("the ")
    who = c.full if animal else c.hero
    asked = [
        f"Tell me a short story about {who}.",
        f"Write a short story about {lesson}.",
        f"Tell me a story about {lesson} for a small child.",
        f"Write a story about {who} and {c.friend if not animal else c.friend_full}.",
        f"Write a very short story about {who}. It is about {lesson}.",
        f"Tell me a bedtime story about {who}.",
    ]
    if plot in (lost, honest, found):
        asked += [
            f"Tell me a short bedtime story about {who} who finds a {c.details['thing']}.",
            f"Tell me a short story about {who} and a {c.details['thing']}.",
        ] * 2
    three = f"Write three short paragraphs about {who}, a {c.details['thing']} and {lesson}."
    if (plot in (lost, honest, afraid, found)) and rng.random() < 0.3:
        return three, "\n\n".join(parts)
    if rng.random() < 0.05:
        asked = ["Tell me a story.", "Write a short story.", "Tell me a bedtime story.", "Can you tell me a story?"]
    return rng.choice(asked), (" " if rng.random() < 0.35 else "\n\n").join(parts)
