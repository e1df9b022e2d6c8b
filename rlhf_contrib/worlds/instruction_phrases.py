"""The topics, answers and instructions of the world of verifiable instructions."""

from __future__ import annotations

from collections.abc import Sequence

_TABLE = """\
What is rain? | rain water cloud drop wet | Rain is water that falls from clouds. | Rain is made of drops of water that grow heavy in the clouds and fall.
Tell me about cats. | cat kitten feline pet | Cats are quiet pets that love sleep. | A cat is a small animal that hunts mice, sleeps a lot and likes warm places.
Why is the sky blue? | sky blue light scatter sun | Air scatters the blue light most. | The air scatters the blue part of the light of the sun more than the red part.
How do you make tea? | tea water boil cup leaf brew | Pour boiling water over tea leaves. | Boil some water, pour it over the tea leaves in a cup and wait a few minutes.
What does a teacher do? | teach student school class learn | A teacher helps students learn new things. | A teacher explains things to a class, asks questions and helps every student to learn.
Describe the ocean. | ocean sea water wave | The ocean is deep and salty water. | The ocean is a huge body of salt water, with waves on top and fish below.
Why do people sleep? | sleep rest body night | Sleep lets the body and mind rest. | People sleep at night because the body needs rest to mend itself and to remember.
What is bread made of? | bread flour dough bak yeast | Bread is made of flour and water. | Bread is made of flour, water, salt and yeast, which makes the dough rise.
Tell me about dogs. | dog pupp pet canine | Dogs are loyal pets that love walks. | A dog is a friendly animal that guards the house, plays with children and likes walks.
How does a bicycle work? | bicycle bike pedal wheel | Pedals and a chain turn the wheels. | You push the pedals of a bicycle, a chain turns the back wheel and you roll on.
What is the moon? | moon earth night lunar orbit | The moon is a rock that circles Earth. | The moon is a large ball of rock that goes around the earth once in a month.
Describe a forest. | forest tree wood leaf | A forest is full of tall trees. | A forest is a quiet place with tall trees, soft moss, birds and small animals.
What do bees do? | bee honey flower pollin hive | Bees visit flowers and make honey. | Bees fly from flower to flower, carry pollen and make honey in their hive.
Why do we brush our teeth? | teeth tooth brush clean mouth dent | Brushing keeps teeth clean and strong. | We brush our teeth to clean away food, so that they stay healthy and do not hurt.
What is snow? | snow ice cold winter flake | Snow is frozen water from cold clouds. | Snow is made of tiny crystals of ice that form in cold clouds and fall in winter.
Tell me about horses. | horse ride animal gallop | Horses are strong animals that people ride. | A horse is a large animal that eats grass, runs fast and can carry a rider.
How do plants grow? | plant grow sun water soil seed | Plants grow with water and the sun. | A plant takes water from the soil and light from the sun, and makes its own food.
What is a library? | library librar book read | A library is a house of books. | A library is a quiet place where you can read books, borrow them and study.
Describe a good breakfast. | breakfast egg toast fruit eat morning meal | Eggs and toast make a fine breakfast. | For breakfast I would eat eggs, some fruit and warm toast with butter.
What does a doctor do? | doctor patient medic health treat | A doctor treats people who are sick. | A doctor listens to patients, finds out what is wrong and helps them to get healthy.
Why do leaves fall in autumn? | leaf leaves autumn fall tree | Trees drop leaves to save water. | In autumn the days get short and cold, so trees let their leaves fall to save water.
What is music? | music sound song melod rhythm | Music is sound with melody and rhythm. | Music is made of sounds that follow a rhythm, and it can make us glad or sad.
Tell me about elephants. | elephant trunk animal | Elephants are huge animals with a trunk. | An elephant is the largest animal on land, and it drinks and grabs with its trunk.
How do birds fly? | bird fly wing flight feather | Birds beat their wings against the air. | Birds have light bones and strong wings, and they push the air down to fly.
What is a desert? | desert sand dry hot | A desert is dry land with sand. | A desert is a very dry place, hot by day and cold by night, with much sand.
Describe your favorite season. | season spring summer autumn fall winter | Spring is warm and full of flowers. | In spring the days get longer, the trees turn green and the birds sing again.
What do farmers grow? | farm crop grow vegetable field | Farmers grow crops such as wheat. | Farmers grow wheat, corn and vegetables in their fields and sell them in town.
Why is exercise good? | exercise health body fit strong | Exercise keeps the body strong and healthy. | Exercise makes the heart strong, keeps the body fit and helps us to sleep well.
What is gold? | gold metal yellow precious | Gold is a precious yellow metal. | Gold is a soft yellow metal that does not rust, so it is used for rings.
Tell me about whales. | whale ocean sea mammal | Whales are giant mammals of the sea. | A whale is a mammal that lives in the ocean, breathes air and sings to others.
How is cheese made? | cheese milk curd | Cheese is made from thick sour milk. | To make cheese, warm milk is thickened, the curd is pressed and then it ripens.
What is a volcano? | volcano lava erupt magma mountain | A volcano is a mountain with lava. | A volcano is a mountain from which hot lava, ash and gas come out of the ground.
Describe a city street. | street city car people build | Cars and people fill the busy street. | A city street has tall buildings, shops with lights, cars and people in a hurry.
What does a baker do? | bak bread cake oven | A baker makes fresh bread and cakes. | A baker gets up early, mixes the dough and bakes bread and cakes in the oven.
Why do we wear coats? | coat warm cold wear weather | A coat keeps us warm in winter. | We wear coats in cold weather because they hold the warm air close to the body.
What is a river? | river water flow stream | A river is water that flows seaward. | A river is a stream of water that flows from the hills down to the sea.
Tell me about spiders. | spider web leg insect | Spiders have eight legs and spin webs. | A spider has eight legs, spins a web of silk and catches insects in it.
How do you cook rice? | rice water cook boil pot | Boil the rice in salted water. | Wash the rice, boil it in twice as much water and let it rest in the pot.
What is a camera for? | camera photo picture image | A camera is for taking pictures. | A camera catches light and turns it into a photo, so that we can keep a moment.
Describe a birthday party. | birthday party cake gift friend | Friends bring gifts and eat cake. | At a birthday party there are candles on a cake, gifts, games and good friends.
What do firefighters do? | fire rescue save | Firefighters put out fires and rescue people. | Firefighters rush to a fire, put it out with water and rescue those inside.
Why do we need water? | water drink body thirst hydrat | Our body needs water to live. | We need water because the body is made of it and loses some all day.
What is winter like? | winter cold snow ice | Winter is cold with snow and ice. | In winter the days are short, the nights are cold and snow covers the fields.
Tell me about penguins. | penguin bird ice antarctic swim | Penguins are birds that swim very well. | A penguin is a bird that cannot fly, but it swims fast and lives on the ice.
How does a clock work? | clock time hour hand gear | Gears move the hands of the clock. | In a clock a spring or a battery turns the gears, and they move the hands.
What is a garden? | garden plant flower vegetable grow | A garden is where flowers grow. | A garden is a piece of land where people grow flowers, fruit and vegetables.
Describe a train ride. | train ride rail travel window | The train hums past fields and towns. | On a train ride you sit by the window and watch fields, towns and rivers go by.
What does a pilot do? | pilot plane fly aircraft | A pilot flies planes through the air. | A pilot checks the plane, takes off, flies it safely and brings everybody home.
Why do stars shine? | star shine light nuclear energy | Stars shine because they burn inside. | A star shines because deep inside it tiny nuclei join and set energy free as light.
What is chocolate? | chocolate cocoa sweet candy | Chocolate is a sweet made from cocoa. | Chocolate is made from roasted cocoa beans, sugar and often milk, and it is sweet.
Tell me about lions. | lion pride animal cat | Lions are big cats that hunt together. | A lion is a big cat that lives in a pride, sleeps by day and hunts at night.
How do you plant a tree? | tree plant hole soil dig root | Dig a hole and set the tree. | Dig a wide hole in the soil, set the tree in, cover the roots and water it.
What is a museum? | museum art exhibit histor | A museum shows art and old things. | A museum is a building that keeps art and objects of history for visitors to see.
Describe a rainy day. | rain day wet cloud umbrella | Grey clouds bring rain all day. | On a rainy day the sky is grey, the streets are wet and umbrellas are everywhere.
What do engineers do? | engineer design build machine solve | Engineers design and build useful machines. | Engineers find out how to solve a problem, design a machine and test it.
Why do we eat vegetables? | vegetable eat health vitamin nutri | Vegetables give us vitamins and health. | We eat vegetables because they are full of vitamins, keep us healthy and taste fresh.
What is the sun? | sun star light heat | The sun is our nearest star. | The sun is a star that gives the earth its light and heat, day after day.
Tell me about butterflies. | butterfl wing insect caterpillar | Butterflies are insects with bright wings. | A butterfly begins as a caterpillar, sleeps in a shell and comes out with wings.
How do boats float? | boat float water buoy | A boat pushes water aside and floats. | A boat floats because the water that it pushes aside is as heavy as the boat.
What is a bridge? | bridge river cross road | A bridge lets us cross a river. | A bridge is built across a river or a road, so that people can get over it.
Describe a mountain. | mountain peak high rock snow | A mountain is high with rocky peaks. | A mountain rises high above the land, with rock and snow on its peak.
What does a nurse do? | nurse patient care hospital | A nurse cares for patients every day. | A nurse looks after patients in a hospital, gives them medicine and comforts them.
Why do we laugh? | laugh funny happ joke humor | We laugh because something is funny. | We laugh when a joke surprises us, when we are happy and when others laugh too.
What is salt used for? | salt food cook flavor season | Salt gives food a better flavor. | Salt is used to season food when we cook, to keep meat fresh and to melt ice."""
_ROWS = [line.split(" | ") for line in _TABLE.splitlines()]
TOPICS: tuple[tuple[str, str], ...] = tuple((question, words) for question, words, *_ in _ROWS)
"""Question -> words, or prefixes of words, one of which an answer to it uses."""
ANSWERS: dict[str, Sequence[str]] = {question: answers for question, _, *answers in _ROWS}
"""Question -> a short answer of six to eight words, and a longer one."""

