"""Makes prompts like those that people send to a chat model, from templates and text of the installed packages.

There are six kinds of prompts, and plain text that the target only reads. Half of the training prompts are open: they
consist of a message's first words, and the target completes the message like the users in its own training data. A
prompt depends only on the snippets, the seed and its number. Held-out subjects, snippets and calculations do not occur
in training prompts.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

import numpy as np

from models.training.corpus import Source

KINDS = ("chat", "code", "mathematics", "summary", "extraction", "editing")
PLAIN = "plain"  # read, not answered
_HELD_OUT_PERIOD = 16  # one subject or snippet in 16 is held out
_PLAIN_PERIOD = 17  # one prompt in 17 is plain text
_PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|0BSD|Zlib|Unlicense)\b", re.IGNORECASE)
_COPYLEFT = re.compile(r"\b(GPL|LGPL|AGPL|MPL|Mozilla|CC-BY)\w*", re.IGNORECASE)


def _entries(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.split(";") if entry.strip())


_SUBJECTS = _entries("""
photosynthesis;gravity;the water cycle;volcanoes;black holes;the human heart;vaccines;evolution;DNA;
electricity;magnetism;sound waves;the solar system;plate tectonics;climate change;renewable energy;nuclear power;
batteries;the internet;search engines;computer memory;operating systems;programming languages;databases;encryption;
machine learning;neural networks;recursion;version control;unit testing;compilers;cloud computing;
open source software;robots;satellites;airplanes;bicycles;trains;electric cars;bridges;the Roman Empire;ancient Egypt;
the Renaissance;the Industrial Revolution;the French Revolution;the Silk Road;the printing press;the moon landing;
democracy;the United Nations;inflation;supply and demand;stock markets;compound interest;budgeting;insurance;taxes;
marketing;negotiation;leadership;teamwork;time management;public speaking;job interviews;writing a resume;
learning a language;playing the guitar;chess;painting;photography;poetry;jazz;classical music;theatre;novels;
short stories;baking bread;cooking pasta;making coffee;green tea;healthy eating;vitamins;sleep;exercise;
running a marathon;yoga;meditation;stress;friendship;raising children;keeping a dog;keeping a cat;gardening;
growing tomatoes;beekeeping;birds;whales;elephants;ants;coral reefs;rainforests;deserts;glaciers;rivers;islands;Japan;
Brazil;Kenya;Norway;India;Canada;Italy;Paris;London;New York;camping;hiking;sailing;football;tennis;swimming;
the Olympic Games;probability;prime numbers;fractions;geometry;algebra;statistics;the scientific method;philosophy;
ethics;psychology;habits;motivation;memory;creativity;artificial intelligence;privacy;passwords;social media;
video games;recycling;plastic;clean water;earthquakes;hurricanes;rainbows;the seasons;tides;the speed of light;atoms;
the periodic table;acids and bases;crystals;antibiotics;the immune system;bacteria;viruses;the brain;eyes;dreams;
laughter;colours;clocks;calendars;maps;compasses;telescopes;microscopes;lighthouses;castles;museums;libraries;
newspapers;writing letters;proverbs;myths;dragons;fairy tales;holidays;birthdays;weddings;gifts;moving to a new city;
renting a flat;working from home;remote meetings;starting a business;volunteering;saving money;travel on a budget;
learning to drive;first aid;fire safety;houseplants;interior design;knitting;woodworking;cheese;chocolate;spices;soup;
salads;breakfast""")
_CHAT = _entries("""
What is {s}?;Explain {s} to a ten-year-old.;Explain {s} in simple terms.;Tell me about {s}.;
Give me five facts about {s}.;Why is {s} important?;What are the benefits of {s}?;Write a short story about {s}.;
Write a poem about {s}.;What are common misconceptions about {s}?;How did {s} change the world?;
Give me three tips about {s}.;I want to learn about {s}. Where should I start?;What should a beginner know about {s}?;
Write a short paragraph about {s}.;Compare {s} and {t}.;What is the connection between {s} and {t}?;
Describe {s} in two sentences.;Write an email to a friend about {s}.;
Make a list of ten words about {s} and say what each means.;
What questions do people often ask about {s}? Answer two of them.;Write a dialogue between two friends about {s}.;
I have to give a talk about {s}. Make an outline.;What are the pros and cons of {s}?;
Can you recommend a way to learn more about {s}?;Imagine you are an expert on {s}. What would you say first?;
What is the history of {s}?;How would you explain {s} to my grandmother?;Plan a week for someone interested in {s}.;
Write a product description for a book about {s}.;hi, can you help me with {s}?;
Who are important people in the history of {s}?;What is one surprising thing about {s}, and why?""")
_TASKS = _entries("""
reverses a string;checks if a number is prime;computes the n-th Fibonacci number;
counts the words in a text;finds the largest number in a list;sorts a list of dictionaries by a key;
removes duplicates from a list and keeps the order;merges two sorted lists;checks if a word is a palindrome;
computes the factorial of a number;flattens a nested list;reads a CSV file and prints the sum of a column;
counts how often each letter occurs;converts Celsius to Fahrenheit;finds the common elements of two lists;
computes the greatest common divisor;searches a sorted list by bisection;transposes a matrix;
validates an email address;generates a random password;counts the lines of a file;
finds all files of a folder with a suffix;downloads a page and saves it;parses a date;
computes the mean and the median;groups words by their first letter;checks if brackets are balanced;
implements a stack;implements a queue;implements a linked list;implements a binary search tree;
computes the Levenshtein distance;rolls two dice many times and counts the sums;prints a multiplication table;
draws a triangle of stars;converts an integer to binary;converts Roman numerals to integers;finds the longest word;
rotates a list by k places;splits a list into chunks of n;capitalises every word;
computes the power of a number without **;finds the missing number between 1 and n;computes all permutations;
computes all subsets;caches the results of a function;measures how long a function takes;
retries a function three times;writes a dictionary to a JSON file;reads a JSON file;counts the vowels;
removes punctuation;sums the digits of a number;checks if two words are anagrams;finds the second largest number;
implements bubble sort;implements quicksort;implements merge sort;simulates a bank account;
models a rectangle with its area;prints the first n prime numbers;zips two lists to a dictionary;inverts a dictionary;
finds the most frequent element;formats seconds as hours and minutes;encodes a text with Caesar's cipher;
plays rock, paper, scissors;guesses a number between 1 and 100;keeps a to-do list;computes the distance of two points;
multiplies two matrices;walks a tree in breadth;finds the shortest path in a graph;detects a cycle in a linked list""")
_CODE = _entries("""
Write a Python function that {t}.;Write a Python program that {t}.;
Write a function in Python that {t}, with type hints and a docstring.;How can I write code that {t} in Python?;
Write a JavaScript function that {t}.;Write a Python class or function that {t}, and show how it is used.;
Write a test for a Python function that {t}.;Give me a short Python script that {t} and explain it.;
Write a C function that {t}.;Write code that {t}.""")
_CODE_QUESTIONS = _entries("""
Explain what this code does:;Write a docstring for this function:;
Write a unit test for this function:;What does this function return?;Are there bugs in this code?;
How could this code be made faster?;Translate this Python code to JavaScript:;Review this code:""")
_CODE_EDITS = _entries("""
Add type hints to this function. Return the whole function.;
Rename the variable `{v}` to `{w}` in this code. Return the whole code.;
Add comments to this code. Return the whole code.;Add a docstring to this function and return all of it.;
Rewrite this code with better names.;Fix the indentation of this code and return it whole.;
Add error handling to this code. Return the whole code.;
Add a print statement at the start of this function. Return the whole function.;
Repeat this code, but without comments.""")
_TEXT_EDITS = _entries("""
Correct the spelling of this text:;Rewrite this text in the past tense:;
Replace "{v}" by "{w}" in this text and return it whole:;Make this text more formal:;Correct the grammar:;
Rewrite this text in simpler words:;Turn this text into a list:;Fix the typos in this paragraph and return it:;
Make this text shorter, but keep its words where you can:;Repeat this text in capital letters:;
Rewrite this paragraph in the first person:;Translate this text into plain English:""")
_SUMMARIES = _entries("""
Summarise this text in two sentences:;Summarize the following text:;
What is the main point of this text?;Give me the key points of this text as a list:;Write a headline for this text:;
Summarise this for a beginner:;In short, what is this?;Write an abstract of the following:;
In one paragraph, what does the following say?""")
_OPENINGS = {
    "chat": """;;;;What;How;Why;Can you;I;My;Write a;Give me;Explain;Tell me;Is it;Name;Which;Suggest;Describe;Compare;
