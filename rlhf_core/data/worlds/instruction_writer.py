"""Write answers that follow the instructions of the world of verifiable instructions, as demonstrations."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ATTEMPTS = 40
"""How often the writer tries; some answers are too long for some limits."""


def write_answer(
    question: str, instructions: Sequence[Mapping[str, Any]], rng: random.Random, *, min_words: int = 6
) -> str | None:
    """Return an answer to a question that follows all instructions; None if no attempt does.

    It has `min_words` words, or as many as the instructions allow.

    >>> write_answer("What is rain?", [{"kind": "lowercase"}, {"kind": "at_most_words", "count": 10}], random.Random(0))
    'rain is water that falls from clouds.'
    """
    asked = {one["kind"]: one for one in instructions}
    most = asked["at_most_words"]["count"] if "at_most_words" in asked else sys.maxsize
    for _ in range(ATTEMPTS):
        text = _attempt(rng.choice(ANSWERS[question]), asked, rng)
        if min(min_words, most) <= len(text.split()) <= most:
            return text
    return None


def _attempt(text: str, asked: Mapping[str, Mapping[str, Any]], rng: random.Random) -> str:
    """Return `text`, changed for every instruction but the limit of words."""
    if "keyword" in asked:
        text = f"{text} {rng.choice(WITH_KEYWORD[asked['keyword']['word']])}"
    if "first_word" in asked:
        text = f"{asked['first_word']['word']}, {text[0].lower()}{text[1:]}"
    if "last_word" in asked:
        text = f"{text.rstrip('.')}, {rng.choice(BEFORE_CLOSER[asked['last_word']['word']])}."
    if "exclamation" in asked:
        text = f"{text.rstrip('.')}!"
    if "no_commas" in asked:
        text = text.replace(",", "")
    if "lowercase" in asked:
        text = text.lower()
    return json.dumps({asked["json"]["key"]: text}) if "json" in asked else text


# ---------------------------------------------------------------- phrases

_TABLE = """\
What is rain? | Rain is water that falls from clouds. | Rain is made of drops of water that grow heavy in the clouds and fall.
Tell me about cats. | Cats are quiet pets that love sleep. | A cat is a small animal that hunts mice, sleeps a lot and likes warm places.
Why is the sky blue? | Air scatters the blue light most. | The air scatters the blue part of the light of the sun more than the red part.
How do you make tea? | Pour boiling water over tea leaves. | Boil some water, pour it over the tea leaves in a cup and wait a few minutes.
What does a teacher do? | A teacher helps students learn new things. | A teacher explains things to a class, asks questions and helps every student to learn.
Describe the ocean. | The ocean is deep and salty water. | The ocean is a huge body of salt water, with waves on top and fish below.
Why do people sleep? | Sleep lets the body and mind rest. | People sleep at night because the body needs rest to mend itself and to remember.
What is bread made of? | Bread is made of flour and water. | Bread is made of flour, water, salt and yeast, which makes the dough rise.
Tell me about dogs. | Dogs are loyal pets that love walks. | A dog is a friendly animal that guards the house, plays with children and likes walks.
How does a bicycle work? | Pedals and a chain turn the wheels. | You push the pedals of a bicycle, a chain turns the back wheel and you roll on.
What is the moon? | The moon is a rock that circles Earth. | The moon is a large ball of rock that goes around the earth once in a month.
Describe a forest. | A forest is full of tall trees. | A forest is a quiet place with tall trees, soft moss, birds and small animals.
What do bees do? | Bees visit flowers and make honey. | Bees fly from flower to flower, carry pollen and make honey in their hive.
Why do we brush our teeth? | Brushing keeps teeth clean and strong. | We brush our teeth to clean away food, so that they stay healthy and do not hurt.
What is snow? | Snow is frozen water from cold clouds. | Snow is made of tiny crystals of ice that form in cold clouds and fall in winter.
Tell me about horses. | Horses are strong animals that people ride. | A horse is a large animal that eats grass, runs fast and can carry a rider.
How do plants grow? | Plants grow with water and the sun. | A plant takes water from the soil and light from the sun, and makes its own food.
What is a library? | A library is a house of books. | A library is a quiet place where you can read books, borrow them and study.
Describe a good breakfast. | Eggs and toast make a fine breakfast. | For breakfast I would eat eggs, some fruit and warm toast with butter.
What does a doctor do? | A doctor treats people who are sick. | A doctor listens to patients, finds out what is wrong and helps them to get healthy.
Why do leaves fall in autumn? | Trees drop leaves to save water. | In autumn the days get short and cold, so trees let their leaves fall to save water.
What is music? | Music is sound with melody and rhythm. | Music is made of sounds that follow a rhythm, and it can make us glad or sad.
Tell me about elephants. | Elephants are huge animals with a trunk. | An elephant is the largest animal on land, and it drinks and grabs with its trunk.
How do birds fly? | Birds beat their wings against the air. | Birds have light bones and strong wings, and they push the air down to fly.
What is a desert? | A desert is dry land with sand. | A desert is a very dry place, hot by day and cold by night, with much sand.
Describe your favorite season. | Spring is warm and full of flowers. | In spring the days get longer, the trees turn green and the birds sing again.
What do farmers grow? | Farmers grow crops such as wheat. | Farmers grow wheat, corn and vegetables in their fields and sell them in town.
Why is exercise good? | Exercise keeps the body strong and healthy. | Exercise makes the heart strong, keeps the body fit and helps us to sleep well.
What is gold? | Gold is a precious yellow metal. | Gold is a soft yellow metal that does not rust, so it is used for rings.
Tell me about whales. | Whales are giant mammals of the sea. | A whale is a mammal that lives in the ocean, breathes air and sings to others.
How is cheese made? | Cheese is made from thick sour milk. | To make cheese, warm milk is thickened, the curd is pressed and then it ripens.
What is a volcano? | A volcano is a mountain with lava. | A volcano is a mountain from which hot lava, ash and gas come out of the ground.
Describe a city street. | Cars and people fill the busy street. | A city street has tall buildings, shops with lights, cars and people in a hurry.
What does a baker do? | A baker makes fresh bread and cakes. | A baker gets up early, mixes the dough and bakes bread and cakes in the oven.
Why do we wear coats? | A coat keeps us warm in winter. | We wear coats in cold weather because they hold the warm air close to the body.
What is a river? | A river is water that flows seaward. | A river is a stream of water that flows from the hills down to the sea.
Tell me about spiders. | Spiders have eight legs and spin webs. | A spider has eight legs, spins a web of silk and catches insects in it.
How do you cook rice? | Boil the rice in salted water. | Wash the rice, boil it in twice as much water and let it rest in the pot.
What is a camera for? | A camera is for taking pictures. | A camera catches light and turns it into a photo, so that we can keep a moment.
Describe a birthday party. | Friends bring gifts and eat cake. | At a birthday party there are candles on a cake, gifts, games and good friends.
What do firefighters do? | Firefighters put out fires and rescue people. | Firefighters rush to a fire, put it out with water and rescue those inside.
Why do we need water? | Our body needs water to live. | We need water because the body is made of it and loses some all day.
What is winter like? | Winter is cold with snow and ice. | In winter the days are short, the nights are cold and snow covers the fields.
Tell me about penguins. | Penguins are birds that swim very well. | A penguin is a bird that cannot fly, but it swims fast and lives on the ice.
How does a clock work? | Gears move the hands of the clock. | In a clock a spring or a battery turns the gears, and they move the hands.
What is a garden? | A garden is where flowers grow. | A garden is a piece of land where people grow flowers, fruit and vegetables.
Describe a train ride. | The train hums past fields and towns. | On a train ride you sit by the window and watch fields, towns and rivers go by.
What does a pilot do? | A pilot flies planes through the air. | A pilot checks the plane, takes off, flies it safely and brings everybody home.
Why do stars shine? | Stars shine because they burn inside. | A star shines because deep inside it tiny nuclei join and set energy free as light.
What is chocolate? | Chocolate is a sweet made from cocoa. | Chocolate is made from roasted cocoa beans, sugar and often milk, and it is sweet.
Tell me about lions. | Lions are big cats that hunt together. | A lion is a big cat that lives in a pride, sleeps by day and hunts at night.
How do you plant a tree? | Dig a hole and set the tree. | Dig a wide hole in the soil, set the tree in, cover the roots and water it.
What is a museum? | A museum shows art and old things. | A museum is a building that keeps art and objects of history for visitors to see.
Describe a rainy day. | Grey clouds bring rain all day. | On a rainy day the sky is grey, the streets are wet and umbrellas are everywhere.
What do engineers do? | Engineers design and build useful machines. | Engineers find out how to solve a problem, design a machine and test it.
Why do we eat vegetables? | Vegetables give us vitamins and health. | We eat vegetables because they are full of vitamins, keep us healthy and taste fresh.
What is the sun? | The sun is our nearest star. | The sun is a star that gives the earth its light and heat, day after day.
Tell me about butterflies. | Butterflies are insects with bright wings. | A butterfly begins as a caterpillar, sleeps in a shell and comes out with wings.
How do boats float? | A boat pushes water aside and floats. | A boat floats because the water that it pushes aside is as heavy as the boat.
What is a bridge? | A bridge lets us cross a river. | A bridge is built across a river or a road, so that people can get over it.
Describe a mountain. | A mountain is high with rocky peaks. | A mountain rises high above the land, with rock and snow on its peak.
What does a nurse do? | A nurse cares for patients every day. | A nurse looks after patients in a hospital, gives them medicine and comforts them.
Why do we laugh? | We laugh because something is funny. | We laugh when a joke surprises us, when we are happy and when others laugh too.
What is salt used for? | Salt gives food a better flavor. | Salt is used to season food when we cook, to keep meat fresh and to melt ice."""
ANSWERS: Mapping[str, Sequence[str]] = {
    question: answers for question, *answers in (line.split(" | ") for line in _TABLE.splitlines())
}
"""Question -> a short answer of six to eight words, and a longer one."""

WITH_KEYWORD: Mapping[str, tuple[str, ...]] = {
    "good": ("That is good.", "It is a good thing."),
    "world": ("The whole world knows it.", "You find it all over the world."),
    "people": ("Most people know it.", "That matters to people."),
    "simple": ("It is simple.", "The idea is simple."),
    "often": ("We see it often.", "That happens often."),
    "many": ("There are many.", "It matters to many."),
}
"""Keyword -> sentences that have it."""

BEFORE_CLOSER: Mapping[str, tuple[str, ...]] = {
    "today": ("today", "and it is so today"),
    "indeed": ("indeed", "very much indeed"),
    "always": ("always", "and that is so always"),
    "friend": ("my friend", "dear friend"),
    "truly": ("truly", "yes, truly"),
    "done": ("and we are done", "and it is done"),
}
"""Closing word -> ends of a sentence with it."""