NEW_TOPICS: tuple[tuple[str, str], ...] = (
    ("What is coffee?", "coffee bean drink caffein"),
    ("Tell me about owls.", "owl bird night hunt"),
    ("How do you make soup?", "soup water vegetable broth pot cook"),
    ("What is the wind?", "wind air move blow"),
    ("Describe a beach.", "beach sand sea ocean wave"),
    ("What does a carpenter do?", "carpent wood build furniture"),
    ("Why do we read books?", "book read learn stor knowledge"),
    ("What is a planet?", "planet orbit star sun"),
    ("Tell me about frogs.", "frog amphib water jump"),
    ("How does a kite fly?", "kite wind fly air string"),
    ("What is honey?", "honey bee sweet"),
    ("Describe a kitchen.", "kitchen cook stove food sink"),
    ("What do scientists do?", "scien research experiment discover stud"),
    ("Why do we need friends?", "friend support happ people"),
    ("What is ice?", "ice water frozen freez cold solid"),
    ("Tell me about sharks.", "shark fish ocean sea teeth"),
    ("How do you wash dishes?", "dish wash soap water clean"),
    ("What is a castle?", "castle stone king wall build"),
    ("Describe a sunset.", "sunset sun sky color orange horizon"),
    ("What does a chef do?", "chef cook food kitchen meal"),
    ("Why do we save money?", "money save future spend"),
    ("What is a dream?", "dream sleep mind night"),
    ("Tell me about turtles.", "turtle shell reptile slow"),
    ("How do magnets work?", "magnet field pole attract metal iron"),
)
"""Topics of the held-out prompts."""