Help me;Who;I have;I want to;Should I;Plan;Make a list of;Write an email;Write a short story about;Hi;What is the;
How do I;How does a;What should I;Why do;Give me five;Write a short;Write a letter to;Imagine you are;My friend;
My neighbour;I often;I am learning;You are a;Tell me a story about;What are the;Name three;Explain in simple words;
What happens when;Could you;Please;I would like to;Write a dialogue between;Write a speech;Is there;Where;When;
What do you think about;Recommend;I need;Write a poem;In two sentences, explain;Our;We are planning;Someone told me""",
    "code": """Write a;Write a Python function that;Write a Python program that;Write a function in JavaScript;
How do I;Write an SQL query;Write a class;Explain this code:;Fix this code:;Write a shell script that;
I have a Python;Write a regular expression;Implement a;Write a C++ program;Write an HTML page;Why does this code;
Write a Python function `;Write a Python class `;Write a JavaScript function that;Write a bash script that;
Add type hints to this function:;What does this function do?;Write a test for;Implement a function in C;
Write a Python script that reads;What is wrong with this code?;Translate this function to Python:;
Write a decorator that;Write a generator;How can I sort;Refactor this code:;Write a Java method;Write a Rust function;
Given a list of;Write a unit test for this function:;Write a Dockerfile;Explain the difference between;
Write a SQL statement;Write a function that takes;Complete this function:;Make this function faster:""",
    "mathematics": """A;If;What is;Solve;A train;A shop;Tom has;There are;A farmer;Find the;Calculate;How many;
