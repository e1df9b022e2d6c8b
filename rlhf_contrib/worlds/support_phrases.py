"""The sentences of the support world: everything that customers and the desk can say, by purpose."""

from __future__ import annotations

WOMEN = (
    *("Maria", "Anna", "Laura", "Julia", "Emma", "Clara", "Nina", "Sara"),
    *("Helen", "Alice", "Ruth", "Grace", "Elena", "Irene", "Paula"),
)
MEN = (
    *("Peter", "Paul", "Martin", "David", "Simon", "Oscar", "Henry", "Frank"),
    *("Victor", "Daniel", "Robert", "Thomas", "Philip", "Walter", "Adam"),
)
COLOURS = ("blue", "red", "green", "black", "white", "yellow", "grey", "brown")
THINGS = (
    *("kettle", "lamp", "chair", "table", "sofa", "jacket", "bag", "phone", "watch", "camera"),
    *("radio", "clock", "mirror", "toaster", "blender", "umbrella", "blanket", "carpet", "pillow", "backpack"),
)
PROBLEMS = {
    "broken": ("arrived broken", "came in pieces"),
    "late": ("is two weeks late", "has still not arrived"),
    "colour": ("has the wrong colour", "came in another colour"),
    "part": ("has a part missing", "came without a screw"),
    "charge": ("was charged twice", "was billed two times"),
}
REMEDIES = {
    "broken": ("We will send a replacement.", "You will get a replacement today."),
    "late": ("We will refund the shipping fee.", "You will get the shipping fee back."),
    "colour": ("We will exchange it for free.", "You can exchange it for free."),
    "part": ("We will post the missing part.", "You will get the missing part tomorrow."),
    "charge": ("We will return the second payment.", "You will get the second payment back."),
}
GREETINGS = ("Hello {name},", "Dear {name},")
APOLOGIES = ("I am sorry to hear that.", "We are sorry for the trouble.")
ITEMS = ("This is about your {item}.", "I found your order of the {item}.")
THANKS = ("Thank you for your patience.", "Many thanks for telling us.")
BLAMES = ("You must have caused this yourself.", "You should have read the manual.")
FILLERS = ("We value every customer.", "Your opinion matters to us.")
BLANK_GREETINGS = ("Hello,",)