OPENERS = ("Well", "Indeed", "Today", "Honestly", "Clearly", "Listen")
CLOSERS = ("today", "indeed", "always", "friend", "truly", "done")
KEYWORDS = ("good", "world", "people", "simple", "often", "many")
COUNTS = (10, 12, 15, 20)

PHRASES: dict[str, tuple[str, ...]] = {
    "lowercase": ("Use only lowercase letters.", "Write everything in lowercase."),
    "at_most_words": ("Use at most {count} words.", "Answer in no more than {count} words."),
    "first_word": ('Begin with the word "{word}".', 'The first word must be "{word}".'),
    "last_word": ('End with the word "{word}".', 'The last word must be "{word}".'),
    "keyword": ('Use the word "{word}".', 'Include the word "{word}".'),
    "no_commas": ("Do not use any commas.", "Avoid commas."),
    "exclamation": ("End with an exclamation mark.", "Finish with an exclamation mark."),
    "json": ('Answer as a JSON object with the single key "{key}".',),
    "quoted": ("Put the whole answer in double quotation marks.",),
    "question": ("End with a question mark.",),
    "sentences": ("Answer in exactly one sentence.",),
}
"""Kind of instruction -> its wordings."""

NEW_KINDS = ("question", "sentences", "quoted")  # kinds that only held-out prompts have

EXCLUDES: dict[str, frozenset[str]] = {
    "json": frozenset({"lowercase", "first_word", "last_word", "exclamation", "question", "quoted", "sentences"}),
    "quoted": frozenset({"exclamation", "question", "sentences"}),
    "exclamation": frozenset({"question"}),
}
"""Kind -> kinds that one answer cannot follow at the same time; a pair is listed once."""

NEW_PAIRS = (
    ("lowercase", "exclamation"),
    ("at_most_words", "last_word"),
    ("first_word", "no_commas"),
    ("keyword", "exclamation"),
    ("lowercase", "keyword"),
    ("first_word", "last_word"),
)
"""Pairs of kinds that never occur together in a training prompt."""