Maria buys;The sum of;Simplify;In a class;A rectangle;A car;A gardener;A bottle holds;Two;Three;A hotel has;Anna;
Solve for x:;What is the probability;A box contains;A phone costs;Show that;Prove that;The price of;A bus;
The area of;A triangle;Factor;Expand;Evaluate;A number;The average of;Lisa runs;A recipe needs;Compute;An investment;
Write the number;Convert;Is;Which is larger;A cyclist;Each;Find two numbers""",
    "summary": """Summarise this text in two sentences:;Summarize the following text:;
Give me the key points of this text as a list:;What is the main point of this text?;Please summarize this article.;
Write a headline for this text:;Summarize this email:;Write a short summary of the following report.;
Summarize the text below in about three sentences.;Could you give me a brief summary of this?;
Summarize the following passage in one paragraph.;What are the most important points of the following text?;
Summarize this for someone who has no time to read it.;Give a summary of the following in at most 50 words.;
Write three bullet points that summarize this text.;Sum up this letter in one sentence.;
Summarize the meeting notes below.;What does the following article say? Answer in three sentences.;
Read the text and summarize it for a child.;Condense the following text to its main idea.;
Summarize the story below in a few sentences.;Write an abstract of the following text.""",
    "extraction": """Extract name, email and city from the text as JSON.;
Return a JSON object with the keys product, price and quantity.;Extract the people and places of this text as JSON.;
Convert the text to JSON with title, date and place.;Find all dates and amounts in this text. Answer with JSON.;
List every name in this text as a JSON array.;Extract the data of this order as JSON.;
Return the contact data in this text as JSON: name, company, phone, email. JSON only.;
Read the text and return a JSON array with one object for each person, with the keys "name", "age" and "city".;
Return JSON with the keys "event", "date", "time" and "place" for the following announcement.;
From the text, extract "customer", "items" and "total" as JSON.;
Make a JSON object of this recipe with the keys "title", "ingredients" and "steps".;
Extract the symptoms and the duration from this note as JSON.;
Turn the following job advertisement into JSON: "title", "company", "salary", "requirements".;
Give me the flight's number, departure and arrival as JSON.;
Extract all products with their prices. Answer with a JSON array only.;
Which persons, organisations and dates does the text mention? Answer as JSON.;
Extract these fields as JSON: "title", "author", "year", "publisher".;
Fill a JSON object with "from", "to", "subject" and "deadline" from this email.;
Return the address in this text as JSON with "street", "number", "postcode" and "city".""",
    "editing": """Correct the spelling and grammar of this text:;Rewrite this text in the past tense:;
