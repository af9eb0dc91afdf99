# SPDX-License-Identifier: Apache-2.0
"""Prompts to measure with when none are given: 48 questions of everyday kinds, no two alike in subject."""

from __future__ import annotations

_KINDS = {
    "How does {} work? Answer in a few sentences.": (
        "a bicycle gear",
        "a microwave oven",
        "a lighthouse lens",
        "a water tower",
        "an electric kettle",
        "a pendulum clock",
        "a suspension bridge",
        "a hot-air balloon",
    ),
    "Write a short story about {}.": (
        "a lost umbrella",
        "two rival bakers",
        "a robot that learns to paint",
        "the last train of the evening",
        "a garden in winter",
        "a letter that arrives forty years late",
        "an astronaut who is afraid of the dark",
        "a village without mirrors",
    ),
    "List five tips for {}.": (
        "sleeping better",
        "learning a language",
        "saving money on groceries",
        "growing tomatoes on a balcony",
        "a first job interview",
        "keeping houseplants alive",
        "riding safely in traffic",
        "taking better photographs",
    ),
    "Write a Python function that {}.": (
        "reverses the words of a sentence",
        "counts the vowels of a string",
        "returns the n-th Fibonacci number",
        "merges two sorted lists",
        "checks whether a number is prime",
        "finds the longest word in a list",
        "converts Celsius to Fahrenheit",
        "removes duplicates from a list",
    ),
    "What is the difference between {}?": (
        "weather and climate",
        "a comet and an asteroid",
        "butter and margarine",
        "a violin and a viola",
        "speed and velocity",
        "a novel and a novella",
        "a crocodile and an alligator",
        "memory and storage in a computer",
    ),
    "Write an email to {}.": (
        "a landlord about a broken heater",
        "a colleague to thank her for her help",
        "a hotel to change a booking",
        "a teacher to ask for more time",
        "a neighbour about a noisy party",
        "a friend to invite him to dinner",
        "a library about a lost book",
        "a shop to return a pair of shoes",
    ),
}

# One of each kind in turn, so that the first few are of all kinds.
PROMPTS = [kind.format(subjects[i]) for i in range(8) for kind, subjects in _KINDS.items()]
