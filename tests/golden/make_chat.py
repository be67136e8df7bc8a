"""Makes chat.json: conversations and the text that transformers renders for them with Qwen2.5-VL's released template.

    python tests/golden/make_chat.py TEMPLATE    # file with the `chat_template` of Qwen/Qwen2.5-VL-7B-Instruct

The template itself is not part of this repository; only the rendered texts are.
"""

import json
import sys
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

IMAGE, VIDEO = {"type": "image"}, {"type": "video"}


def say(role: str, *parts: str | dict) -> dict:
    return {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


SYSTEM = say("system", "You are a careful reader.\nUse code.")
ASK = say("user", IMAGE, "Which digit is in the red box?")
CALL = say(
    "assistant", "<think>Look closer.</think>\n<code>\n```python\nshow(image_clue_0.crop((0, 0, 9, 9)))\n```\n</code>"
)
SEEN = say("tool", "<interpreter>", IMAGE, "</interpreter>")
ANSWER = say("assistant", "<answer>\\boxed{7}</answer>")

CONVERSATIONS = {
    "no system": [say("user", "Hello")],
    "system": [SYSTEM, say("user", "Hello")],
    "one image": [ASK],
    "image last": [say("user", "What is this?", IMAGE)],
    "two images": [say("user", IMAGE, "and ", IMAGE, " differ how?")],
    "adjacent images": [say("user", IMAGE, IMAGE, "Same?")],
    "image only": [say("user", IMAGE)],
    "video": [say("user", VIDEO, "How many cuts?")],
    "image and video": [say("user", IMAGE, VIDEO, "Is it in the clip?")],
    "system with image": [say("system", "The map: ", IMAGE), say("user", "Where am I?")],
    "history": [ASK, ANSWER, say("user", "Sure?")],
    "tool turn": [ASK, CALL, SEEN],
    "two tool turns": [SYSTEM, ASK, CALL, SEEN, CALL, SEEN, ANSWER],
    "tool without image": [ASK, CALL, say("tool", "NameError: x\n")],
    "observation as user": [ASK, CALL, say("user", "<interpreter>", IMAGE, "</interpreter>")],
    "empty text": [say("user", "")],
    "late system": [say("user", "Hi"), say("system", "Be brief."), say("user", "Who are you?")],
    "line ends": [say("user", "\n\nleading and trailing\n\n"), say("assistant", "\n\nso\n"), say("user", "  \n")],
    "scripts": [say("user", "Größe? 你好 🙂 \u00e9t\u00e9 \t\ttabs 3.14159  x")],
    "text parts": [say("user", "one ", "two", " three", IMAGE, "four", "five")],
}


def main() -> None:
    template = Path(sys.argv[1]).read_text(encoding="utf-8")
    out = []
    for name, messages in CONVERSATIONS.items():
        for generation in (True, False):
            (text,), _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=generation)
            out.append({"name": name, "messages": messages, "generation": generation, "text": text})
    Path(__file__).with_name("chat.json").write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