Make this text more formal:;Make this email more polite:;Rewrite this text to make it more concise:;
Rewrite this text in simpler words:;Replace the name in this text by Anna and return it whole:;
Make this text friendlier:;Fix the typos in this paragraph and return it:;Rewrite this text in the first person:;
Correct all mistakes in the paragraph below.;
Put this text into the past tense.;
Rewrite the following text in the third person. Change nothing else.;
Replace every occurrence of the town's name by Springfield. Return the whole text.;
Proofread the following text and return the corrected version only.;
Rewrite the email below so that it sounds more professional.;Change this text to American spelling.;
Put the following text into the present tense and return all of it.;Remove all adjectives from this text.;
Divide this text into paragraphs and leave the words as they are.;Rewrite this letter to be less formal.;
Add a suitable closing sentence to the following text and return it whole.;
Improve the style of this text without changing its meaning.;Turn the sentences of this text into a bulleted list.""",
}
_TEXT_OPENINGS = _entries("""
Dear;Hi;The;
Last week;On Monday;When;A new;My name is;In 2019;Every;We;It was;By;I;After;This;Hello;There;
Dear Mr;Dear Ms;I am writing;Each day;Last winter;The village;The company;Researchers;Order number;
The meeting;At the;In the;For many years;She;He;They;Our;My;Thank you;To whom it may concern;Yesterday;On Friday;
In March;During;Although;Because;One day;The old;Many people;According to;The city council;A study;The museum;
Please;Good morning;Once;Two;Three;Most;Scientists;The river;The school;The first;Before;While;If;As;Water;Birds;
Buses;The new library;Invoice;Ingredients;We are looking for;Name;Flight;Patient;Subject""")
_NAMES = _entries("""
Anna;Ben;Carla;David;Elena;Farid;Grace;Hugo;Ines;Jack;Kofi;Lena;Maria;Nadia;Omar;Paula;Quinn;Rosa;
Sam;Tara;Uma;Victor;Wei;Yara;Zoe""")
_SURNAMES = _entries("""
Smith;Garcia;Okafor;Tanaka;Müller;Rossi;Novak;Silva;Kumar;Chen;Larsen;Dubois;Kowalski;Haddad;Mbeki;
Brown;Ivanova;Costa;Nguyen;Fischer""")
_CITIES = _entries("""
Lisbon;Oslo;Nairobi;Kyoto;Toronto;Berlin;Lima;Prague;Hanoi;Dublin;Cairo;Chicago;Turin;Seattle;Quito;
Warsaw""")
_THINGS = _entries("""
apples;pencils;books;marbles;stamps;cookies;tickets;bottles;chairs;flowers;coins;eggs;oranges;balloons;
shirts;cards""")
_PRODUCTS = _entries("""
lamp;desk;kettle;backpack;jacket;keyboard;bicycle;tent;blender;headphones;notebook;teapot""")
_MONTHS = _entries("""
January;February;March;April;May;June;July;August;September;October;November;December""")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. `text`: the user's message, its beginning if the target completes it (`is_open`), or plain text."""

    number: int
    kind: str
    text: str
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Snippets:
    """The material of prompts: paragraphs of prose, and Python functions."""

    paragraphs: tuple[str, ...]
    functions: tuple[str, ...]

    def split(self, held_out: bool) -> Snippets:
        """Returns the held-out snippets, or those that neither contain one of them nor are part of one."""
        all_texts = self.paragraphs, self.functions
        unseen = Snippets(*(tuple(text for text in texts if _is_held_out(text)) for texts in all_texts))
        if held_out:
            return unseen
        parts = [_flat(text) for text in (*unseen.paragraphs, *unseen.functions)]
        joined = "\n".join(parts)

        def is_seen(text: str) -> bool:
            flat = _flat(text)
            return flat not in joined and not any(part in flat for part in parts)

        return Snippets(*(tuple(filter(is_seen, texts)) for texts in all_texts))

    def digest(self) -> str:
        return hashlib.sha256("\0".join((*self.paragraphs, *self.functions)).encode()).hexdigest()


