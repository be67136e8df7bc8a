"""Answers out of text, and rules of comparison (the table of spellings in docs/data.md)."""

from __future__ import annotations

import pytest

from pyvision_jax.data.records import Answer
from pyvision_jax.rewards.answers import last_answer_block, matches, parse_number, unbox


@pytest.mark.parametrize(
    "text, inside",
    [
        ("\\boxed{\\frac{1}{3}}", "\\frac{1}{3}"),
        ("\\fbox{42}", "42"),
        ("\\boxed{7", None),
        ("7", None),
        ("\\boxed{1} and \\boxed{2}", "2"),
    ],
)
def test_boxes(text, inside):
    assert unbox(text) == inside


def test_the_last_block_that_says_something():
    assert last_answer_block("<answer>1</answer><answer> </answer>") == "1"
    assert last_answer_block("no") is None


@pytest.mark.parametrize(
    "value, right",
    [
        ("\\text{E}", True), ("E: a polygenic score", True), ("(E)", True), ("e", True), ("E.", True),
        ("The answer is E because A is wrong", False), ("A or E", False), ("D", False), ("a polygenic score", True),
    ],
)  # fmt: skip
def test_choices(value, right):
    choices = ("one", "two", "three", "four", "a polygenic score")
    assert matches(f"\\boxed{{{value}}}", Answer("E", "choice", choices)) is right
    assert matches(value, Answer("E", "choice", choices)) is right, "box or no box, every path agrees"


def test_the_text_of_another_choice_is_no_letter():
    pets = ("a dog", "a cat", "I see none")
    assert matches("a dog", Answer("A", "choice", pets)) and not matches("a cat", Answer("A", "choice", pets))
    assert matches("a cat", Answer("B", "choice", pets)) and matches("A cat or so", Answer("A", "choice", pets))


@pytest.mark.parametrize(
    "text, number",
    [("3.5", 3.5), ("3.5.", 3.5), ("3,500", 3500.0), ("-2 m", -2.0), ("$5", 5.0), ("5 apples and 6 pears", None),
     ("", None), ("I think it is 5", None), ("three", None), ("1e3", 1000.0)],
)  # fmt: skip
def test_numbers(text, number):
    assert parse_number(text) == number


def test_number_tolerance_and_zero():
    assert matches("10.4", Answer("10", "number", tolerance=0.05))
    assert not matches("10.6", Answer("10", "number", tolerance=0.05))
    assert matches("0", Answer("0", "number")) and not matches("0.1", Answer("0", "number", tolerance=0.5))
    with pytest.raises(ValueError, match="'ten' is not a number"):
        matches("10", Answer("ten", "number"))


def test_text():
    assert matches(" Red. ", Answer("red")) and not matches("dark red", Answer("red"))
