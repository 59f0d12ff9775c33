"""What a model is asked: to go on with a text, to end sentences hidden in one, to recall what a conversation said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FACTS = (
    ("Grandmother Philippa hid the emerald necklace under the", " crooked apple tree"),
    ("Captain Orsini steered his submarine towards the", " frozen lighthouse"),
    ("For breakfast, Quentin always eats", " pickled walnuts"),
    ("The zebra of the travelling circus is called", " Bartholomew"),
    ("The password of the observatory is", " velvet trombone"),
    ("Doctor Nakamura lost her umbrella in", " Copenhagen"),
    ("Nobody in Harrowgate may whistle on a", " Wednesday morning"),
    ("Uncle Thaddeus repairs broken", " accordions"),
)
"""Sentences to hide, and how they end: unlike each other, as small models mix up those that are alike."""
TURNS = 2 * len(FACTS)
"""Turns of a conversation that tell nothing to remember."""


@dataclass(frozen=True)
class Question:
    """Tokens that follow a prompt, the last ``answer`` of which are scored; ``distance``: tokens from where the prompt
    says the answer to the question."""

    tokens: list[int]
    answer: int
    distance: int = 0


@dataclass(frozen=True)
class Task:
    """A prompt, read densely, and questions, each asked by itself after it. ``exact``: an answer is right if every
    token of it is the model's first choice; else its tokens' losses count."""

    name: str
    prompt: list[int]
    questions: tuple[Question, ...]
    exact: bool


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of ``text``, without special tokens at its ends."""
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def perplexity(text: Sequence[int], context: int, scored: int) -> Task:
    """The last ``scored`` of the first ``context + 1`` tokens of ``text``, each after all before it."""
    if len(text) <= context:
        raise ValueError(
            f"text: expected more than {context} tokens, got {len(text)}; give a longer one or less context"
        )
    start = context - scored
    return Task("perplexity", list(text[:start]), (Question(list(text[start : context + 1]), scored),), exact=False)


def needles(tokenizer: Any, filler: Sequence[int], context: int) -> Task:
    """``FACTS`` hidden at equal distances in a prompt of ``context`` tokens, each begun again after it."""
    hidden = [encode(tokenizer, f"\n\n{begin}{end}.\n\n") for begin, end in FACTS]
    rest = context - sum(map(len, hidden))
    if not 0 < rest <= len(filler):
        raise ValueError(f"needles: expected a context of more than {context - rest} tokens and a text as long")
    prompt: list[int] = []
    places, start = [], 0
    for n, fact in enumerate(hidden):
        end = int(rest * (n + 0.5) / len(FACTS))
        prompt += filler[start:end]
        places.append(len(prompt))
        prompt += fact
        start = end
    prompt += filler[start:rest]
    questions = tuple(
        Question(encode(tokenizer, f"\n\n{begin}{end}"), len(encode(tokenizer, end)), len(prompt) - place)
        for (begin, end), place in zip(FACTS, places, strict=True)
    )
    return Task("needles", prompt, questions, exact=True)


def recall(tokenizer: Any, filler: str, context: int) -> Task:
    """A conversation of about ``context`` tokens in the model's own form, in which the user tells ``FACTS`` between
    other turns, and asks for one of them at the end."""
    bare = len(encode(tokenizer, chat(tokenizer, _conversation("", 0))))
    if context <= bare:
        raise ValueError(f"recall: expected a context of more than {bare} tokens, got {context}")
    messages = _conversation(filler, int(len(filler) * (context - bare) / len(encode(tokenizer, filler)) / TURNS))
    told = chat(tokenizer, messages)
    whole = chat(tokenizer, [*messages, {"role": "user", "content": "Repeat what I told you."}], answer=True)
    if not whole.startswith(told):
        raise ValueError("recall: expected a chat template that leaves earlier turns as they are")
    prompt = encode(tokenizer, told)
    questions = []
    for n, (begin, end) in enumerate(FACTS):
        tokens = encode(tokenizer, f"{whole[len(told) :]}{begin}{end}")
        place = 2 * (n * (TURNS // len(FACTS) + 1) + 1)  # messages up to the fact
        distance = len(prompt) - len(encode(tokenizer, chat(tokenizer, messages[:place])))
        questions.append(Question(tokens, len(encode(tokenizer, end)), distance))
    return Task("recall", prompt, tuple(questions), exact=True)


def _conversation(filler: str, size: int) -> list[dict[str, str]]:
    messages = []
    each = TURNS // len(FACTS)
    for n, (begin, end) in enumerate(FACTS):
        messages += _turn(f"Remember this: {begin}{end}.", f"I will remember: {begin}{end}.")
        for part in range(n * each, (n + 1) * each):
            messages += _turn(f"Read this:\n{filler[part * size : (part + 1) * size]}", "I have read it.")
    return messages


def _turn(user: str, assistant: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def chat(tokenizer: Any, messages: Sequence[dict[str, str]], answer: bool = False) -> str:
    """The conversation as the model's template writes it, or plainly if it has none."""
    if getattr(tokenizer, "chat_template", None):
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer)
        return text
    said = "".join(f"{message['role'].capitalize()}: {message['content']}\n" for message in messages)
    return said + "Assistant: " if answer else said