class Prompts:
    """Training prompts, or held-out ones, by number."""

    def __init__(self, snippets: Snippets, *, seed: int, held_out: bool = False) -> None:
        self._snippets, self._seed, self._held_out = snippets.split(held_out), seed, held_out
        self._subjects, self._tasks = (
            tuple(entry for entry in entries if _is_held_out(entry) == held_out) for entries in (_SUBJECTS, _TASKS)
        )
        makers = (self._chat, self._code, self._mathematics, self._summary, self._extraction, self._editing)
        self._makers: dict[str, Callable[[np.random.Generator], str]] = dict(zip(KINDS, makers, strict=True))

    def get(self, number: int) -> Prompt:
        """Returns a prompt. The kinds alternate; one training prompt in 17 is plain text, and every other one is
        open."""
        rng = np.random.default_rng((self._seed, number, int(self._held_out)))
        if not self._held_out and number % _PLAIN_PERIOD == _PLAIN_PERIOD - 1:
            return Prompt(number, PLAIN, self._plain(rng))
        kind = KINDS[number % len(KINDS)]
        if not self._held_out and number // len(KINDS) % 2:
            return Prompt(number, kind, self._opening(kind, rng), is_open=True)
        make = self._makers[kind]
        text = make(rng)
        while kind in ("mathematics", "extraction") and _is_held_out(text) != self._held_out:  # made of numbers
            text = make(rng)
        return Prompt(number, kind, text)

    def _opening(self, kind: str, rng: np.random.Generator) -> str:
        words = _pick(rng, tuple(entry.strip() for entry in _OPENINGS[kind].split(";")))
        if kind in ("summary", "extraction", "editing"):
            return f"{words}\n\n{_pick(rng, _TEXT_OPENINGS)}"
        return f"{words}\n\n" if words.endswith(":") else words

    def _chat(self, rng: np.random.Generator) -> str:
        subject, other = _pick(rng, self._subjects), _pick(rng, self._subjects)
        return _pick(rng, _CHAT).format(s=subject, t=other)

    def _code(self, rng: np.random.Generator) -> str:
        if rng.random() < 0.4:
            return f"{_pick(rng, _CODE_QUESTIONS)}\n\n```python\n{_pick(rng, self._snippets.functions)}\n```"
        return _pick(rng, _CODE).format(t=_pick(rng, self._tasks))

    def _mathematics(self, rng: np.random.Generator) -> str:
        a, b, c, d = (int(rng.integers(*span)) for span in ((2, 60), (2, 40), (2, 12), (100, 2000)))
        name, other, thing, product = (_pick(rng, of) for of in (_NAMES, _NAMES, _THINGS, _PRODUCTS))
        forms = (
            f"{name} has {a + b} {thing} and gives {b} of them to {other}. How many {thing} does {name} have left?",
            f"{name} buys {c} packs of {thing}. Each pack holds {a}. How many {thing} are there in all?",
            f"A {product} costs {d} dollars and is {5 * c}% off. What does it cost now? Think step by step.",
            f"What is {a} * {b}?", f"What is {d} + {a * b}?", f"Compute {d} - {a} * {c}, step by step.",
            f"Solve for x: {c}x + {a} = {c * b + a}.", f"Solve x^2 - {c + b}x + {c * b} = 0.",
            f"A train travels {d} km in {c} hours. What is its average speed?",
            f"What is the area of a rectangle of {a} by {b} metres? And its perimeter?",
            f"What is the area of a circle with a radius of {c} cm?", f"Find the derivative of f(x) = {c}x^3 + {a}x - {b}.",  # noqa: E501
            f"Find the integral of {a}x + {c}.", f"Is {d} divisible by {c}? Explain.",
            f"What is the greatest common divisor of {a * c} and {b * c}?", f"Write {a}/{a + b} in lowest terms.",
            f"What is {c * 5}% of {d}?", f"The numbers are {a}, {b}, {c}, {a + c} and {b + c}. What are their mean and median?",  # noqa: E501
            f"{name} is {c} years older than {other}, who is {a}. How old will {name} be in {b} years?",
            f"A bag holds {a} red and {b} blue balls. What is the probability of drawing a red one?",
            f"{name} saves {a} dollars a week. How many weeks does it take to save {d} dollars for a {product}?",
            f"Convert {d} minutes to hours and minutes.", f"Prove that the sum of two even numbers is even, then check it with {2 * a} and {2 * b}.",  # noqa: E501
            f"If {c} workers need {b} days, how long do {c + 2} workers need? Show your work.",
        )  # fmt: skip
        return _pick(rng, forms)

    def _summary(self, rng: np.random.Generator) -> str:
        return f"{_pick(rng, _SUMMARIES)}\n\n{self._prose(rng, 350, 1200)}"

    def _extraction(self, rng: np.random.Generator) -> str:
        fields, text = self._record(rng) if rng.random() < 0.7 else self._records(rng)
        instructions = (
            f"Extract {fields} from the text as JSON.", f"Return a JSON object with the keys {fields}.",
            f"Read the text and answer with JSON only. Keys: {fields}.", f"Convert the text to JSON with {fields}.",
        )  # fmt: skip
        return f"{_pick(rng, instructions)}\n\n{text}"

    def _record(self, rng: np.random.Generator) -> tuple[str, str]:
        name, surname, city, product = (_pick(rng, of) for of in (_NAMES, _SURNAMES, _CITIES, _PRODUCTS))
        month, day, year, price, count = (
            _pick(rng, _MONTHS), *(int(rng.integers(*s)) for s in ((1, 29), (1960, 2026), (5, 900), (1, 9))),
        )  # fmt: skip
        low = f"{name}.{surname}".lower()
        forms = (
            ("name, city, email", f"My name is {name} {surname}, I live in {city}, and you can reach me at {low}@example.com."),  # noqa: E501
            ("customer, item, quantity, price", f"{name} {surname} ordered {count} {product}s at {price} dollars each, to be sent to {city}."),  # noqa: E501
            ("event, date, place", f"The {city} {_pick(rng, self._subjects)} meeting takes place on {month} {day}, {year} in the town hall. {name} {surname} will open it."),  # noqa: E501
            ("name, born, profession, city", f"{name} {surname}, born on {day} {month} {year}, is an engineer from {city} who likes {_pick(rng, self._subjects)}."),  # noqa: E501
            ("from, to, date, passengers, total", f"Please book a flight from {city} to {_pick(rng, _CITIES)} on {month} {day} for {count} passengers. The total is {price * count} euros."),  # noqa: E501
            ("product, rating, pros, cons", f"I bought this {product} in {month}. It is sturdy and looks good, but at {price} dollars it is not cheap. {count % 5 + 1} out of 5 stars. {name}, {city}"),  # noqa: E501
            ("invoice, date, amount, company", f"Invoice no. {year}-{price}. {surname} & {_pick(rng, _SURNAMES)} Ltd., {city}. Date: {year}-{count:02}-{day:02}. Amount due: {price}.{day:02} EUR."),  # noqa: E501
        )  # fmt: skip
        return forms[int(rng.integers(len(forms)))]

    def _records(self, rng: np.random.Generator) -> tuple[str, str]:
        if rng.random() < 0.5:
            return "title, topics, summary", self._prose(rng, 250, 900)
        lines = [
            f"{_pick(rng, _NAMES)} {_pick(rng, _SURNAMES)}, {_pick(rng, _CITIES)}, {int(rng.integers(18, 80))}"
            for _ in range(int(rng.integers(3, 8)))
        ]
        return "a list of people with name, city and age", "\n".join(lines)

    def _editing(self, rng: np.random.Generator) -> str:
        if rng.random() < 0.5:
            code = _pick(rng, self._snippets.functions)
            old = _pick(rng, sorted(set(re.findall(r"\b[a-z_]{3,}\b", code))) or ["x"])
            instruction = _pick(rng, _CODE_EDITS).format(v=old, w=_pick(rng, ("value", "item", "result", "node")))
            return f"{instruction}\n\n```python\n{code}\n```"
        text = self._prose(rng, 150, 900)
        old = _pick(rng, sorted(set(re.findall(r"\b[a-z]{4,}\b", text))) or ["the"])
        instruction = _pick(rng, _TEXT_EDITS).format(v=old, w=_pick(rng, _THINGS))
        if re.search("spelling|typos|grammar|Correct", instruction):
            text = _misspell(text, rng)
        return f"{instruction}\n\n{text}"

    def _plain(self, rng: np.random.Generator) -> str:
        texts = self._snippets.functions if rng.random() < 0.5 else self._snippets.paragraphs
        return "\n\n\n".join(_pick(rng, texts) for _ in range(6))

    def _prose(self, rng: np.random.Generator, shortest: int, longest: int) -> str:
        length, text = int(rng.integers(shortest, longest)), ""
        at = int(rng.integers(len(self._snippets.paragraphs)))
        while len(text) < length:
            text += ("\n\n" if text else "") + self._snippets.paragraphs[at % len(self._snippets.paragraphs)]
            at += 1
        return text[: longest + 200]


