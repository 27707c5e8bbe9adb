"""One conversation in three dialects is one prompt, and DeepSeek's own readers and encoders draw the same one.

Random conversations (`tests.support.stories`) go as Chat, Responses and Messages bodies through the endpoints' readers.
Template `official` is held equal to `deepseek-recipe`, which reads the plain bodies of all three dialects itself;
template `ds4` has to give the same prompt for the three, whatever the family.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ds4.engine.model_file import open_model_file
from ds4.prompt.registry import SYNTAXES
from ds4.server.api.prepare import Preparer
from ds4.testing import ScriptedEngine
from tests.support.prompts import special_ranges
from tests.support.stories import DIALECTS, Dialect, Stories, Story

recipe = pytest.importorskip("deepseek_recipe")

MODELS = [
    pytest.param("deepseek4", "DeepSeek-V4-Pro", recipe.DeepseekV4Encoding(), id="V4"),
    pytest.param("deepseek41", "DeepSeek-V4.1-Flash", recipe.DeepseekV41Encoding(), id="V4.1"),
]
READERS: dict[Dialect, Any] = {
    "chat": recipe.ChatCompletionRequest,
    "responses": recipe.ResponsesRequest,
    "messages": recipe.MessagesRequest,
}
NAMED = ("none", "low", "medium", "high", "max")


def seed_of_run() -> int:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return seed


def theirs(story: Story, dialect: Dialect, model: str, *, joined: bool) -> Any:
    """The conversation that DeepSeek's reader makes of a plain body."""
    body = story.body(dialect, plain=True, joined=joined) | {"model": model}
    return READERS[dialect](json.dumps(body)).convert(recipe.ConversionOptions()).conversation


def comparable(story: Story, dialect: Dialect, syntax: str) -> bool:
    """Their reader of Messages turns system messages for V4 into reminders inside of user turns."""
    return not (dialect == "messages" and syntax == "deepseek4" and story.has_late_system)


def official_stories(seed: int) -> Stories:
    """What would close its own wrapper is escaped here and not there (`tests/prompt/test_deepseek_recipe.py`), and
    their reader of Responses sorts the calls of a turn by their ids."""
    return Stories(seed, NAMED, closing=False, rising=True)


def hold_official_equal(syntax: str, model: str, encoding: Any, seed: int, count: int) -> None:
    preparer = Preparer(ScriptedEngine(syntax=syntax), 100, template="official")
    source = official_stories(seed)
    compared: Counter[Dialect] = Counter()
    conversations = 0
    while min(compared[dialect] for dialect in DIALECTS) < count:
        story = source.story()
        joined = conversations % 2 == 1
        conversations += 1
        for dialect in DIALECTS:
            if not comparable(story, dialect, syntax):
                continue
            drawn = encoding.render_conversation(theirs(story, dialect, model, joined=joined))
            ours = preparer.renderer.render(story.read(dialect, preparer, joined=joined))
            assert ours.text == drawn.prompt, (seed, conversations, dialect, story)
            assert special_ranges(ours) == list(drawn.special_ranges), (seed, conversations, dialect, story)
            compared[dialect] += 1
    print(f"{syntax}: {conversations} conversations equal to deepseek-recipe, requests {dict(compared)}")


@pytest.mark.parametrize(("syntax", "model", "encoding"), MODELS)
def test_official_prompts_are_deepseeks_own(syntax: str, model: str, encoding: Any) -> None:
    hold_official_equal(syntax, model, encoding, seed_of_run(), 250)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("syntax", "model", "encoding"), MODELS)
def test_official_prompts_are_deepseeks_own_thousandfold(syntax: str, model: str, encoding: Any) -> None:
    hold_official_equal(syntax, model, encoding, seed_of_run(), 5000)


def hold_dialects_equal(syntax: str, seed: int, count: int) -> None:
    preparer = Preparer(ScriptedEngine(syntax=syntax), 100)
    source = Stories(seed, (*NAMED, 0, 1, 40, 100) if preparer.syntax.levels else NAMED)
    for i in range(count):
        story = source.story()
        drawn = [preparer.renderer.render(story.read(dialect, preparer)) for dialect in DIALECTS]
        assert drawn[0] == drawn[1], (seed, i, story)
        assert drawn[0] == drawn[2], (seed, i, story)
    print(f"{syntax}: {count} conversations, {3 * count} requests: one prompt each")


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_three_dialects_are_one_prompt(syntax: str) -> None:
    hold_dialects_equal(syntax, seed_of_run(), 200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_three_dialects_are_one_prompt_thousandfold(syntax: str) -> None:
    hold_dialects_equal(syntax, seed_of_run(), 5000)


def test_token_ids_are_deepseeks_own() -> None:
    file = Path(os.environ.get("DS4_TEST_MODELS", "")) / "v4-nano/tokenizer.json"
    if not file.is_file():
        pytest.skip("DS4_TEST_MODELS names no folder with v4-nano")
    encoding = recipe.DeepseekV4Encoding().with_tokenizer(recipe.Tokenizer.from_file(str(file)))
    tokenizer = open_model_file(file.parent).tokenizer()
    preparer = Preparer(ScriptedEngine(syntax="deepseek4"), 100, template="official")
    seed = seed_of_run()
    source = official_stories(seed)
    for i in range(150):
        story = source.story()
        for dialect in DIALECTS:
            if not comparable(story, dialect, "deepseek4"):
                continue
            ids = tokenizer.encode_segments(preparer.renderer.render(story.read(dialect, preparer)).segments)
            wanted = encoding.encode(theirs(story, dialect, "DeepSeek-V4-Pro", joined=False))
            assert ids == wanted, (seed, i, dialect, story)
