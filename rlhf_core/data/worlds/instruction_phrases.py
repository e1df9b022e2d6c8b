"""The topics and the instructions of the world of verifiable instructions."""

from __future__ import annotations

TOPICS: tuple[tuple[str, str], ...] = (
    ("What is rain?", "rain water cloud drop wet"),
    ("Tell me about cats.", "cat kitten feline pet"),
    ("Why is the sky blue?", "sky blue light scatter sun"),
    ("How do you make tea?", "tea water boil cup leaf brew"),
    ("What does a teacher do?", "teach student school class learn"),
    ("Describe the ocean.", "ocean sea water wave"),
    ("Why do people sleep?", "sleep rest body night"),
    ("What is bread made of?", "bread flour dough bak yeast"),
    ("Tell me about dogs.", "dog pupp pet canine"),
    ("How does a bicycle work?", "bicycle bike pedal wheel"),
    ("What is the moon?", "moon earth night lunar orbit"),
    ("Describe a forest.", "forest tree wood leaf"),
    ("What do bees do?", "bee honey flower pollin hive"),
    ("Why do we brush our teeth?", "teeth tooth brush clean mouth dent"),
    ("What is snow?", "snow ice cold winter flake"),
    ("Tell me about horses.", "horse ride animal gallop"),
    ("How do plants grow?", "plant grow sun water soil seed"),
    ("What is a library?", "library librar book read"),
    ("Describe a good breakfast.", "breakfast egg toast fruit eat morning meal"),
    ("What does a doctor do?", "doctor patient medic health treat"),
    ("Why do leaves fall in autumn?", "leaf leaves autumn fall tree"),
    ("What is music?", "music sound song melod rhythm"),
    ("Tell me about elephants.", "elephant trunk animal"),
    ("How do birds fly?", "bird fly wing flight feather"),
    ("What is a desert?", "desert sand dry hot"),
    ("Describe your favorite season.", "season spring summer autumn fall winter"),
    ("What do farmers grow?", "farm crop grow vegetable field"),
    ("Why is exercise good?", "exercise health body fit strong"),
    ("What is gold?", "gold metal yellow precious"),
    ("Tell me about whales.", "whale ocean sea mammal"),
    ("How is cheese made?", "cheese milk curd"),
    ("What is a volcano?", "volcano lava erupt magma mountain"),
    ("Describe a city street.", "street city car people build"),
    ("What does a baker do?", "bak bread cake oven"),
    ("Why do we wear coats?", "coat warm cold wear weather"),
    ("What is a river?", "river water flow stream"),
    ("Tell me about spiders.", "spider web leg insect"),
    ("How do you cook rice?", "rice water cook boil pot"),
    ("What is a camera for?", "camera photo picture image"),
    ("Describe a birthday party.", "birthday party cake gift friend"),
    ("What do firefighters do?", "fire rescue save"),
    ("Why do we need water?", "water drink body thirst hydrat"),
    ("What is winter like?", "winter cold snow ice"),
    ("Tell me about penguins.", "penguin bird ice antarctic swim"),
    ("How does a clock work?", "clock time hour hand gear"),
    ("What is a garden?", "garden plant flower vegetable grow"),
    ("Describe a train ride.", "train ride rail travel window"),
    ("What does a pilot do?", "pilot plane fly aircraft"),
    ("Why do stars shine?", "star shine light nuclear energy"),
    ("What is chocolate?", "chocolate cocoa sweet candy"),
    ("Tell me about lions.", "lion pride animal cat"),
    ("How do you plant a tree?", "tree plant hole soil dig root"),
    ("What is a museum?", "museum art exhibit histor"),
    ("Describe a rainy day.", "rain day wet cloud umbrella"),
    ("What do engineers do?", "engineer design build machine solve"),
    ("Why do we eat vegetables?", "vegetable eat health vitamin nutri"),
    ("What is the sun?", "sun star light heat"),
    ("Tell me about butterflies.", "butterfl wing insect caterpillar"),
    ("How do boats float?", "boat float water buoy"),
    ("What is a bridge?", "bridge river cross road"),
    ("Describe a mountain.", "mountain peak high rock snow"),
    ("What does a nurse do?", "nurse patient care hospital"),
    ("Why do we laugh?", "laugh funny happ joke humor"),
    ("What is salt used for?", "salt food cook flavor season"),
)
"""Question -> words, or their beginnings, of which an answer about it uses one."""

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

NEW_KINDS = ("question", "sentences", "quoted")
"""Kinds that only held-out prompts have."""

EXCLUDES: dict[str, frozenset[str]] = {
    "json": frozenset({"lowercase", "first_word", "last_word", "exclamation", "question", "quoted", "sentences"}),
    "quoted": frozenset({"exclamation", "question", "sentences"}),
    "exclamation": frozenset({"question"}),
}
"""Kind -> kinds that one answer cannot follow with it; a pair is listed once."""

NEW_PAIRS = (
    ("lowercase", "exclamation"),
    ("at_most_words", "last_word"),
    ("first_word", "no_commas"),
    ("keyword", "exclamation"),
    ("lowercase", "keyword"),
    ("first_word", "last_word"),
)
"""Pairs of kinds that no training prompt has together."""