def gather_snippets(sources: Sequence[Source]) -> Snippets:
    """Returns the sources' functions, and the paragraphs of their docstrings and of permissively licensed packages'
    descriptions."""
    paragraphs: list[str] = []
    functions: list[str] = []
    for source in sources:
        for docstring, function in _definitions(source.text):
            paragraphs += _paragraphs(docstring)
            functions += [function] if 120 <= len(function) <= 1100 else []
    for description in _descriptions():
        paragraphs += _paragraphs(description)
    return Snippets(tuple(dict.fromkeys(paragraphs)), tuple(dict.fromkeys(functions)))


def _definitions(text: str) -> Iterator[tuple[str, str]]:
    """Yields each definition's docstring, and the source if it is a function."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    yield ast.get_docstring(tree) or "", ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            margin = len(body) - len(body.lstrip(" "))
            body = "\n".join(
                line[margin:] if line[:margin].isspace() or not margin else line for line in body.split("\n")
            )
            yield ast.get_docstring(node) or "", body if isinstance(node, ast.FunctionDef) else ""


def _descriptions() -> Iterator[str]:
    """Yields descriptions of installed packages with a permissive licence (MIT, BSD, Apache, ...) and no copyleft."""
    for distribution in sorted(metadata.distributions(), key=lambda of: (of.metadata["Name"] or "").lower()):
        head = distribution.metadata
        licence = " ".join(
            str(value)[:200] for key, value in head.items() if key in ("License", "License-Expression", "Classifier")
            and (key != "Classifier" or "License ::" in str(value))
        )  # fmt: skip
        if _PERMISSIVE.search(licence) and not _COPYLEFT.search(licence):
            yield str(head.get_payload() or head.get("Description") or "")


def _paragraphs(text: str) -> Iterator[str]:
    """Yields paragraphs of prose: long enough, and mostly words."""
    for paragraph in re.split(r"\n\s*\n", text):
        flat = _flat(paragraph)
        if (
            120 <= len(flat) <= 1500
            and sum(c.isalpha() or c == " " for c in flat) > 0.85 * len(flat)
            and "http" not in flat
        ):
            yield flat


def _misspell(text: str, rng: np.random.Generator) -> str:
    """Swaps two neighbouring letters in one word of eight."""
    words = text.split(" ")
    for number, word in enumerate(words):
        if len(word) > 4 and rng.random() < 0.125:
            at = int(rng.integers(1, len(word) - 2))
            words[number] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _pick(rng: np.random.Generator, texts: Sequence[str]) -> str:
    return texts[int(rng.integers(len(texts)))]


def _is_held_out(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % _HELD_OUT_PERIOD == 0
