"""The agent loop with real tools: what code does to a trajectory, budgets, and that text and pixels go together."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from scripted import ScriptedEngine

from pyvision_jax.agents.loop import AgentLoop
from pyvision_jax.agents.pyvision import PyVisionImage
from pyvision_jax.config import ImageConfig, ProtocolConfig, RewardConfig, RolloutConfig
from pyvision_jax.data.media import ImageStore
from pyvision_jax.data.records import Media, Message, Part
from pyvision_jax.models.positions import mrope_positions
from pyvision_jax.rewards.pyvision import score
from pyvision_jax.rollout.trajectory import EndReason
from pyvision_jax.worlds import needle, tiny
from pyvision_sandbox import Policy, SandboxError, SandboxPool, SandboxUnavailable, Session

IMAGE = ImageConfig(tiny.MIN_PIXELS, tiny.MAX_PIXELS, 9.0)
ANSWER = "<answer>\n\\boxed{7}\n</answer><end>"


def code(text: str) -> str:
    return f"<code>\n```python\n{text}\n```\n</code>"


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(Policy(profile="numpy_pil", cell_timeout=0.5, grace=0.3), workers=4) as pool:
        yield pool


def collect(pool, turns, *, n=1, records=None, max_length=600, max_turn_length=400, **options):
    """Rollouts of one task whose policy says `turns` (the last one again and again)."""
    config = ProtocolConfig(template="brief", max_calls=2, **options)
    tokens = tiny.tokenizer()
    protocol = PyVisionImage(config, IMAGE, tokens, tiny.processor(), tiny.model_spec(tokens), needle.GENERATORS)
    rollout = RolloutConfig(
        slots=4,
        max_length=max_length,
        max_turn_length=max_turn_length,
        chunk=16,
        prefill_buckets=(64,),
        patch_buckets=(36,),
    )
    engine = ScriptedEngine(lambda sibling, turn: turns[min(turn, len(turns) - 1)], rollout, protocol.tags)
    store = ImageStore()
    loop = AgentLoop(engine, protocol, pool, config, tokens, store, threads=4)
    try:
        collected = loop.collect(records or [needle.task("eval", 0)], group_size=n, seed=1)
    finally:
        loop.close()
    assert not engine._rows, "every handle is released"
    return collected, store, tokens


def one(pool, turns, **options):
    collected, store, tokens = collect(pool, turns, **options)
    return collected.groups[0][0], store, tokens


def observations(trajectory, tokens):
    return [tokens.decode(trajectory.ids[s.start : s.end]) for s in trajectory.spans if s.kind == "observation"]


def test_a_call_and_an_answer(pool):
    trajectory, store, tokens = one(pool, [code("image_clue_0.crop((0, 0, 96, 96))"), ANSWER])
    assert trajectory.end_reason is EndReason.ANSWERED and trajectory.answer == "7"
    assert [span.kind for span in trajectory.spans] == ["prompt", "policy", "observation", "policy"]
    assert trajectory.spans[-1].end == len(trajectory.ids)
    assert [a.end for a in trajectory.spans[:-1]] == [b.start for b in trajectory.spans[1:]]
    assert len(trajectory.images) == 2 and trajectory.calls[0].images == [trajectory.images[1]]
    shown = store.get(trajectory.images[1])
    expected = tiny.processor().process(needle.draw("eval", 0).crop((0, 0, 96, 96)))
    assert np.array_equal(shown.pixels, expected.pixels), "the sandbox shows the crop that the text asks for"
    spec = tiny.model_spec(tokens)
    positions, _ = mrope_positions(trajectory.ids, trajectory.image_grids, [], spec)
    assert np.array_equal(positions, trajectory.positions), "turn by turn is equal to at once (U18)"
    assert trajectory.policy_mask.sum() == sum(s.end - s.start for s in trajectory.spans if s.kind == "policy")


def test_the_rollout_of_a_trace_has_the_ids_of_the_trace(pool):
    record = needle.trace("eval", 3, "coarse_tight")
    said = ["".join(part.text for part in m.parts) for m in record.messages if m.role == "assistant"]
    trajectory, _, tokens = one(pool, [said[0], said[1], said[2] + "<end>"], records=[needle.task("eval", 3)])
    spec = tiny.model_spec(tokens)
    protocol = PyVisionImage(
        ProtocolConfig(template="brief", max_calls=2), IMAGE, tokens, tiny.processor(), spec, needle.GENERATORS
    )
    example = protocol.example(record)
    assert list(trajectory.ids) == list(example.ids[: len(trajectory.ids)])
    assert tokens.decode(example.ids[len(trajectory.ids) :]) == "\n"
    assert [image.hash for image in example.images] == trajectory.images
    assert np.array_equal(example.positions[:, : len(trajectory.ids)], trajectory.positions)


@pytest.mark.parametrize(
    "text, seen",
    [
        ("print('USEFUL 42')\n1/0", ["USEFUL 42", "ZeroDivisionError", "line 2"]),
        ("print('x')\nimport sys\nsys.exit(0)", ["x"]),
        ("while True: pass", ["time limit"]),
        ("print('a' * 5_000_000)", ["cut"]),
        ("import os\nos._exit(1)", []),
        ("image_clue_0.resize((900, 10))", ["too elongated"]),
    ],
)
def test_tool_code_that_misbehaves_is_an_observation_and_the_run_goes_on(pool, text, seen):
    trajectory, _, tokens = one(pool, [code(text), ANSWER], max_length=4_000, max_text=600)
    assert trajectory.end_reason is EndReason.ANSWERED
    (observed,) = observations(trajectory, tokens)
    for word in seen:
        assert word in observed
    assert len(observed) < 1_200


@pytest.mark.parametrize(
    "text, reason",
    [
        ("1/0", EndReason.TOOL_ERROR),
        ("while True: pass", EndReason.TOOL_TIMEOUT),
        ("import os; os._exit(1)", EndReason.TOOL_ERROR),
    ],
)
def test_error_policy_stop(pool, text, reason):
    trajectory, _, _ = one(pool, [code(text), ANSWER], error_policy="stop")
    assert trajectory.end_reason is reason
    assert len(trajectory.calls) == 1 and trajectory.tool_calls == 0


def test_state_lives_over_turns(pool):
    trajectory, _, tokens = one(pool, [code("keep = 41"), code("print(keep + 1)"), ANSWER])
    assert "42" in observations(trajectory, tokens)[1]


def test_returned_figures_become_variables_where_asked(pool):
    turns = [code("image_clue_0.crop((0, 0, 96, 64))"), code("print(image_clue_1.size)"), ANSWER]
    bound, _, tokens = one(pool, turns, bind_figures=True)
    assert "(96, 64)" in observations(bound, tokens)[1]
    free, _, _ = one(pool, turns)
    assert not free.calls[1].ok


def test_budgets(pool):
    crop = code("image_clue_0.crop((0, 0, 96, 96))")
    turns, _, _ = one(pool, [crop])
    assert turns.end_reason is EndReason.OVER_TURNS and len(turns.calls) == 2
    pictures, _, _ = one(pool, [crop], max_images=2)
    assert pictures.end_reason is EndReason.OVER_IMAGES and len(pictures.images) == 2
    prompt = turns.spans[0].end
    length, _, _tokens = one(pool, [crop], max_length=prompt + 30)
    assert length.end_reason is EndReason.OVER_LENGTH
    assert len(length.images) == 1 and length.spans[-1].kind == "policy", "no placeholder without room for all (U03)"
    turn, _, _ = one(pool, ["x" * 50], max_turn_length=20)
    assert turn.end_reason is EndReason.OVER_LENGTH and turn.policy_mask.sum() == 20


def test_malformed_turns(pool):
    stopped, _, _ = one(pool, ["hello<end>"], error_policy="stop")
    assert stopped.end_reason is EndReason.MALFORMED
    told, _, tokens = one(pool, ["hello<end>", ANSWER])
    assert told.end_reason is EndReason.ANSWERED and "Neither code nor an answer" in observations(told, tokens)[0]
    never, _, _ = one(pool, ["hello<end>"])
    assert never.end_reason is EndReason.MALFORMED


def test_tool_off_refuses_and_forced_answers_are_a_prefix(pool):
    off, _, tokens = one(pool, [code("1"), ANSWER], tool="off")
    assert off.calls == [] and "switched off" in observations(off, tokens)[0]
    forced, _, _ = one(pool, ["4}\n</answer><end>"], force_answer=True)
    assert forced.answer == "4" and [s.kind for s in forced.spans] == ["prompt", "prefix", "policy"]
    assert not forced.spans[1].learn


def test_a_broken_record_is_skipped_and_listed(pool):
    good, bad = needle.task("eval", 0), needle.task("eval", 1)
    bad = dataclasses.replace(bad, media=(Media("image", data=b"not a picture"),))
    asked = needle.task("eval", 2).messages[0]
    wordy = dataclasses.replace(asked, parts=(asked.parts[0], Part("text", "x " * 2_000)))
    long = dataclasses.replace(needle.task("eval", 2), id="long", messages=(wordy,))
    collected, _, _ = collect(pool, [ANSWER], records=[bad, good, long], n=2)
    assert [len(group) for group in collected.groups] == [0, 2, 0]
    assert [name for name, _ in collected.skipped] == [bad.id, "long"]
    assert "picture" in collected.skipped[0][1] and "max_length" in collected.skipped[1][1]


def test_the_reward_pays_successful_calls_of_right_answers(pool):
    task = needle.task("eval", 0)
    right = f"<answer>\n\\boxed{{{task.answer.value}}}\n</answer><end>"
    good, _, _ = one(pool, [code("image_clue_0.crop((0, 0, 96, 96))"), code("print(1)"), right])
    assert score(good, task, RewardConfig()) == {
        "accuracy": 1.0,
        "tool_bonus": pytest.approx(0.2),
        "total": pytest.approx(1.2),
    }
    failing, _, _ = one(pool, [code("1/0"), right])
    assert score(failing, task, RewardConfig())["total"] == 1.0, "a call that failed is not paid (U37)"
    wrong, _, _ = one(pool, [code("print(1)"), "<answer>\n\\boxed{99}\n</answer><end>"])
    assert score(wrong, task, RewardConfig())["total"] == 0.0
    once = score(good, task, RewardConfig(bonus_form="once"))
    assert once["tool_bonus"] == pytest.approx(0.1)


def test_a_picture_left_out_keeps_its_number_in_the_context_and_in_the_session(pool):
    both = code("display(image_clue_0.resize((900, 10)))\nimage_clue_0.resize((50, 60))")
    trajectory, _, tokens = one(pool, [both, code("print(image_clue_2.size)"), ANSWER], bind_figures=True)
    first, second = observations(trajectory, tokens)
    assert "<image_clue_2>" in first and "<image_clue_1>" not in first and "too elongated" in first
    assert "(50, 60)" in second


def test_a_record_that_stands_twice_in_a_step_has_trajectories_of_its_own(pool):
    task = needle.task("eval", 0)
    collected, _, _ = collect(pool, [ANSWER], records=[task, task], n=2)
    assert len({trajectory.id for group in collected.groups for trajectory in group}) == 4


def test_a_task_with_two_user_messages_is_skipped(pool):
    task = needle.task("eval", 0)
    twice = dataclasses.replace(task, messages=(*task.messages, Message("user", (Part("text", "and?"),))))
    collected, _, _ = collect(pool, [ANSWER], records=[twice])
    assert collected.groups == [[]] and "one user message" in collected.skipped[0][1]


SOME = Policy(profile="numpy_pil", cell_timeout=10)


def test_calls_of_different_trajectories_overlap():
    sleep = code("import time; time.sleep(0.4)")
    with SandboxPool(SOME, workers=4) as pool:
        start = time.monotonic()
        collected, _, _ = collect(pool, [sleep, ANSWER], n=4)
        seconds = time.monotonic() - start
        metrics = pool.metrics()
    assert [t.end_reason for t in collected.groups[0]] == [EndReason.ANSWERED] * 4
    assert metrics.run.count == 4 and metrics.run.total > 1.6 and metrics.sessions == 0
    assert max(t.calls[0].seconds for t in collected.groups[0]) < seconds < metrics.run.total + 2


def test_more_trajectories_than_places(pool):
    """Those that have a session go on; the others wait for a place, and none is left out."""
    turns = [code("x = 41"), code("print(x + 1)"), ANSWER]
    records = [needle.task("eval", k) for k in range(3)]
    with SandboxPool(SOME, workers=2, max_sessions=2) as small:
        scarce, _, tokens = collect(small, turns, n=4, records=records)
        assert small.metrics().sessions == 0 and small._places == 2
    plenty, _, _ = collect(pool, turns, n=4, records=records)
    for few, many in zip(scarce.groups, plenty.groups, strict=True):
        assert [list(a.ids) for a in few] == [list(a.ids) for a in many]
        assert all("42" in observations(t, tokens)[1] for t in few)


def kill_server(pool):
    """As a kernel out of memory does; at level `namespaces` the server is the child of what was started."""
    zygote = pool._zygotes[0]
    pid = zygote.process.pid
    inside = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for each in inside if pool.level == "namespaces" else [pid]:
        os.kill(int(each), signal.SIGKILL)
    zygote.process.wait()


def test_a_server_that_dies_is_made_good_by_replay(monkeypatch):
    turns = [
        code("x = np.random.rand(); open('note', 'w').write('kept')"),
        code("print(x, open('note').read())"),
        ANSWER,
    ]
    run = Session.run
    deaths = []

    def deadly(self, text, *args, **kwargs):
        if "print" in text and deaths:
            deaths.pop()
            kill_server(pool)
        return run(self, text, *args, **kwargs)

    with SandboxPool(SOME, workers=2) as pool:
        whole, _, tokens = one(pool, turns)
        monkeypatch.setattr(Session, "run", deadly)
        deaths.append(1)
        mended, _, _ = one(pool, turns)
        assert mended.end_reason is EndReason.ANSWERED and list(mended.ids) == list(whole.ids)
        assert "kept" in observations(mended, tokens)[1] and mended.calls[1].ok
        deaths.extend([1, 1])
        lost, _, _ = one(pool, turns)
        assert lost.end_reason is EndReason.INFRASTRUCTURE and [c.result["status"] for c in lost.calls] == [
            "ok", "infrastructure",
        ]  # fmt: skip
        assert pool.metrics().sessions == 0


def test_a_start_that_fails_is_tried_once_more(monkeypatch):
    fails = [1]
    start = SandboxPool.session

    def unsure(self, *args, **kwargs):
        if fails:
            fails.pop()
            raise SandboxError("no process")
        return start(self, *args, **kwargs)

    monkeypatch.setattr(SandboxPool, "session", unsure)
    with SandboxPool(SOME, workers=1) as pool:
        good, _, _ = one(pool, [code("1"), ANSWER])
        assert good.end_reason is EndReason.ANSWERED
        fails.extend([1, 1])
        bad, _, _ = one(pool, [code("1"), ANSWER])
        assert bad.end_reason is EndReason.INFRASTRUCTURE and bad.calls[0].result["error"]["message"] == "no process"


def test_sessions_are_closed_when_collect_fails(monkeypatch):
    """And the calls that still run are cancelled: nobody waits for their time limit."""
    turns = [code("x = 1"), code("import time; time.sleep(8)")]
    with SandboxPool(SOME, workers=4) as pool:
        results = AgentLoop._result
        seen = []

        def failing(self, live, *args):
            seen.append(live)
            if len(seen) == 5:
                raise KeyError("a bug")
            return results(self, live, *args)

        monkeypatch.setattr(AgentLoop, "_result", failing)
        start = time.monotonic()
        with pytest.raises(KeyError, match="a bug"):
            collect(pool, turns, n=4)
        assert pool.metrics().sessions == 0 and pool._places == pool.max_sessions
        assert time.monotonic() - start < 7


def test_where_sampled_code_must_not_run_the_loop_says_so():
    try:
        pool = SandboxPool(SOME, "seccomp", max_level="seccomp")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with pool, pytest.raises(SandboxUnavailable, match="sampled code does not run"):
        one(pool, [code("1"), ANSWER])
