"""Reading an answer out of text, and comparing it with a reference by rule."""

from __future__ import annotations

import re
import unicodedata

from pyvision_jax.data.records import Answer

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)
_LETTER = re.compile(r"^\(?([A-Za-z])\)?(?:[.:)]|$|\s)")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")


def last_answer_block(text: str) -> str | None:
    """The text inside the last non-empty `<answer>...</answer>`, stripped; None without one."""
    blocks = [block.strip() for block in _ANSWER.findall(text)]
    return next((block for block in reversed(blocks) if block), None)


def unbox(text: str) -> str | None:
    """The content of the last `\\boxed{...}` whose braces balance (`\\fbox` counts too); None without one."""
    found = None
    for match in re.finditer(r"\\f?box(?:ed)?\s*\{", text):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                found = text[match.end() : end].strip()
                break
    return found


def normalise(text: str) -> str:
    """Case, width, quotes, outer punctuation and runs of blanks do not matter in a text answer."""
    text = unicodedata.normalize("NFKC", text).strip().strip("'\"`").rstrip(".").strip()
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\s+", " ", text).lower()


def parse_number(text: str) -> float | None:
    """A number that is the whole text (thousands commas and a trailing unit allowed); None otherwise."""
    text = normalise(text).replace("\u2212", "-").lstrip("$")
    match = _NUMBER.match(text)
    if not match or not re.search(r"\d", match.group()):
        return None
    if not re.fullmatch(r"\s*[a-z%°²³/]*\.?", text[match.end() :]):
        return None
    return float(match.group().replace(",", ""))


def matches(value: str, reference: Answer) -> bool:
    """Whether `value` answers like the reference, by rule alone.

    text: equal after `normalise`. choice: the letter, bare or followed by `.`, `:`, `)` or a blank, or the text of the
    choice; two letters joined by `or` are wrong. number: relative error at most `reference.tolerance`.
    """
    value = unbox(value) or value
    if reference.kind == "number":
        got, want = parse_number(value), parse_number(reference.value)
        if want is None:
            raise ValueError(f"reference answer {reference.value!r} is not a number")
        return got is not None and abs(got - want) <= reference.tolerance * abs(want) + 1e-9
    got, want = normalise(value), normalise(reference.value)
    if reference.kind == "choice":
        if re.search(r"\b[a-z]\)? or \(?[a-z]\b", got):
            return False
        texts = [normalise(choice) for choice in reference.choices]
        if len(got) > 1 and got in texts:  # "a cat" as the text of choice B does not choose A
            index = ord(want[:1]) - ord("a") if want else -1
            return 0 <= index < len(texts) and got == texts[index]
        letter = _LETTER.match(got)
        return letter is not None and letter.group(1) == want[:1]
    return got == want
