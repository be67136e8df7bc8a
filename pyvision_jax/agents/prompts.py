# ruff: noqa: E501 - a prompt's lines are as long as the policy sees them
"""What the first user turn says. Wording is ours; the points are those of PyVision-RL's `vistool_with_img_info_v2`."""

IMAGE = """You are an agent. Keep going until the question below is completely solved, and end your turn only when you are sure.
Work through the problem step by step. You may write Python code at any point; an external sandbox runs it and you see what it prints and shows. \
Plan at length before each piece of code and reflect on every result: do not solve the problem by running code alone.
- Input picture i is already loaded as the global variable `image_clue_i`, a PIL image. Do not load it again.
- This is a question about a picture, so use Python wherever it could help you see: zoom in, rotate, raise the contrast, measure, isolate a part (matplotlib serves well).
- Show a result with `plt.show()` and do not save files; use `print()` for values. Each script is complete, imports included.
- The result comes back inside <interpreter></interpreter>.
Write code in this form:
<code>
```python
your code
```
</code>
Finish with the answer in this form:
<answer>
\\boxed{{the answer}}
</answer>

*image resolution:*
Image Width: {width}; Image Height: {height}

*user question:*
Answer the question about the picture, with the final answer in a box. {query}

Remember the form of the answer: <answer>
\\boxed{{the answer}}
</answer>"""

# The question alone, for policies whose SFT data teaches the form (the demo's 0.6 M parameters).
BRIEF = "{query}"

TEMPLATES = {"image": IMAGE, "brief": BRIEF}
